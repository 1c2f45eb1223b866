"""The way in: what kind of router is before this machine, whether it maps ports, whether a relay can stand in."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import Final

from swarm.discovery.dht.addresses import free_port
from swarm.discovery.dialable import is_public
from swarm.discovery.interfaces import behind_router, interface_addresses
from swarm.discovery.node_record import split_address
from swarm.discovery.sealing import RecordError
from swarm.doctor.ladder import Diagnosis, hint, ok, trouble, unknown
from swarm.doctor.relays import RelayWord
from swarm.doctor.swarm_view import SwarmView
from swarm.errors import RemoteProtocolError
from swarm.gateway.messages import PCP_NONCE_BYTES
from swarm.gateway.ports import FAILURES, NoMapping, PcpRouter, PmpRouter, Router
from swarm.gateway.routes import default_gateways
from swarm.gateway.upnp import UpnpRouter

ANY_PORT: Final = 0
MAP_S: Final = 120
"""Seconds for which a mapping is asked; it is given back at once."""
_NOT_TRIED: Final = re.compile("not tried|no router answers")
"""What UPnP says where there is nobody to refuse."""
_CARRIER: Final = ip_network("100.64.0.0/10")
_OPEN: Final = frozenset({"direct", "mapping"})
"""Kinds of findings after which this machine needs no relay."""
_BEHIND: Final = frozenset({"cone", "symmetric", "router-unknown", "double-router"})
_FORWARD: Final = "forward a TCP port on the router and give --announce-address PUBLIC-ADDRESS:PORT"


def look_at_router(own: Collection[str], relays: Sequence[RelayWord], view: SwarmView) -> Diagnosis:
    """What kind of router is before this machine: none, cone or symmetric; or not known."""
    seen = [(word.relay, found) for word in relays if (found := _split(word.seen)) is not None]
    hosts = {host for _, (host, _) in seen} or {about.seen for about in view.abouts if about.seen}
    if hosts and hosts <= set(own):
        return ok("direct", "none: peers see this machine under an address of its own")
    by_ipv4 = [(relay, found) for relay, found in seen if ":" not in found[0]]  # IPv6 has no ports to map
    if len({found for _, found in by_ipv4}) > 1:
        text = "symmetric: every peer sees another port, so no hole can be made; a relay or a mapped port will do"
        return hint("symmetric", text, _FORWARD)
    if len({relay for relay, _ in by_ipv4}) > 1:
        return ok("cone", "cone: peers see one port, so holes can be made")
    if hosts:
        text = "there is one; its kind is not known, for less than two relays said whence this machine comes"
        return ok("router-unknown", text)
    if any(is_public(ip_address(ip)) for ip in own if ":" not in ip):
        return ok("public-address", "this machine has a public address of its own; nobody confirmed it")
    return ok("router-untried", "not known: nobody said whence this machine comes")


async def look_at_mapping(routers: Sequence[Router], seen: Callable[[], Awaitable[Sequence[str]]]) -> Diagnosis:
    """Whether the router maps ports for whoever asks.

    Args:
        routers: ways to ask the router; none where there is no router to ask.
        seen: addresses under which others see this machine.
    """
    refused: list[str] = []
    silent: list[str] = []
    for router in routers:
        try:
            mapping = await router.map(ANY_PORT, MAP_S)
        except RemoteProtocolError as error:
            refused.append(f"{router.name} {error.reason}")
        except NoMapping as error:
            (silent if _NOT_TRIED.search(str(error)) else refused).append(f"{router.name}: {error}")
        except OSError:  # TimeoutError is one
            silent.append(f"{router.name}: no answer")
        else:
            await _give_back(router)
            return _mapped(router.name, mapping.host, await seen())
    if refused:
        text = f"the router refuses to map a port: {'; '.join(refused)}"
        mend = f"allow it in the router's settings, or {_FORWARD}; a relay works without"
        return hint("mapping-refused", text, mend)
    if silent:
        text = f"the router does not map ports ({', '.join(silent)})"
        mend = f"switch UPnP or PCP on in the router, or {_FORWARD}; a relay works without"
        return hint("no-mapping", text, mend)
    return ok("mapping-untried", "not tried: no router was found")


def _mapped(protocol: str, external: str, all_seen: Sequence[str]) -> Diagnosis:
    ip = ip_address(external)
    seen = {one for one in all_seen if ip_address(one).version == ip.version}
    if not is_public(ip) or (seen and external not in seen):
        kind = "the provider's" if ip in _CARRIER or not is_public(ip) else "a"
        text = f"{protocol} maps, and behind {kind} second router: nobody reaches the mapped port"
        return hint("double-router", text, "ask the provider for a public address, or rely on a relay")
    return ok("mapping", f"{protocol} maps ports")


def look_at_relays(relays: Sequence[RelayWord], view: SwarmView, way_in: Collection[str]) -> Diagnosis:
    """Whether a relay could carry this machine's links; where none can and nobody can dial it, it has no way in.

    Args:
        relays: what relays said.
        view: which relays the swarm has.
        way_in: the kinds of what was found out about the router and its mappings.
    """
    if not view.answering:
        return ok("relay-untried", "not tried: no swarm was joined")
    level = trouble if _BEHIND & set(way_in) and not _OPEN & set(way_in) else hint
    if not view.relays:
        kind, who = ("no-way-in", "nobody can dial this machine") if level is trouble else ("no-relay", "")
        text = "; ".join(filter(None, [who, "the swarm has no relay: who sits behind a router cannot serve it"]))
        return level(kind, text, f"update its bootstrap peers (`swarm bootstrap` lends one), or {_FORWARD}")
    working = [word for word in relays if word.answers]
    if not working and any(word.is_mute for word in relays):
        return unknown("relays accept connections and say nothing in time")
    if not working:
        text = f"none of {len(view.relays)} relays answers"
        mend = "let outgoing TCP to every port through the firewall, or use another network"
        return level("relay-silent", text, f"{mend}; or ask the swarm to lend a relay that runs")
    if all(word.circuits is not None and word.circuits >= word.limit > 0 for word in working):
        text = "every relay carries as many links as it takes"
        return hint("relays-full", text, "lend one: start a node with an open port, or another `swarm bootstrap`")
    return ok("relay", f"{len(working)} of {len(view.relays)} relays answer")


async def _give_back(router: Router) -> None:
    with suppress(*FAILURES):  # it ends by itself in two minutes
        await router.unmap()


def _split(seen: str) -> tuple[str, str] | None:
    try:
        host, port = split_address(seen)
    except RecordError:
        return None
    return host.strip("[]"), str(port)


def find_routers() -> Sequence[Router]:
    """Ways to ask the router of this machine's default route for a port; none where there is no router before it."""
    own = interface_addresses()
    gateways = default_gateways(own) if behind_router(own) else []
    port = free_port(4)
    found: list[Router] = []
    for gateway in map(str, gateways[:1]):
        found += PcpRouter(gateway, port, secrets.token_bytes(PCP_NONCE_BYTES)), PmpRouter(gateway, port)
        found.append(UpnpRouter(port))
    return found
