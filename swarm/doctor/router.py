"""The way in: what kind of router is before this machine, whether it maps ports, whether a relay can stand in."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import ClassVar, Final

from swarm.discovery.dht.addresses import free_port
from swarm.discovery.dialable import is_public
from swarm.discovery.interfaces import behind_router, interface_addresses
from swarm.discovery.node_record import split_address
from swarm.discovery.record_fields import RecordError
from swarm.doctor.diagnosis import Diagnosis, hint, ok, trouble
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
_FORWARD: Final = "forward a TCP port on the router and give --announce-address PUBLIC-ADDRESS:PORT"

AskRelays = Callable[[], Awaitable[Sequence[RelayWord]]]


@dataclass(frozen=True, slots=True)
class RouterCheck:
    """What kind of router is before this machine.

    Attributes:
        own: this machine's IP addresses.
        relays: what relays said.
        view: what peers of the directory said, where there are no two relays.
    """

    name: ClassVar[str] = "router"
    own: Callable[[], Sequence[str]]
    relays: AskRelays
    view: Callable[[], Awaitable[SwarmView | None]]

    async def look(self) -> Sequence[Diagnosis]:
        """Direct, cone or symmetric; or not known."""
        seen = [(word.relay, found) for word in await self.relays() if (found := _split(word.seen)) is not None]
        view = await self.view()
        peers = [about.seen for about in (view.abouts if view is not None else ()) if about.seen]
        hosts, own = {host for _, (host, _) in seen} or set(peers), set(self.own())
        if hosts and hosts <= own:
            return [ok("direct", "none: peers see this machine under an address of its own")]
        by_ipv4 = [(relay, found) for relay, found in seen if ":" not in found[0]]  # IPv6 has no ports to map
        if len({found for _, found in by_ipv4}) > 1:
            text = "symmetric: every peer sees another port, so no hole can be made; a relay or a mapped port will do"
            return [hint("symmetric", text, _FORWARD)]
        if len({relay for relay, _ in by_ipv4}) > 1:
            return [ok("cone", "cone: peers see one port, so holes can be made")]
        return [self._unknown(hosts, own)]

    def _unknown(self, hosts: set[str], own: set[str]) -> Diagnosis:
        if hosts:
            text = "there is one; its kind is not known, for less than two relays said whence this machine comes"
            return ok("router-unknown", text)
        if any(is_public(ip_address(ip)) for ip in own if ":" not in ip):
            return ok("public-address", "this machine has a public address of its own; nobody confirmed it")
        return ok("router-untried", "not known: nobody said whence this machine comes")


@dataclass(frozen=True, slots=True)
class MappingCheck:
    """Whether the router maps ports for whoever asks.

    Attributes:
        routers: ways to ask the router; none where there is no router to ask.
        seen: addresses under which others see this machine.
    """

    name: ClassVar[str] = "mapping"
    routers: Callable[[], Sequence[Router]]
    seen: Callable[[], Awaitable[Sequence[str]]]

    async def look(self) -> Sequence[Diagnosis]:
        """The first that works; else what each said."""
        refused: list[str] = []
        silent: list[str] = []
        for router in self.routers():
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
                return [await self._mapped(router.name, mapping.host)]
        return [self._not_mapped(refused, silent)]

    def _not_mapped(self, refused: Sequence[str], silent: Sequence[str]) -> Diagnosis:
        if refused:
            text = f"the router refuses to map a port: {'; '.join(refused)}"
            mend = f"allow it in the router's settings, or {_FORWARD}; a relay works without"
            return hint("mapping-refused", text, mend)
        if silent:
            text = f"the router does not map ports ({', '.join(silent)})"
            mend = f"switch UPnP or PCP on in the router, or {_FORWARD}; a relay works without"
            return hint("no-mapping", text, mend)
        return ok("mapping-untried", "not tried: no router was found")

    async def _mapped(self, protocol: str, external: str) -> Diagnosis:
        ip = ip_address(external)
        seen = {one for one in await self.seen() if ip_address(one).version == ip.version}
        if not is_public(ip) or (seen and external not in seen):
            kind = "the provider's" if ip in _CARRIER or not is_public(ip) else "a"
            text = f"{protocol} maps, and behind {kind} second router: nobody reaches the mapped port"
            return hint("double-router", text, "ask the provider for a public address, or rely on a relay")
        return ok("mapping", f"{protocol} maps ports")


@dataclass(frozen=True, slots=True)
class RelayCheck:
    """Whether a relay could carry this machine's links.

    Attributes:
        relays: what relays said.
        view: which relays the swarm has.
    """

    name: ClassVar[str] = "relay"
    relays: AskRelays
    view: Callable[[], Awaitable[SwarmView | None]]

    async def look(self) -> Sequence[Diagnosis]:
        """Those that answer."""
        view, words = await self.view(), await self.relays()
        if view is None or view.error or not any(survey.ahead_s is not None for survey in view.surveys):
            return [ok("relay-untried", "not known: no swarm was joined")]
        if not view.relays:
            text = "the swarm has no relay: who sits behind a router cannot serve it"
            return [
                hint("no-relay", text, "update its bootstrap peers (`swarm bootstrap` lends one), or open a port here")
            ]
        working = [word for word in words if word.answers]
        if not working:
            text = f"none of {len(view.relays)} relays answers"
            return [
                trouble(
                    "relay-silent", text, "let outgoing TCP to every port through the firewall, or use another network"
                )
            ]
        if all(word.circuits is not None and word.circuits >= word.limit > 0 for word in working):
            text = "every relay carries as many links as it takes"
            return [hint("relays-full", text, "lend one: start a node with an open port, or another `swarm bootstrap`")]
        return [ok("relay", f"{len(working)} of {len(view.relays)} relays answer")]


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
