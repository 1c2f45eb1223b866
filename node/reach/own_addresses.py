"""Which of this machine's addresses peers are asked to call, and whether a swarm is one of private addresses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from swarm.discovery.dialable import IpAddress, is_public
from swarm.egress.streams import bracketed

MAX_CANDIDATES = 3
"""Own addresses that peers are asked to call: each peer dials back six times a minute for one machine."""
_LOOK_UP_S = 2.0


def candidates(
    host: str, port: int, found: Iterable[IpAddress], *, only_public: bool, prefers_ipv6: bool = False
) -> list[str]:
    """The `host:port` under which peers are asked to call this machine: public ones first, and one of each family.

    Args:
        host: the IP address to which the port is bound.
        port: the port.
        found: the addresses of the interfaces, for a wildcard.
        only_public: whether peers call no private address, so that to ask for it is vain.
        prefers_ipv6: whether this machine knows its peers by IPv6 alone.
    """
    bound = ip_address("127.0.0.1" if host == "localhost" else host)
    every: list[IpAddress] = list(found) if bound.is_unspecified else [bound]
    every.sort(key=lambda ip: (not is_public(ip), (ip.version == 4) is prefers_ipv6))
    asked = [ip for ip in every if is_public(ip) or not only_public]
    first = asked[:MAX_CANDIDATES]
    others = [ip for ip in asked[MAX_CANDIDATES:] if ip.version not in {one.version for one in first}]
    if others:
        first[-1] = others[0]
    return [f"{bracketed(str(ip))}:{port}" for ip in first]


def knows_ipv6_alone(join: Sequence[str]) -> bool:
    """Whether all peers that are joined are called by IPv6, as multiaddresses say."""
    return bool(join) and all(address.startswith(("/ip6/", "/dns6/")) for address in join)


async def is_public_swarm(join: Sequence[str]) -> bool:
    """Whether one of the peers that are joined has a public address: then peers call no private ones.

    Args:
        join: multiaddresses; a name is looked up.
    """
    for address in join:
        kind, host = address.split("/")[1:3]
        for ip in [ip_address(host)] if kind in ("ip4", "ip6") else await _look_up(host):
            if is_public(ip):
                return True
    return False


async def _look_up(host: str) -> list[IPv4Address | IPv6Address]:
    try:
        async with asyncio.timeout(_LOOK_UP_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError):
        return []
    return [ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
