"""What a machine claims fades with what was measured of it; in time the measurements fade too."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from client.base.stats import Repair, Stats, SweepMeasurement, within_total
from client.chain.opening import (
    EXPLORED,
    HALF_LIFE_S,
    MACHINES_KEPT,
    MAX_RATIO,
    MIN_RATIO,
    NEWCOMER_PRICE,
    PRIOR,
    PeerLatency,
    PeerSpeeds,
)
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.protocol.messages import HopTime
from swarm.routing.costs import HOP_OVERHEAD_MS, SPEED_JITTER, RouteQuery, sweep_ms
from swarm.routing.plausible import plausible
from swarm.routing.route import Route, best_route

MODEL = ModelIdentity.of("demo", "b2" * 32, "c3" * 32, "d4" * 32, 12)
QUERY = RouteQuery("demo", 12, nodes=7)


def record(name: str, start: int, end: int, layer_ms: float = 2.0) -> NodeRecord:
    claims = tuple((rows, layer_ms * (end - start) * (1 + rows / 64)) for rows in (1, 8, 64))
    about = (PeerId(name), MODEL, Span(start, end), "192.0.2.7:1", NodeState.SERVING, "cpu-float32", "0", None)
    return NodeRecord(*about, claims, 99, 99, 1, 0.0)


def sweep(route: Route, slow: Mapping[Any, float], hidden_ms: float = 0.0) -> SweepMeasurement:
    """A sweep over a route whose machines take so many times as long as they claim, and hide some time."""
    times = []
    for hop, claims in zip(route.hops, route.records, strict=True):
        honest_ms = sweep_ms(claims, 8) * len(hop.span) / len(claims.span) + HOP_OVERHEAD_MS
        times.append(HopTime(0.0, honest_ms * slow.get(hop.peer, 1.0), 0.0, 30.0))
    total_ms = 30.0 + sum(time.compute_ms + time.link_ms for time in times) + hidden_ms
    first_link_ms, hops = within_total(30.0, times, total_ms)
    return SweepMeasurement(7, 3, 0.0, total_ms, first_link_ms, hops)


def shown(speeds: PeerSpeeds, now_s: float = 0.0) -> dict[str, float]:
    return {str(peer): slowness for peer, slowness in speeds.slowness(now_s).items()}


def text(*sweeps: SweepMeasurement, repairs: Sequence[Repair] = ()) -> Stats:
    return Stats(9, 9, 0, 0, 0, True, "cpu-float32", 0.0, 1.0, sweeps, (), repairs=tuple(repairs))


def test_a_measured_machine_counts_as_fast_as_it_was_and_is_believed_again_in_time() -> None:
    route, speeds = best_route([record("a", 0, 6), record("b", 6, 12)], QUERY), PeerSpeeds()
    speeds.learn(route, [sweep(route, {"b": 10.0})] * 3, 0.0)
    slowness = shown(speeds)
    assert slowness["a"] == pytest.approx(1.0)
    assert slowness["b"] == pytest.approx((PRIOR + 10.0) / (PRIOR + 1))
    for _ in range(20):
        speeds.learn(route, [sweep(route, {"b": 10.0})], 0.0)
    assert shown(speeds)["b"] == pytest.approx(10.0, rel=0.02)
    later = [shown(speeds, n * HALF_LIFE_S)["b"] for n in range(30)]
    assert later == sorted(later, reverse=True)
    assert later[-1] == pytest.approx(1.0, abs=1e-3)
    assert "c" not in slowness


def test_a_machine_that_reports_nothing_is_found_out_by_the_clients_own_clock() -> None:
    """What nobody accounts for counts against all; honest machines are measured in other company too."""
    speeds = PeerSpeeds()
    with_liar = best_route([record("a", 0, 6), record("liar", 6, 12)], QUERY)
    without = best_route([record("a", 0, 6), record("b", 6, 12)], QUERY)
    for number in range(10):
        speeds.learn(with_liar, [sweep(with_liar, {"liar": 0.0}, hidden_ms=2_000.0)], float(number))
        speeds.learn(without, [sweep(without, {})], float(number))
    slowness = shown(speeds, 10.0)
    assert slowness["liar"] > 20
    assert slowness["a"] < 0.7 * slowness["liar"]
    assert slowness["b"] == pytest.approx(1.0)


def test_ratios_and_machines_are_bounded() -> None:
    speeds, routes = PeerSpeeds(), []
    for number in range(MACHINES_KEPT + 9):
        routes.append(best_route([record(f"m{number}", 0, 12)], QUERY))
        speeds.learn(routes[-1], [sweep(routes[-1], {f"m{number}": 1e9 * (number % 2)})], 0.0)
    slowness = shown(speeds)
    assert len(slowness) == MACHINES_KEPT
    assert "m0" not in slowness
    assert min(slowness.values()) >= MIN_RATIO
    assert max(slowness.values()) <= MAX_RATIO
    speeds.learn(routes[0], [], 0.0)
    assert "m0" not in shown(speeds), "a text without a sweep says nothing"


def test_newcomers_have_a_price_where_others_were_measured_and_are_tried_now_and_then() -> None:
    nearby = PeerLatency(random.Random(1), clock=lambda: 0.0)
    assert nearby.query(QUERY).newcomer == 1.0
    route = best_route([record("a", 0, 12)], QUERY)
    nearby.served(route, text(sweep(route, {"a": 2.0})))
    assert nearby.query(QUERY).newcomer == pytest.approx(NEWCOMER_PRICE * nearby.query(QUERY).slowness[PeerId("a")])
    prices = Counter(nearby.query(QUERY, may_explore=True).newcomer for _ in range(1_600))
    assert len(prices) == 2
    assert 0.5 * EXPLORED <= prices[min(prices)] / 1_600 <= 2 * EXPLORED


def test_who_had_to_be_replaced_failed_and_who_left_did_not() -> None:
    nearby = PeerLatency(random.Random(1), clock=lambda: 5.0)
    route = best_route([record("a", 0, 6), record("b", 6, 12)], QUERY)
    repairs = [Repair(1, ("c",), 1.0, is_move=False), Repair(2, ("d",), 1.0, is_move=True)]
    nearby.served(route, text(sweep(route, {"a": 100.0}), repairs=repairs))
    assert nearby.failures == (("c", 5.0),)
    assert list(nearby.query(QUERY).slowness) == ["c"], "whose sweeps these were is not known"


def first_choices(records: Sequence[NodeRecord], clients: int, texts: int, slow: Mapping[str, float]) -> Counter[str]:
    """How many texts of all clients each machine served; a machine that is `inf` slow fails each of them."""
    taken: Counter[str] = Counter()
    for client in range(clients):
        now = [0.0]
        nearby = PeerLatency(random.Random(client), clock=lambda now=now: now[0])  # type: ignore[misc]
        for _ in range(texts):
            while True:
                route = best_route(plausible(records), nearby.query(QUERY, may_explore=True))
                taken.update(hop.peer for hop in route.hops)
                failing = [hop.peer for hop in route.hops if slow.get(hop.peer) == float("inf")]
                for peer in failing:
                    nearby.failed(peer)
                now[0] += 20.0
                if not failing:
                    break
            nearby.served(route, text(sweep(route, slow)))
    return taken


@pytest.mark.parametrize("slow", [float("inf"), 50.0])
def test_one_machine_that_only_claims_to_be_fast_gets_a_text_or_two_of_each_client(slow: float) -> None:
    honest = [record(f"{start}/{number}", start, start + 6) for start in (0, 6) for number in range(3)]
    taken = first_choices([*honest, record("liar", 0, 12, 0.001)], 20, 20, {"liar": slow})
    assert taken["liar"] <= 2 * 20, "of 400 texts"
    assert min(taken[one.peer] for one in honest) >= 20


def test_honest_swarms_lose_little_and_use_who_is_new() -> None:
    """Claims are wrong by up to a tenth, all alike by half; in the end chains cost what the best one does."""
    rng = random.Random(3)
    records = [record(f"{start}/{number}", start, start + 6) for start in (0, 6) for number in range(4)]
    true = {one.peer: 1.5 * rng.uniform(0.9, 1.1) for one in records}
    truth = replace(QUERY, slowness=true)
    best_ms = best_route(records, truth).sweep_ms
    price = (1 + SPEED_JITTER) * NEWCOMER_PRICE * 1.1 / 0.9
    nearby, used = PeerLatency(random.Random(1), clock=lambda: 0.0), set()
    for _ in range(150):
        route = best_route(plausible(records), nearby.query(QUERY, may_explore=True))
        used |= {hop.peer for hop in route.hops}
        cost_ms = best_route([one for one in records if one.peer in {hop.peer for hop in route.hops}], truth).sweep_ms
        assert cost_ms <= price * best_ms
        nearby.served(route, text(sweep(route, true)))
    assert len(used) >= 5
