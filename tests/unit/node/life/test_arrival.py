"""What an arriving node asks of its home: without a network."""

from __future__ import annotations

from contextlib import AsyncExitStack
from ipaddress import IPv4Address, ip_address
from typing import Any, cast

import pytest

from node.life import arrival
from node.life.arrival import Arrival, BoundServer
from node.model.config import ServeConfig
from swarm.directory.dialable import IpAddress
from swarm.directory.identity import Identity

V4 = "/ip4/93.184.216.1/tcp/1/p2p/QmbLHAnMoJPWSCR5Zhtx6BHJX9KiKNN6tpvbUcqanj75Nb"
V6 = "/ip6/2606:4700::1/tcp/1/p2p/QmbLHAnMoJPWSCR5Zhtx6BHJX9KiKNN6tpvbUcqanj75Nb"


class Directory:
    """As far as an arrival reads it."""

    identity = Identity.ephemeral()

    def join_addresses(self) -> list[str]:
        return ["/ip4/192.168.1.7/tcp/1"]


def arriving(join: tuple[str, ...] = (V4,)) -> Arrival:
    found = Arrival(ServeConfig("0-4", join=join), print, AsyncExitStack(), BoundServer(cast("Any", None), 7000, None))
    found._registry = cast("Any", Directory())
    return found


@pytest.mark.parametrize(
    ("gateways", "names"),
    [([IPv4Address("192.168.1.1")], ["PCP", "NAT-PMP", "UPnP"]), ([], [])],
    ids=["an IPv4 router", "IPv6 alone"],
)
def test_a_router_is_asked_where_there_is_one_of_ipv4(
    gateways: list[IPv4Address], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The UPnP library writes to the terminal where IPv4 leads nowhere."""
    monkeypatch.setattr(arrival, "interface_addresses", tuple)
    monkeypatch.setattr(arrival, "default_gateways", lambda _: gateways)
    assert [router.name for router in arriving()._routers(7000)] == names


OWN = ("10.1.0.1", "172.17.0.1", "172.18.0.1", "192.168.1.7", "2606:4700::7")


@pytest.mark.parametrize(
    ("join", "first"),
    [((V4,), "192.168.1.7:7000"), ((V4, V6), "192.168.1.7:7000"), ((V6,), "[2606:4700::7]:7000")],
    ids=["IPv4", "both", "IPv6 alone"],
)
def test_who_joins_by_one_family_offers_an_address_of_it_first(
    join: tuple[str, ...], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: tuple[IpAddress, ...] = tuple(map(ip_address, OWN))
    monkeypatch.setattr(arrival, "interface_addresses", lambda: own)
    offered = arriving(join)._own()
    assert offered[0] == first
    assert "[2606:4700::7]:7000" in offered, "however many addresses of IPv4 there are"
