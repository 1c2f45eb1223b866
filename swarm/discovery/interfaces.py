"""The IP addresses of this machine's interfaces. Asks the system alone."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, ip_address

import psutil

from swarm.discovery.dialable import IpAddress, is_public


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
