"""The addresses of this machine that another one might reach: in its own network, and global ones of IPv6."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Address
from typing import Final

from swarm.discovery.dialable import IpAddress, is_public
from swarm.discovery.interfaces import listed_addresses

MAX_LAN: Final = 3
"""Addresses in own networks that are told."""
MAX_GLOBAL_V6: Final = 2


@dataclass(frozen=True, slots=True)
class OwnAddresses:
    """What this machine is called.

    Attributes:
        lan: private IPv4 addresses with their networks, as 192.168.1.7/24.
        global_v6: global IPv6 addresses.
    """

    lan: tuple[IPv4Interface, ...] = ()
    global_v6: tuple[IPv6Address, ...] = ()

    def is_in_lan(self, ip: IpAddress) -> bool:
        """Whether an address is in one of this machine's own private networks."""
        return any(ip in one.network for one in self.lan)

    def first(self, host: str) -> OwnAddresses:
        """The same with this address before the others: it is the one that leads out."""
        return OwnAddresses(tuple(sorted(self.lan, key=lambda one: str(one.ip) != host)), self.global_v6)


def own_addresses() -> OwnAddresses:
    """Those of the interfaces that are up; virtual networks of this machine may be among them."""
    lan: list[IPv4Interface] = []
    global_v6: list[IPv6Address] = []
    for ip, mask in listed_addresses():
        if isinstance(ip, IPv6Address):
            if is_public(ip):
                global_v6.append(ip)
        elif mask and ip.is_private:
            lan.append(IPv4Interface(f"{ip}/{mask}"))
    return OwnAddresses(tuple(lan), tuple(global_v6))
