"""Addresses as `host:port`, an IPv6 host in brackets. Pure."""

from __future__ import annotations

import ipaddress
import re
from typing import Final


def split_host(address: str) -> tuple[str, int]:
    """The host, in its brackets if it has them, and the port of `host:port`.

    Raises:
        ValueError: the address is malformed, or of no one machine.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65_536:
        raise ValueError(f"{address[:80]!r} is not host:port")
    if not _names_a_machine(match["host"]):
        raise ValueError(f"{address[:80]!r} is not the address of one machine")
    return match["host"], int(match["port"])


def _names_a_machine(host: str) -> bool:
    """Whether a host is a name, or an IP address that one machine can have.

    A host that ends in a number has to be an IP address in full: resolvers read `0` and `0x7f.1` as addresses too.
    """
    is_ip = host.startswith("[") or _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]) is not None
    if not is_ip:
        return True
    try:
        ip = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None) or ip
    return not (mapped.is_unspecified or mapped.is_multicast or str(mapped) == "255.255.255.255")


_ADDRESS: Final = re.compile(
    r"(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})", re.ASCII
)
_NUMBER: Final = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")
