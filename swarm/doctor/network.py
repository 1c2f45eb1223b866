"""The way out, rung by rung: link, addresses, route, names, portal, proxy, outgoing ports, packets; IPv6 beside.

What answers is proof, whatever else looks wrong; silence is a verdict only where something else does answer.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from ipaddress import IPv6Address, ip_address
from typing import Final
from urllib.parse import urlsplit

from swarm.doctor.ladder import Diagnoses, Diagnosis, hint, ok, trouble, unknown
from swarm.doctor.probes import (
    FAR,
    HUB,
    ConnectProxy,
    LookedUp,
    Page,
    Resolve,
    TcpAnswer,
    ask_page,
    greet,
    is_address,
    knock,
)

HTTPS: Final = 443
HTTP: Final = 80
SLOW_NAMES_S: Final = 4.0
"""Programs give up on a name after about as long."""
SEGMENTS: Final = {1_240: 1_280, 1_160: 1_200}
"""Bytes of a segment, and the size of packets in which it travels with its headers."""
OWN_PROXY: Final = "CANOPY_PROXY"
"""The variable of the proxy by which all of Canopy's connections leave."""
_PROXIES: Final = ("https_proxy", "http_proxy", "all_proxy")
_NO_NAMES: Final = "resolvectl status, and a nameserver line in /etc/resolv.conf"


@dataclass(frozen=True, slots=True)
class NamedPeer:
    """A peer of the swarm that is meant.

    Attributes:
        address: multiaddress.
        origin: what it is called, by who named it, such as `the peer from CANOPY_JOIN`.
        host: name or address; empty where the multiaddress is malformed.
        port: TCP port; 0 where the multiaddress has none.
        is_tls: whether that is its TLS port.
    """

    address: str
    origin: str
    host: str = ""
    port: int = 0
    is_tls: bool = False

    @property
    def is_near(self) -> bool:
        """Whether it runs on this machine."""
        return is_address(self.host) and ip_address(self.host).is_loopback


@dataclass(frozen=True, slots=True)
class Outside:
    """Who answers out there.

    Attributes:
        peers: the best answer of each named peer, in order; None where its name is not found.
        beside: the best answer at port 443 of the peers' machines; None where a peer was reached.
        hub: the best answer of the hub's two ports; None where its name is not found.
        page: what is answered in the hub's name at port 80.
        proxied: what the proxy of the environment says to a wish for the hub; None where it says nothing.
    """

    peers: tuple[TcpAnswer | None, ...] = ()
    beside: TcpAnswer | None = None
    hub: TcpAnswer | None = None
    page: Page | None = None
    proxied: Page | None = None

    @property
    def best(self) -> TcpAnswer:
        """The best answer of a named peer."""
        return max((one for one in self.peers if one is not None), default=TcpAnswer.NO_WAY)


async def look_outside(peers: Sequence[NamedPeer], find: Resolve, pages: Pages) -> Outside:
    """Ask everybody at once; where no peer is reached, then port 443 of the same machines."""

    async def best(host: str, *ports: int) -> TcpAnswer | None:
        ips = (await find(host)).ips[:4]
        return max(await asyncio.gather(*(knock(ip, port) for ip in ips for port in ports)), default=None)

    async def of_peer(peer: NamedPeer) -> TcpAnswer | None:
        if not peer.host:
            return None
        if not peer.port:
            return TcpAnswer.MUTE  # only the directory can tell
        if pages.own is not None:
            return await greet(peer.host, peer.port, is_tls=peer.is_tls, proxy=pages.own)
        ips = (await find(peer.host)).ips[:4]
        return max(await asyncio.gather(*(greet(ip, peer.port, is_tls=peer.is_tls) for ip in ips)), default=None)

    answers, hub, page, proxied = await asyncio.gather(
        asyncio.gather(*map(of_peer, peers)), best(HUB, HTTPS, HTTP), pages.plain(), pages.proxied()
    )
    outside = Outside(tuple(answers), None, hub, page, proxied)
    if outside.best >= TcpAnswer.REFUSED or pages.own is not None:
        return outside
    silent = sorted({peer.host for peer in peers if peer.port})[:4]
    beside = await asyncio.gather(*(best(host, HTTPS) for host in silent))
    return replace(outside, beside=max((one for one in beside if one is not None), default=None))


@dataclass(frozen=True, slots=True)
class Pages:
    """Asks for the heads of two pages."""

    find: Resolve
    environment: Mapping[str, str]

    async def plain(self) -> Page | None:
        """What stands at port 80 in the hub's name: the hub itself sends everybody to its TLS port."""
        ips = (await self.find(HUB)).ips
        return await ask_page(ips[0], HTTP, f"GET / HTTP/1.1\r\nHost: {HUB}") if ips else None

    @property
    def own(self) -> ConnectProxy | None:
        """The proxy that was set for Canopy."""
        return own_proxy(self.environment)

    async def proxied(self) -> Page | None:
        """What the proxy says to a wish for the hub."""
        named = [self.own, *(ConnectProxy.of(value) for _, value in proxies_of(self.environment))]
        proxy = next((one for one in named if one is not None), None)
        ips = () if proxy is None else (await self.find(proxy.host)).ips
        return await ask_page(ips[0], proxy.port, proxy.wish(HUB, HTTPS)) if proxy is not None and ips else None


def look_at_link(interfaces: Mapping[str, bool], peers: Iterable[NamedPeer]) -> Diagnosis:
    up = [name for name, is_up in interfaces.items() if is_up]
    if up:
        return ok("link", f"{', '.join(up)} up")
    if _all_near(peers):
        return ok("link-not-needed", "no network; the swarm's peers are on this machine")
    if not interfaces:
        return trouble(
            "no-link", "this machine has no network interface", "ip link; plug a card in, or load its driver"
        )
    down = ", ".join(interfaces)
    mend = f"plug the cable in, or join a wireless network; sudo ip link set {next(iter(interfaces))} up"
    return trouble("link-down", f"no network interface is up ({down})", mend)


def look_at_addresses(own: Iterable[str], peers: Iterable[NamedPeer]) -> Diagnosis:
    """Whether this machine has an address with which others can be reached."""
    held = [ip for ip in map(ip_address, own) if not ip.is_loopback and not ip.is_link_local]
    if held:
        families = sorted({f"IPv{ip.version}" for ip in held})
        return ok("addresses", f"{' and '.join(families)}")
    if _all_near(peers):
        return ok("addresses-not-needed", "none; the swarm's peers are on this machine")
    text = "the link is up, and this machine has no address: the network gave it none"
    return trouble("no-address", text, "restart the router, then nmcli networking off && nmcli networking on")


def look_at_route(has_way: Callable[[str], bool], peers: Iterable[NamedPeer]) -> Diagnosis:
    """Whether the kernel knows a way out, or to the peers that are meant."""
    known = [peer.host for peer in peers if is_address(peer.host)]
    if any(map(has_way, FAR.values())):
        return ok("route", "there is a way to the Internet")
    if any(map(has_way, known)):
        return ok("route-near", "there is a way to the swarm's peers, and none to the Internet")
    return trouble("no-route", "an address, and no way out: no default route", "ip route; ask the router anew, by DHCP")


async def look_at_names(
    needed: Mapping[str, str],
    optional: Mapping[str, str],
    find: Resolve,
    ask: Callable[[], Awaitable[Sequence[float | None]]],
) -> Diagnoses:
    """Whether names are found, and how soon: those without which nothing goes, and others, by who gave them."""
    named = {what: host for what, host in {**optional, **needed}.items() if not is_address(host)}
    if not named:
        return ok("no-names", "no name is needed")
    found, answers = await asyncio.gather(asyncio.gather(*map(find, named.values())), ask())
    looked: dict[str, LookedUp] = dict(zip(named, found, strict=True))
    soonest = min((one for one in answers if one is not None), default=None)
    lost = [what for what, one in looked.items() if not one.ips]
    level = hint if optional.keys() >= set(lost or named) else trouble
    if soonest is not None and min([soonest, *(one.took_s for one in found if one.ips)]) > SLOW_NAMES_S:
        text = f"a name server takes {soonest:.1f} s to answer: programs give up before"
        return level("dns-slow", text, "name another server: resolvectl dns, or /etc/resolv.conf")
    if not lost:
        return ok("names", f"{', '.join(named)}: found")
    unnamed = [what for what in lost if looked[what].is_unknown]
    if unnamed and HUB not in map(named.get, unnamed):
        shown = ", ".join(unnamed)
        return level("name-unknown", f"{shown}: its name does not exist", f"check how the name is written: {shown}")
    if soonest is not None and not unnamed:
        return unknown(f"the names in {', '.join(lost)} were not found in time, though a name server answers")
    why = "no name server answers" if answers else "no name server is set"
    if unnamed:
        why = "the name server does not know them, and knows names of its own network at most"
    return level("no-dns", f"no name is found ({', '.join(lost)}): {why}", _NO_NAMES)


def look_for_portal(outside: Outside) -> Diagnosis:
    """Whether somebody else answers in the hub's name, as a hotel's page does before one has logged in."""
    page = outside.page
    if page is None:
        return ok("portal-untried", "nobody answers at port 80 in the hub's name")
    host = (urlsplit(page.location).hostname or "").lower()
    if host == HUB or host.endswith(f".{HUB}") or (page.status >= 400 and page.status != 511):
        return ok("no-portal", "web pages come from where they should")
    if outside.best is TcpAnswer.PEER:
        return hint("page-replaced", "web pages are replaced on the way; links are not", "ask who runs this network")
    text = "a page of this network stands before the Internet: it wants a login, or a consent"
    return trouble("portal", text, "open http://neverssl.com in a browser and log in")


def look_at_proxy(environment: Mapping[str, str], outside: Outside, *, has_socks: bool) -> Diagnosis:
    """What the proxy of the environment is good for, and whether it is the only way out."""
    if environment.get(OWN_PROXY):
        return _own_proxy(environment[OWN_PROXY], outside)
    found = proxies_of(environment)
    if not found:
        return ok("no-proxy", "no proxy variable is set")
    names = ", ".join(sorted(name for name, _ in found))
    for name, value in found:
        scheme = match[1].lower() if (match := re.match(r"([A-Za-z0-9+.-]+)://", value)) else "http"
        if scheme.startswith("socks") and not has_socks:
            text = f"{name} names a SOCKS proxy, which downloads cannot speak yet: they fail"
            return hint("proxy-socks", text, "pip install socksio")
        if scheme not in {"http", "https", "socks5", "socks5h"}:
            text = f"{name} begins with {scheme}://, which downloads do not understand: they fail"
            return hint("proxy-malformed", text, f"export {name}=http://HOST:PORT")
    direct = max(outside.best, outside.hub or TcpAnswer.NO_WAY) >= TcpAnswer.REFUSED
    if outside.proxied is not None and outside.proxied.status == 200 and not direct:
        text = f"this network lets nothing out but by its proxy ({names}), and links between machines go direct"
        return trouble("proxy-only", text, f"export {OWN_PROXY}=http://HOST:PORT, with that proxy's host and port")
    if outside.proxied is not None and outside.proxied.status == 407 and not direct:
        mend = "export https_proxy=http://USER:PASSWORD@HOST:PORT"
        return trouble("proxy-login", f"the proxy ({names}) wants a login", mend)
    text = f"{names}: downloads from the hub use it, links between machines do not"
    return hint("proxy", text, f"unset {names.replace(',', '')} if downloads should go direct too")


def _own_proxy(url: str, outside: Outside) -> Diagnosis:
    """What the proxy that was set for Canopy says."""
    mend = f"export {OWN_PROXY}=http://HOST:PORT, or http://USER:PASSWORD@HOST:PORT"
    if own_proxy({OWN_PROXY: url}) is None:
        return trouble("own-proxy-malformed", f"{OWN_PROXY} names no HTTP proxy", mend)
    if outside.best >= TcpAnswer.MUTE or (outside.proxied is not None and outside.proxied.status == 200):
        return ok("own-proxy", f"all goes out by {OWN_PROXY}")
    if outside.proxied is not None and outside.proxied.status == 407:
        return trouble("proxy-login", f"the proxy of {OWN_PROXY} wants a login", mend)
    why = "does not answer" if outside.proxied is None else f"refuses (HTTP {outside.proxied.status})"
    text = f"the proxy of {OWN_PROXY} {why}"
    return trouble("own-proxy-closed", text, f"check its host and port, or unset {OWN_PROXY} where none is needed")


def look_at_outgoing(peers: Sequence[NamedPeer], outside: Outside) -> Diagnosis:
    """Whether this network lets TCP out to the ports that links need."""
    if outside.best >= TcpAnswer.REFUSED:
        return ok("outgoing", "other machines are reached")
    if outside.beside is not None and outside.beside >= TcpAnswer.REFUSED:
        ports = ", ".join(sorted({str(peer.port) for peer in peers if peer.port}))
        text = f"TCP goes out to port 443 and not to {ports}: the same machines answer at 443 alone"
        mend = "ask whoever runs the swarm for a peer's TLS port, or whoever runs this network for outgoing TCP"
        return trouble("ports-closed", text, mend)
    by_proxy = outside.proxied is not None and outside.proxied.status == 200
    if by_proxy or (outside.hub is not None and outside.hub >= TcpAnswer.REFUSED):
        return ok("outgoing-web", "the hub is reached")
    if outside.peers and outside.hub is not None:
        text = "a way out is known, and nobody answers on it: neither the swarm's peers nor the hub"
        return trouble("no-answer", text, "restart the router; behind a firewall, let outgoing TCP through")
    return unknown("whether anything gets out: nobody answers, and few could be asked", "swarm doctor --join PEER")


async def look_at_packets(
    peers: Sequence[tuple[str, int]],
    takes: Callable[[str, int, int | None], Awaitable[bool | None]],
    interface: Callable[[str], str],
) -> Diagnosis:
    """Whether packets of full size arrive at a peer."""
    arrived = await takes(*peers[0], None) if peers else None
    if arrived is None:
        return ok("packets-untried", "nobody to try it with")
    if arrived:
        return ok("packets", "packets of full size arrive")
    for segment, size in SEGMENTS.items():
        if await takes(*peers[0], segment):
            text = f"packets of more than {size:,} bytes are lost on the way, and nobody says so (path MTU)"
            mend = f"sudo ip link set dev {interface(peers[0][0])} mtu {size}; for good: MSS clamping in the router"
            return trouble("black-hole", text, mend)
    return unknown("packets of full size have no answer, small ones neither")


async def look_at_ipv6(
    own: Iterable[str], has_way: Callable[[str], bool], hosts: Sequence[tuple[str, int]], find: Resolve
) -> Diagnosis:
    """Address, route, then whether anybody answers by IPv6."""
    if not any(isinstance(ip, IPv6Address) and ip.is_global for ip in map(ip_address, own)):
        return ok("no-ipv6", "none here; IPv4 is enough")
    if not has_way(FAR[socket.AF_INET6]):
        text = "an IPv6 address and no way out with it"
        return hint("ipv6-no-route", text, "ip -6 route; restart the router, or switch IPv6 off there")
    found = await asyncio.gather(*(find(host) for host, _ in hosts))
    targets = [(ip, port) for one, (_, port) in zip(found, hosts, strict=True) for ip in one.ips]
    by_ipv6, by_ipv4 = ([one for one in targets if (":" in one[0]) is is_6][:3] for is_6 in (True, False))
    if not by_ipv6:
        return ok("ipv6-untried", "an address and a route; nobody to try it with")
    answers = await asyncio.gather(*(knock(*one) for one in (*by_ipv6, *by_ipv4)))
    if max(answers[: len(by_ipv6)]) >= TcpAnswer.REFUSED:
        return ok("ipv6", "works")
    if max(answers[len(by_ipv6) :], default=TcpAnswer.SILENT) >= TcpAnswer.REFUSED:
        text = "a black hole: an address and a route, and nobody answers by IPv6 who does by IPv4"
        mend = "sudo sysctl -w net.ipv6.conf.all.disable_ipv6=1, and tell the provider"
        return hint("ipv6-black-hole", text, mend)
    return unknown("nobody answers by IPv6, nor by IPv4", "mend the network first")


def speaks_socks() -> bool:
    """Whether the library that SOCKS needs is installed."""
    return find_spec("socksio") is not None


def own_proxy(environment: Mapping[str, str]) -> ConnectProxy | None:
    """The proxy that was set for Canopy; None where none was, or its variable names none."""
    return ConnectProxy.of(environment.get(OWN_PROXY, ""), usual_port=3_128)


def proxies_of(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """The proxy variables that are set, in the order in which they count for TLS."""
    found = {name.lower(): value for name, value in environment.items() if value}
    return [(name, found[name]) for name in _PROXIES if name in found]


def _all_near(peers: Iterable[NamedPeer]) -> bool:
    near = [peer.is_near for peer in peers]
    return bool(near) and all(near)
