"""The network around this machine: names, proxies of the environment, IPv6."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import IPv6Address, ip_address
from typing import ClassVar, Final

import psutil

from swarm.doctor.diagnosis import Diagnosis, hint, ok, trouble
from swarm.doctor.processes import on_thread

RESOLVE_S: Final = 4.0
CONNECT_S: Final = 3.0
_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy")
_FAR: Final = "2600::"
"""Some global IPv6 address: the kernel is asked for the way to it, and nothing is sent."""

ResolveName = Callable[[str], Awaitable[Sequence[str]]]
"""The IP addresses of a name; empty if it has none. It takes no longer than `RESOLVE_S`."""
TryConnect = Callable[[str, int], Awaitable[bool]]
"""Whether a TCP connection to an IP address comes about, within `CONNECT_S`."""


@dataclass(frozen=True, slots=True)
class DnsCheck:
    """Whether names are found.

    Attributes:
        hosts: names that options or variables give, by what they are, such as `the broker`; addresses among them are
            left alone.
        resolve: looks one up.
        optional: those of them without which all goes on.
    """

    name: ClassVar[str] = "dns"
    hosts: Mapping[str, str]
    resolve: ResolveName
    optional: frozenset[str] = frozenset()

    async def look(self) -> Sequence[Diagnosis]:
        """Those that are not found."""
        named = {what: host for what, host in self.hosts.items() if not is_address(host)}
        if not named:
            return [ok("no-names", "no name is needed")]
        answers = await asyncio.gather(*map(self.resolve, named.values()))
        lost = [what for what, found in zip(named, answers, strict=True) if not found]
        if not lost:
            return [ok("names", f"{', '.join(named)}: found")]
        if len(lost) == len(named):
            level = hint if self.optional.issuperset(lost) else trouble
            mend = "resolvectl status, and a nameserver line in /etc/resolv.conf"
            return [level("no-dns", f"no name is found ({', '.join(lost)})", mend)]
        return [
            trouble(
                "name-unknown",
                f"the name of {what} is not found, others are",
                f"check how the name of {what} is written",
            )
            for what in lost
        ]


@dataclass(frozen=True, slots=True)
class ProxyCheck:
    """What the proxy variables mean for Canopy.

    Attributes:
        environment: the process's variables.
        has_socks: whether what downloads from the hub can speak SOCKS.
    """

    name: ClassVar[str] = "proxy"
    environment: Mapping[str, str]
    has_socks: bool

    async def look(self) -> Sequence[Diagnosis]:
        """Each variable once."""
        found = {name.lower(): value for name, value in self.environment.items() if name.lower() in _PROXIES and value}
        if not found:
            return [ok("no-proxy", "no proxy variable is set")]
        names = ", ".join(sorted(found))
        for name, value in found.items():
            scheme = match[1].lower() if (match := re.match(r"([A-Za-z0-9+.-]+)://", value)) else "http"
            if scheme.startswith("socks") and not self.has_socks:
                text = f"{name} names a SOCKS proxy, which downloads cannot speak yet: they fail"
                return [trouble("proxy-socks", text, "pip install socksio")]
            if scheme not in {"http", "https", "socks5", "socks5h"}:
                text = f"{name} begins with {scheme}://, which downloads do not understand: they fail"
                return [trouble("proxy-malformed", text, f"export {name}=http://HOST:PORT")]
        text = f"{names}: downloads from the hub use it, links between machines never do and need a direct way out"
        return [hint("proxy", text, f"unset {names.replace(',', '')} if downloads should go direct too")]


@dataclass(frozen=True, slots=True)
class Ipv6Check:
    """Whether IPv6 is there, and leads anywhere.

    Attributes:
        addresses: this machine's own, all families.
        has_route: whether the kernel knows a way to the IPv6 Internet.
        hosts: names or addresses and ports of machines that are wanted anyway, to be tried by IPv6.
        resolve: looks a name up.
        connect: tries a connection.
    """

    name: ClassVar[str] = "ipv6"
    addresses: Callable[[], Sequence[str]]
    has_route: Callable[[], bool]
    hosts: Sequence[tuple[str, int]]
    resolve: ResolveName
    connect: TryConnect

    async def look(self) -> Sequence[Diagnosis]:
        """Address, route, then whether anybody answers."""
        own = [ip for ip in map(ip_address, self.addresses()) if isinstance(ip, IPv6Address) and ip.is_global]
        if not own:
            return [ok("no-ipv6", "none here; IPv4 is enough")]
        if not self.has_route():
            text = "an IPv6 address and no way out with it"
            return [hint("ipv6-no-route", text, "ip -6 route; restart the router, or switch IPv6 off there")]
        targets = [(ip, port) for ip, port in await self._targets() if ":" in ip][:3]
        if not targets:
            return [ok("ipv6-untried", "an address and a route; nobody to try it with")]
        answers = await asyncio.gather(*(self.connect(ip, port) for ip, port in targets))
        if any(answers):
            return [ok("ipv6", "works")]
        if await self._answers_by_ipv4():
            text = "a black hole: an address and a route, and nobody answers by IPv6 who does by IPv4"
            mend = "sudo sysctl -w net.ipv6.conf.all.disable_ipv6=1, and tell the provider"
            return [hint("ipv6-black-hole", text, mend)]
        return [hint("ipv6-silent", "nobody answers by IPv6, nor by IPv4", "mend the network first")]

    async def _targets(self) -> list[tuple[str, int]]:
        found = await asyncio.gather(*(self._resolved(host) for host, _ in self.hosts))
        return [(ip, port) for ips, (_, port) in zip(found, self.hosts, strict=True) for ip in ips]

    async def _resolved(self, host: str) -> Sequence[str]:
        return [host.strip("[]")] if is_address(host) else await self.resolve(host)

    async def _answers_by_ipv4(self) -> bool:
        targets = [(ip, port) for ip, port in await self._targets() if ":" not in ip][:3]
        return any(await asyncio.gather(*(self.connect(ip, port) for ip, port in targets)))


def is_address(host: str) -> bool:
    """Whether it is an IP address and no name."""
    try:
        ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


async def resolve(host: str) -> Sequence[str]:
    """The IP addresses of a name, as `ResolveName`."""
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await on_thread(lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):  # TimeoutError is one
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


async def connect(ip: str, port: int) -> bool:
    """Whether a TCP connection comes about, as `TryConnect`."""
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(ip, port)
    except OSError:
        return False
    writer.transport.abort()
    return True


def own_addresses() -> Sequence[str]:
    """All IP addresses of this machine, without zones."""
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        one.address.partition("%")[0]
        for held in psutil.net_if_addrs().values()
        for one in held
        if one.family in families
    ]


def has_ipv6_route() -> bool:
    """Whether the kernel knows a way to the IPv6 Internet; nothing is sent."""
    try:
        with closing(socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)) as probe:
            probe.connect((_FAR, 53))
    except OSError:
        return False
    return True


def speaks_socks() -> bool:
    """Whether the library that SOCKS needs is installed."""
    return find_spec("socksio") is not None
