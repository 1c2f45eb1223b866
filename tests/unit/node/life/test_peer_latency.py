"""What nodes measure and tell of their place, and what clients remember: whom they ask, how often, what they keep."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import pytest
import torch

from client.chain.opening import CLEARED_S, KEPT_S, PeerLatency, refuters
from node.life.peer_latency import DELAY_KEPT_S, RATE_KEPT_S, PeerDelays, Probes
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.directory.node_record import MAX_DELAYS, NodeRecord, NodeState
from swarm.protocol.limits import REFUTED_S
from swarm.routing.costs import FAILURE_HALF_LIFE_S
from swarm.routing.latency import MAX_MEASURED, chain_ends, ghosts, worth_measuring
from swarm.routing.route import RouteQuery, best_route
from tests.unit.swarm.routing.test_route import record


@dataclass
class Model:
    hidden_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    span: Span = field(default_factory=lambda: Span(0, 4))


@dataclass
class Network:
    """Answers as it is told, and writes down who was asked. Peers without a delay do not answer."""

    delays: dict[str, float]
    now: float = 0.0
    asked: list[list[str]] = field(default_factory=list)
    rates: list[str] = field(default_factory=list)
    worked_ms: float = 0.0

    async def measure(self, records: Sequence[NodeRecord]) -> dict[PeerId, float]:
        self.asked.append([one.peer for one in records])
        return {one.peer: self.delays[one.peer] for one in records if one.peer in self.delays}

    async def rate(self, one: NodeRecord) -> float | None:
        self.rates.append(one.peer)
        return 12.5

    def node(self) -> PeerDelays:
        probes = Probes(self.measure, self.rate, lambda: self.now)
        return PeerDelays(PeerId("me"), Model(), lambda: self.worked_ms, probes)


async def test_only_those_who_may_follow_are_asked() -> None:
    others = [record("before", 0, 4), record("at", 4, 5), record("over", 2, 6), record("far", 5, 6), record("me", 0, 6)]
    leaving = replace(record("leaving", 4, 6), state=NodeState.DRAINING)
    network = Network({"at": 3.0, "over": 1.0})
    node = network.node()
    await node.measure([*others, leaving])
    assert network.asked == [["at", "over"]]
    assert node.delays_ms == (("over", 1.0), ("at", 3.0))


async def test_the_nearest_are_published_and_everybody_has_a_turn() -> None:
    peers = [f"p{number:02}" for number in range(40)]
    network = Network({peer: 100.0 - number for number, peer in enumerate(peers)})
    node = network.node()
    records = [record(peer, 4, 6) for peer in peers]
    for _ in range(3):
        await node.measure(records)
        network.now += 20
    assert [len(asked) for asked in network.asked] == [MAX_MEASURED, MAX_MEASURED, 8]
    assert sorted(chain.from_iterable(network.asked)) == peers
    assert [peer for peer, _ in node.delays_ms] == peers[: -MAX_DELAYS - 1 : -1]
    await node.measure(records)
    assert len(network.asked) == 3, "all of them are fresh"
    network.now = DELAY_KEPT_S
    await node.measure(records)
    assert network.asked[3] == network.asked[0]


async def test_who_is_gone_or_silent_is_not_published() -> None:
    network = Network({"a": 1.0, "b": 2.0})
    node = network.node()
    await node.measure([record("a", 4, 6), record("b", 4, 6), record("silent", 4, 6)])
    assert [peer for peer, _ in node.delays_ms] == ["a", "b"]
    await node.measure([record("b", 4, 6)])
    assert node.delays_ms == (("b", 2.0),)


async def test_the_uplink_is_measured_seldom_and_towards_the_nearest() -> None:
    network = Network({"a": 2.0, "b": 1.0})
    node = network.node()
    plain = record("me", 0, 4)
    assert node.describe(plain).uplink_mbit_per_s is None
    for now in (0.0, 400.0, RATE_KEPT_S + 1):
        network.now = now
        await node.measure([record("a", 4, 6), record("b", 4, 6)])
    assert network.rates == ["b", "b"]
    assert node.describe(plain).uplink_mbit_per_s == 12.5


def test_busy_is_the_part_of_the_time_in_which_the_engine_computed() -> None:
    network = Network({})
    node = network.node()
    network.now, network.worked_ms = 1.0, 250.0
    described = node.describe(record("me", 0, 4))
    assert described.busy == pytest.approx(0.25)
    assert described.row_bytes == 128
    assert node.describe(record("me", 0, 4)).busy == 0.0
    network.now, network.worked_ms = 1.1, 10_000.0
    assert node.describe(record("me", 0, 4)).busy == 1.0


def test_a_client_asks_first_and_last_machines_alike() -> None:
    firsts = [record(f"f{number}", 0, 3) for number in range(30)]
    lasts = [record(f"l{number}", 3, 6) for number in range(3)]
    middle = [record("m", 1, 5), replace(record("d", 0, 6), state=NodeState.DRAINING)]
    asked = chain_ends([*firsts, *lasts, *middle], 6, random.Random(1))
    assert len(asked) == MAX_MEASURED
    assert {one.peer for one in asked} >= {"l0", "l1", "l2"}
    assert not {"m", "d"} & {one.peer for one in asked}
    many = [record(f"l{number}", 3, 6) for number in range(30)]
    both = [one.peer[0] for one in chain_ends([*firsts, *many], 6, random.Random(1))]
    assert (both.count("f"), both.count("l")) == (8, 8)
    assert sorted(one.peer for one in chain_ends([record("whole", 0, 6)], 6, random.Random(1))) == ["whole"]


async def test_a_client_asks_once_a_minute_and_passes_over_the_silent() -> None:
    network = Network({"a": 7.0})
    nearby = PeerLatency(random.Random(1), network.measure, lambda: network.now)
    records = [record("a", 0, 6), record("dead", 0, 6)]
    await nearby.measure(records, 6)
    network.now = KEPT_S - 1
    nearby.failed("b")
    await nearby.measure(records, 6)
    assert len(network.asked) == 1
    query = nearby.query(RouteQuery("big", 6))
    assert dict(query.delays_ms) == {"a": 7.0, "dead": 1_000.0}
    hearsay = ("dead", -FAILURE_HALF_LIFE_S)
    assert (query.failures, query.now) == ((hearsay, ("b", KEPT_S - 1)), KEPT_S - 1)
    assert query.seed == nearby.query(query).seed
    network.now = KEPT_S
    await nearby.measure(records, 6)
    assert len(network.asked) == 2


def test_others_are_asked_where_the_ends_leave_room() -> None:
    ends = [record("f", 0, 3), record("l", 3, 6)]
    middle = [record(f"m{number:02}", 1, 5) for number in range(30)]
    joining = replace(record("j", 1, 5), state=NodeState.JOINING)
    asked = [one.peer for one in worth_measuring([*ends, *middle, joining], 6, random.Random(1))]
    assert asked[:2] == ["f", "l"]
    assert len(set(asked)) == MAX_MEASURED
    assert "j" not in asked


async def test_a_ghost_in_the_middle_of_a_chain_is_passed_over_before_anybody_dials_it() -> None:
    """The hop before it has measured it while it lived, and it was the fastest."""
    first, last = record("a", 0, 2), record("z", 4, 6)
    first = replace(first, delays_ms=((PeerId("ghost"), 0.1), (PeerId("slow"), 80.0)))
    ghost, slow = record("ghost", 2, 4), replace(record("slow", 2, 4), sweep_ms=((1, 50.0), (8, 50.0), (64, 50.0)))
    records = [first, ghost, slow, last]
    network = Network({"a": 1.0, "z": 1.0, "slow": 80.0})
    nearby = PeerLatency(random.Random(1), network.measure, lambda: network.now)
    before = best_route(records, nearby.query(RouteQuery("big", 6)))
    assert [hop.peer for hop in before.hops] == ["a", "ghost", "z"]
    await nearby.measure(records, 6)
    after = best_route(records, nearby.query(RouteQuery("big", 6)))
    assert [hop.peer for hop in after.hops] == ["a", "slow", "z"]


async def test_ghosts_are_those_that_do_not_answer_while_others_do() -> None:
    records = [record("a", 0, 6), record("dead", 0, 6), replace(record("j", 0, 6), state=NodeState.JOINING)]
    network = Network({"a": 1.0})
    assert await ghosts(records, network.measure, random.Random(1)) == {"dead"}
    assert await ghosts(records[1:], network.measure, random.Random(1)) == frozenset()
    assert await ghosts([], network.measure, random.Random(1)) == frozenset()
    many = [record(f"m{number}", 0, 6) for number in range(40)]
    await ghosts(many, network.measure, random.Random(1))
    assert len(network.asked[-1]) == MAX_MEASURED


def accusing(name: str, address: str, owner: str | None = None, at: float = 1_000.0) -> NodeRecord:
    return replace(record(name, 0, 6), address=address, name=owner, refuted=((PeerId("liar"), at),))


LIAR = replace(record("liar", 0, 6), address="8.8.4.4:1", name="shed")


@pytest.mark.parametrize(
    ("others", "many"),
    [
        ([], 0),
        ([accusing("a", "1.1.1.1:1")], 1),
        ([accusing("a", "1.1.1.1:1"), accusing("b", "1.1.1.9:1")], 1),
        ([accusing("a", "1.1.1.1:1"), accusing("b", "9.9.9.9:1")], 2),
        ([accusing("a", "1.1.1.1:1", "barn"), accusing("b", "9.9.9.9:1", "barn")], 1),
        ([accusing("a", "1.1.1.1:1", "barn"), accusing("b", "9.9.9.9:1", "mill")], 2),
        ([accusing("a", "8.8.4.5:1")], 0),
        ([accusing("a", "1.1.1.1:1", "shed")], 0),
        ([accusing("a", "192.168.1.2:1"), accusing("b", "10.0.0.7:1"), accusing("c", "example.org:1")], 1),
        ([accusing("a", "1.1.1.1:1", at=1_000.0 - REFUTED_S)], 0),
        ([accusing("a", "1.1.1.1:1", at=2_000.0)], 0),
        ([LIAR, replace(LIAR, refuted=((PeerId("liar"), 1_000.0),))], 0),
    ],
)
def test_who_accuses_counts_for_its_network_and_its_name(others: list[NodeRecord], many: int) -> None:
    assert refuters([LIAR, *others], 1_000.0).get(PeerId("liar"), 0) == many


def test_nobody_is_counted_of_whom_no_record_tells() -> None:
    assert refuters([accusing("a", "1.1.1.1:1")], 1_000.0) == {}


async def test_what_others_say_costs_audits_and_half_a_failure_until_an_audit_agrees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.time", lambda: 1_000.0)
    network = Network({"liar": 1.0, "a": 1.0, "b": 1.0})
    nearby = PeerLatency(random.Random(1), network.measure, lambda: network.now)
    await nearby.measure([LIAR, accusing("a", "1.1.1.1:1")], 6)
    assert nearby.refuted(PeerId("liar")) == 0.5
    assert nearby.refuted(PeerId("a")) == 0.0
    assert nearby.query(RouteQuery("big", 6)).failures == (("liar", -FAILURE_HALF_LIFE_S),)
    network.now = 10.0
    await nearby.measure([LIAR, accusing("a", "1.1.1.1:1"), accusing("b", "9.9.9.9:1")], 6)
    assert nearby.query(RouteQuery("big", 6)).failures == (("liar", 10.0),)
    nearby.agreed("liar")
    assert nearby.refuted(PeerId("liar")) == 0.0
    assert nearby.query(RouteQuery("big", 6)).failures == ()
    network.now += CLEARED_S + 1.0
    assert nearby.refuted(PeerId("liar")) == 0.5
    await nearby.measure([LIAR], 6)
    assert nearby.refuted(PeerId("liar")) == 0.0, "they have taken it back"
