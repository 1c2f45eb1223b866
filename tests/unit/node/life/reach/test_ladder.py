"""The ladder takes the first rung that a dial-back proves, and says what it tried where none holds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import Any, cast

import pytest

from node.life.reach.circuits import LocalServer
from node.life.reach.ladder import MAX_CANDIDATES, Ladder, Rungs, candidates, is_public_swarm
from node.life.reach.standing import FULL, RelayProbe, in_order, parse_load
from swarm.base.errors import ConfigError, RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.directory.identity import Identity
from swarm.directory.node_record import Reach
from swarm.reach.gateway.ports import NoMapping, default_gateways, parse_routes

PEER = Identity.ephemeral().peer_id
OWN, OUTSIDE, RELAY, OTHER = "192.168.1.7:80", "203.0.113.5:80", "198.51.100.1:7", "198.51.100.2:7"


@dataclass
class FakeRelays:
    relays: tuple[str, ...] = (RELAY, OTHER)
    troubles: tuple[str, ...] = ()

    def prefer_other(self) -> None:
        self.relays = self.relays[1:] + self.relays[:1]

    async def stands(self, limit_s: float) -> bool:
        return bool(self.relays)


@dataclass
class World:
    """Peers that give these verdicts, and a router that maps or does not."""

    verdicts: Mapping[str, bool | None] = field(default_factory=dict)
    mapped: str | None = None
    relays: FakeRelays = field(default_factory=FakeRelays)
    asked: list[str] = field(default_factory=list)
    unmapped: int = 0
    leads_here: bool = True

    async def dial_back(self, address: str) -> bool | None:
        self.asked.append(address)
        return self.verdicts.get(address, False)

    async def call_self(self, address: str) -> bool:
        return self.leads_here

    async def map_port(self) -> tuple[str, str]:
        if self.mapped is None:
            raise NoMapping("PCP: no answer")
        return self.mapped, "PCP"

    async def unmap(self) -> None:
        self.unmapped += 1

    def rungs(self, *own: str) -> Rungs:
        return Rungs(
            peer=PEER,
            announced=None,
            own=lambda: own,
            fallback=OWN,
            is_first=False,
            dial_back=self.dial_back,
            call_self=self.call_self,
            map_port=self.map_port,
            unmap=self.unmap,
            relays=lambda: cast("Any", self.relays),
        )


async def test_an_own_address_that_peers_call_is_direct() -> None:
    world = World({OUTSIDE: True}, mapped="203.0.113.9:1")
    reached = await Ladder(world.rungs(OWN, OUTSIDE)).climb()
    assert (reached.address, reached.reach) == (OUTSIDE, Reach.DIRECT)
    assert world.asked == [OWN, OUTSIDE]


async def test_the_first_machine_of_a_swarm_asks_nobody_and_maps_nothing() -> None:
    world = World({OWN: None}, mapped=OUTSIDE)
    reached = await Ladder(replace(world.rungs(OWN), is_first=True)).climb()
    assert (reached.address, reached.reach) == (OWN, Reach.DIRECT)
    assert "first machine" in reached.why


async def test_what_is_announced_is_not_second_guessed() -> None:
    world = World({OUTSIDE: True}, mapped=OUTSIDE)
    rungs = replace(world.rungs(OWN), announced=OUTSIDE)
    assert (await Ladder(rungs).climb()).reach is Reach.DIRECT
    with pytest.raises(ConfigError, match=r"peers cannot reach node\.example:80: open or forward the port"):
        await Ladder(replace(rungs, announced="node.example:80")).climb()
    assert world.asked == [OUTSIDE, "node.example:80"]


async def test_a_mapped_port_counts_once_peers_come_through() -> None:
    world = World({OUTSIDE: True}, mapped=OUTSIDE)
    reached = await Ladder(world.rungs(OWN)).climb()
    assert (reached.address, reached.reach) == (OUTSIDE, Reach.MAPPED)
    assert "PCP" in reached.why
    assert not world.unmapped


async def test_a_mapping_behind_another_router_is_given_back() -> None:
    world = World({f"{PEER}.via.{RELAY}": True}, mapped=OUTSIDE)
    ladder = Ladder(world.rungs())
    reached = await ladder.climb()
    assert (reached.address, reached.reach) == (f"{PEER}.via.{RELAY}", Reach.RELAYED)
    assert world.unmapped == 1
    assert any("another router" in line for line in ladder.tried)


async def test_a_relay_that_leads_nowhere_is_left_for_the_other() -> None:
    world = World({f"{PEER}.via.{OTHER}": True})
    reached = await Ladder(world.rungs()).climb()
    assert reached.address == f"{PEER}.via.{OTHER}"
    assert world.relays.relays[0] == OTHER


async def test_in_a_hurry_a_relay_that_leads_here_is_enough() -> None:
    world = World({OUTSIDE: False})
    assert (await Ladder(world.rungs(OUTSIDE)).climb(quickly=True)).address == f"{PEER}.via.{RELAY}"
    assert world.asked == [OUTSIDE]
    world.leads_here = False
    with pytest.raises(ConfigError):
        await Ladder(world.rungs(OUTSIDE)).climb(quickly=True)


async def test_busy_peers_prove_nothing() -> None:
    """Where no peer could be asked, a relay is surer than an address that nobody tried."""
    world = World({OWN: None, f"{PEER}.via.{RELAY}": True})
    assert (await Ladder(world.rungs(OWN)).climb()).reach is Reach.RELAYED
    without = replace(world.rungs(OWN), relays=None)
    assert (await Ladder(without).climb()).address == OWN


async def test_no_way_in_says_what_was_tried() -> None:
    world = World(relays=FakeRelays((), ("198.51.100.1:7: does not answer",)))
    ladder = Ladder(world.rungs(OWN))
    with pytest.raises(ConfigError) as caught:
        await ladder.climb()
    assert "\n" not in str(caught.value)
    assert [line.partition(":")[0] for line in ladder.tried] == ["direct", "mapped", "relayed"]
    assert "198.51.100.1:7: does not answer" in ladder.tried[2]


async def test_what_the_user_forbids_is_not_tried() -> None:
    world = World({OUTSIDE: True}, mapped=OUTSIDE)
    ladder = Ladder(replace(world.rungs(OWN), map_port=None, relays=None))
    with pytest.raises(ConfigError):
        await ladder.climb()
    assert "--no-port-mapping" in ladder.tried[1]
    assert "--relay off" in ladder.tried[2]


async def test_where_large_packets_do_not_pass_a_relay_is_tried_first() -> None:
    world = World({OWN: True, f"{PEER}.via.{RELAY}": True})
    rungs = replace(world.rungs(OWN), is_narrow=True)
    assert (await Ladder(rungs).climb()).reach is Reach.RELAYED
    assert (await Ladder(replace(rungs, relays=None)).climb()).reach is Reach.DIRECT
    world.relays = FakeRelays(())
    assert (await Ladder(rungs).climb()).reach is Reach.DIRECT


# Which own addresses peers are asked to call, whose routers are asked to map, and which relays are near.


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
