"""What the system lists as this machine's addresses, read once for all who ask."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv4Interface, IPv6Address
from types import SimpleNamespace

import psutil
import pytest

from swarm.directory.dialable import interface_addresses, listed_addresses
from swarm.reach.paths.hole import OwnAddresses, own_addresses

LISTED: dict[str, list[tuple[str, str | None]]] = {
    "lo": [("127.0.0.1", "255.0.0.0"), ("::1", None)],
    "wlan0": [("192.168.1.7", "255.255.255.0"), ("fe80::1%wlan0", None), ("2001:db8::7", None)],
    "eth0": [("93.184.216.7", "255.255.255.0"), ("00:11:22:33:44:55", None), ("10.0.0.7", "255.0.0.0")],
    "tun0": [("10.9.0.7", None)],
    "down0": [("192.168.9.9", "255.255.255.0")],
    "again0": [("10.0.0.7", "255.0.0.0"), ("2606:4700::7", None)],
}


@pytest.fixture(autouse=True)
def _listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(text: str, mask: str | None) -> SimpleNamespace:
        family = socket.AF_INET6 if ":" in text else socket.AF_INET
        return SimpleNamespace(family=family, address=text, netmask=mask)

    every = {name: [address(*one) for one in listed] for name, listed in LISTED.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: every)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=name != "down0") for name in every})


def test_those_that_another_machine_could_call_are_listed_in_the_systems_order() -> None:
    assert [str(ip) for ip, _ in listed_addresses()][:3] == ["192.168.1.7", "2001:db8::7", "93.184.216.7"]
    assert dict(listed_addresses())[IPv4Address("192.168.1.7")] == "255.255.255.0"


def test_each_is_an_interface_address_once_ipv4_first() -> None:
    shown = [str(ip) for ip in interface_addresses()]
    assert shown == ["10.0.0.7", "10.9.0.7", "93.184.216.7", "192.168.1.7", "2001:db8::7", "2606:4700::7"]


def test_a_home_is_told_by_its_private_networks_and_global_ipv6() -> None:
    """A public IPv4 address is no home, and one without a mask has no network that another one may be in."""
    home = IPv4Interface("192.168.1.7/24"), IPv4Interface("10.0.0.7/8"), IPv4Interface("10.0.0.7/8")
    assert own_addresses() == OwnAddresses((home[0], *home[1:]), (IPv6Address("2606:4700::7"),))
