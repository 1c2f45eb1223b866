"""Which router this machine's packets leave by. Reads the system's routes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from ipaddress import IPv4Address
from pathlib import Path
from typing import Final

from swarm.discovery.dialable import IpAddress, is_public

ROUTES: Final = Path("/proc/net/route")
MAX_GATEWAYS: Final = 2
_UP_GATEWAY: Final = 0x3
_GATEWAY_FIRST: Final = 1
"""Where routes cannot be read: most home routers have the first address of their network."""


def default_gateways(found: Iterable[IpAddress], routes: Path = ROUTES) -> list[IPv4Address]:
    """The routers of the default routes, those with the lowest metric first; a guess where they cannot be read.

    Args:
        found: this machine's own addresses, for the guess.
        routes: the kernel's table.
    """
    try:
        table = routes.read_text(encoding="ascii")
    except (OSError, UnicodeError):
        private = [ip for ip in found if isinstance(ip, IPv4Address) and not is_public(ip)]
        return [IPv4Address(int(ip) & ~0xFF | _GATEWAY_FIRST) for ip in private][:MAX_GATEWAYS]
    return parse_routes(table)


def parse_routes(table: str) -> list[IPv4Address]:
    """The gateways of the default routes in the kernel's table; lines that are odd are passed over."""
    routes: list[tuple[int, IPv4Address]] = []
    for line in table.splitlines()[1:]:
        columns = line.split()
        try:
            destination, gateway, flags, metric = columns[1], columns[2], int(columns[3], 16), int(columns[6])
            is_default = int(destination, 16) == 0 and int(columns[7], 16) == 0
            address = IPv4Address(int(gateway, 16).to_bytes(4, sys.byteorder)) if is_default else None
        except (ValueError, IndexError, OverflowError):
            continue
        if address is not None and flags & _UP_GATEWAY == _UP_GATEWAY:
            routes.append((metric, address))
    routes.sort(key=lambda route: route[0])
    return list(dict.fromkeys(address for _, address in routes))[:MAX_GATEWAYS]
