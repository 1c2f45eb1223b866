"""Which addresses of others' records may be dialled, and which are this machine's own. Asks the system alone.

Nobody may use a machine to look into its own network.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import psutil

from swarm.directory.node_record import split_address
from swarm.directory.sealing import RecordError
from swarm.link.egress.streams import bracketed
from swarm.link.endpoint import first_stop, parse_relayed

RESOLVE_S = 2.0
"""How long a host name may take."""
MAX_TRIED = 4
"""Addresses of one name that are tried."""
NEXT_S, ANSWER_S = 0.25, 2.0
"""The next one is tried after so long; all of them together take at most the second number."""
_NAT64 = IPv6Network("64:ff9b::/96")

IpAddress = IPv4Address | IPv6Address


def is_public(ip: IpAddress) -> bool:
    """Whether it is an address of one machine on the Internet, and no way to reach another kind of address."""
    inner = _inside(ip)
    if inner is not None:
        return is_public(inner)
    return ip.is_global and not ip.is_multicast


def is_dialable(ip: IpAddress, *, own_is_public: bool) -> bool:
    """Whether a machine may call this address on a stranger's word.

    Args:
        own_is_public: whether the caller is reached under a public address: then it calls nothing but these. A machine
            of a private network calls all addresses of machines.
    """
    if own_is_public:
        return is_public(ip)
    return not (ip.is_multicast or ip.is_unspecified)


@dataclass(frozen=True, slots=True)
class DialPolicy:
    """What one machine dials.

    Attributes:
        only_public: whether private, loopback and link-local addresses are left alone.
    """

    only_public: bool

    @classmethod
    async def of(cls, *own_addresses: str, allow_private: bool) -> DialPolicy:
        """The policy of a machine that is reached at these `host:port`.

        Args:
            own_addresses: as they are announced; one of them may be public.
            allow_private: the owner's wish to call private addresses from a public one.
        """
        if allow_private:
            return cls(only_public=False)
        own = [await _resolve(first_stop(address)) for address in own_addresses]
        is_known = bool(own) and all(own)  # an unknown one is taken for public
        return cls(only_public=not is_known or any(is_public(ip) for ips in own for ip in ips))

    def allows(self, address: str) -> bool:
        """Whether an address may be dialled as it stands; a name may where any address may.

        Of a relayed address the relay's counts: that is what is dialled.
        """
        try:
            ip = ip_address(split_address(first_stop(address))[0].strip("[]"))
        except (RecordError, ValueError):
            return not self.only_public
        return is_dialable(ip, own_is_public=self.only_public)

    async def resolve(self, address: str) -> str | None:
        """The address with an IP for its host, which is the one to dial; None where it may not, or cannot, be dialled.

        A name is resolved once, here: asked again, it might name another machine. Of several addresses, such as one of
        each family, it is the first that answers.
        """
        relayed = parse_relayed(address)
        stop = first_stop(address)
        allowed = [ip for ip in await _resolve(stop) if is_dialable(ip, own_is_public=self.only_public)]
        distinct = list(dict.fromkeys(allowed))[:MAX_TRIED]
        if not distinct:
            return None
        port = split_address(stop)[1]
        ip = distinct[0] if len(distinct) == 1 else await _first_to_answer(distinct, port)
        found = f"{bracketed(str(ip))}:{port}"
        return found if relayed is None else str(replace(relayed, relay=found))


async def _first_to_answer(ips: Sequence[IpAddress], port: int) -> IpAddress:
    """The address of several that takes a connection first, a little apart; the first one where none does."""
    answered: list[IpAddress] = []

    async def knock(place: int, ip: IpAddress) -> None:
        await asyncio.sleep(place * NEXT_S)
        try:
            await _connect(str(ip), port)
        except OSError:
            return
        answered.append(ip)
        for other in knocking:
            other.cancel()

    with suppress(TimeoutError):
        async with asyncio.timeout(ANSWER_S), asyncio.TaskGroup() as tasks:
            knocking = [tasks.create_task(knock(place, ip)) for place, ip in enumerate(ips)]
    return answered[0] if answered else ips[0]


async def _connect(ip: str, port: int) -> None:
    _, writer = await asyncio.open_connection(ip, port)
    writer.close()


async def _look_up(host: str, port: int) -> Sequence[tuple[object, object, object, str, tuple[object, ...]]]:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


async def _resolve(address: str) -> list[IpAddress]:
    try:
        host, port = split_address(address)
    except RecordError:
        return []
    try:
        return [ip_address(host.strip("[]"))]
    except ValueError:
        pass
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await _look_up(host, port)
    except (OSError, TimeoutError, UnicodeError):
        return []
    return [ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]


def _inside(ip: IpAddress) -> IPv4Address | None:
    """The IPv4 address that an IPv6 one stands for: mapped, 6to4, NAT64."""
    if isinstance(ip, IPv4Address):
        return None
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFF_FFFF)
    return ip.ipv4_mapped or ip.sixtofour


def listed_addresses() -> list[tuple[IpAddress, str | None]]:
    """The addresses of the interfaces that are up, as the system lists them, each with its network mask if it has one.

    Loopback, link-local, multicast and unspecified ones are left out.
    """
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found: list[tuple[IpAddress, str | None]] = []
    for one in [one for name, every in psutil.net_if_addrs().items() if name in up for one in every]:
        try:
            ip = ip_address(one.address.partition("%")[0])
        except ValueError:
            continue  # a hardware address
        if not (ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified):
            found.append((ip, one.netmask))
    return found


def interface_addresses() -> tuple[IpAddress, ...]:
    """All addresses under which another machine could call this one, sorted, each once."""
    return tuple(sorted({ip for ip, _ in listed_addresses()}, key=lambda ip: (ip.version, int(ip))))


def behind_router(found: Iterable[IpAddress]) -> bool:
    """Whether no public IPv4 address is this machine's own."""
    return not any(is_public(ip) for ip in found if isinstance(ip, IPv4Address))


def is_reached_by_ipv6(found: Iterable[IpAddress], *, joins_by_ipv6: bool = False) -> bool:
    """Whether IPv6 is a way to this machine: beside a public IPv4 address, or where there is no other one.

    A machine behind an IPv4 router is of a private network, and goes on as one, unless it knows a peer by IPv6.
    """
    found = list(found)
    v4 = [ip for ip in found if isinstance(ip, IPv4Address)]
    v6 = [ip for ip in found if not isinstance(ip, IPv4Address)]
    if joins_by_ipv6:
        return bool(v6)
    return any(map(is_public, v6)) if any(map(is_public, v4)) else bool(v6) and not v4
