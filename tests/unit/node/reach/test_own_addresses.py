"""Which own addresses peers are asked to call, whose routers are asked to map, and which relays are near."""

from __future__ import annotations

import sys
from ipaddress import IPv4Address, ip_address
from pathlib import Path

import pytest

from node.reach.circuits import LocalServer
from node.reach.ladder import MAX_CANDIDATES, candidates, is_public_swarm
from node.reach.standing import FULL, RelayProbe, in_order, parse_load
from swarm.discovery.identity import Identity
from swarm.errors import RemoteProtocolError
from swarm.gateway.routes import default_gateways, parse_routes
from swarm.ids import PeerId

PEER = Identity.ephemeral().peer_id
HOME = tuple(map(ip_address, ("192.168.1.7", "172.17.0.1", "2a00:1450::1", "203.0.114.5")))


def test_public_addresses_are_asked_about_first_and_private_ones_in_private_swarms_alone() -> None:
    assert candidates("0.0.0.0", 80, HOME, only_public=True) == ["203.0.114.5:80", "[2a00:1450::1]:80"]
    every = candidates("::", 80, HOME, only_public=False)
    assert every[:2] == ["203.0.114.5:80", "[2a00:1450::1]:80"]
    assert len(every) == MAX_CANDIDATES
    assert candidates("192.168.1.7", 80, HOME, only_public=False) == ["192.168.1.7:80"]
    assert candidates("192.168.1.7", 80, HOME, only_public=True) == []
    assert candidates("localhost", 80, HOME, only_public=False) == ["127.0.0.1:80"]


@pytest.mark.parametrize(
    ("join", "is_public"),
    [
        ((), False),
        (("/ip4/192.168.1.2/tcp/1/p2p/Qm",), False),
        (("/ip6/::1/tcp/1/p2p/Qm",), False),
        (("/dns4/localhost/tcp/1/p2p/Qm",), False),
        (("/dns/no.such.host.invalid/tcp/1/p2p/Qm",), False),
        (("/ip4/192.168.1.2/tcp/1/p2p/Qm", "/ip4/8.8.8.8/tcp/1/p2p/Qm"), True),
        (("/ip6/2a00:1450::1/tcp/1/p2p/Qm",), True),
    ],
)
async def test_a_swarm_is_public_where_a_peer_that_is_joined_is(join: tuple[str, ...], *, is_public: bool) -> None:
    assert await is_public_swarm(join) is is_public


def column(address: str) -> str:
    return f"{int.from_bytes(IPv4Address(address).packed, sys.byteorder):08X}"


def test_the_routers_are_those_of_the_default_routes() -> None:
    lines = ["Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"]
    for gateway, flags, metric, mask in (
        ("192.168.2.1", "0003", 600, "00000000"),
        ("192.168.1.1", "0003", 100, "00000000"),
        ("192.168.1.1", "0003", 900, "00000000"),
        ("0.0.0.0", "0001", 0, "00000000"),
        ("192.168.9.9", "0003", 0, "00FFFFFF"),
    ):
        lines.append(f"eth0\t00000000\t{column(gateway)}\t{flags}\t0\t0\t{metric}\t{mask}\t0\t0\t0")
    assert parse_routes("\n".join([*lines, "odd", "a b c d e f g h", ""])) == [
        IPv4Address("192.168.1.1"),
        IPv4Address("192.168.2.1"),
    ]


def test_where_routes_cannot_be_read_the_first_address_of_the_network_is_asked(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert default_gateways(HOME[:1], missing) == [IPv4Address("192.168.1.1")]


def test_near_relays_are_shared_out_and_far_or_full_ones_come_later() -> None:
    near = [RelayProbe(f"198.51.100.{number}:7", None, 20.0 + number, 0.1) for number in range(4)]
    far = RelayProbe("203.0.113.1:7", None, 300.0, 0.0)
    full = RelayProbe("203.0.113.2:7", None, 1.0, FULL + 0.1)
    firsts = set()
    for number in range(40):
        order = in_order([far, *near, full], PeerId(f"peer {number}"))
        assert order[:4] != [far, full]
        assert set(order[:4]) == set(near)
        assert order[4:] == [far, full]
        firsts.add(order[0].address)
    assert len(firsts) == 4, "each is somebody's first"
    assert in_order([far, *near], PEER)[0] == in_order([*near, far], PeerId(PEER))[0]
    assert in_order([], PEER) == []


@pytest.mark.parametrize(
    ("line", "load"), [(b"LOAD 0 64 0.0 25\n", 0.0), (b"LOAD 16 64 20.0 25\n", 0.8), (b"LOAD 90 64 0 0\r\n", 1.0)]
)
def test_a_relays_load_is_the_larger_of_its_two_parts(line: bytes, load: float) -> None:
    assert parse_load(line) == pytest.approx(load)


@pytest.mark.parametrize(
    "line", [b"", b"LOAD 1 2 3\n", b"LOAD a b c d\n", b"LOAD nan 1 1 1\n", b"LOAD -1 1 1 1\n", b"SEEN 1.1.1.1:1\n"]
)
def test_what_is_no_load_is_refused(line: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_load(line)


@pytest.mark.parametrize(
    ("host", "address"), [("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1")]
)
def test_circuits_lead_to_the_server_where_it_listens(host: str, address: str) -> None:
    assert LocalServer(host, 80).address == address
