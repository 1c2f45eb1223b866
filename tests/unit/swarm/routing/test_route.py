"""Chains: against brute force on small random swarms, what each part costs, and what the user reads without one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

import swarm.routing.search
from swarm.base.errors import RouteError
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span
from swarm.directory.node_record import NodeRecord, NodeState, Reach
from swarm.protocol.messages import RouteHop
from swarm.routing.costs import (
    DEFAULT_DELAY_MS,
    DEFAULT_LAYER_MS,
    DEFAULT_LINK_MBIT_PER_S,
    DEFAULT_ROW_BYTES,
    FAILURE_HALF_LIFE_S,
    FAILURE_PENALTY_MS,
    HOP_OVERHEAD_MS,
    RELAYED_MS,
    SPEED_JITTER,
    penalty_ms,
    sweep_ms,
    wait_ms,
)
from swarm.routing.route import RouteQuery, best_route, runner_up

LAYERS = 6
MODEL = ModelIdentity.of("big", "c" * 64, "e" * 64, "d" * 64, LAYERS)
QUERY = RouteQuery("big", LAYERS, nodes=7, join=("/ip4/192.0.2.1/tcp/1/p2p/Qm",))


def record(name: str, start: int, end: int, ms: float = 10.0, kind: str = "cpu-float32") -> NodeRecord:
    return NodeRecord(
        peer=PeerId(name),
        model=MODEL,
        span=Span(start, end),
        address="192.0.2.1:1",
        state=NodeState.SERVING,
        numeric_class=kind,
        version="0",
        name=None,
        sweep_ms=((8, ms),),
        kv_tokens_free=100,
        kv_tokens_total=100,
        sequence=1,
        expires_at=0.0,
        row_bytes=1_000,
    )


RELAYS = ("198.51.100.1:7", "198.51.100.2:7")


def behind(node: NodeRecord, relay: str) -> NodeRecord:
    return replace(node, address=f"{node.peer}.via.{relay}", reach=Reach.RELAYED)


@dataclass(frozen=True, slots=True)
class Swarm:
    """A small random swarm and a query; what things cost is said here once more, in the plainest way."""

    records: tuple[NodeRecord, ...]
    query: RouteQuery

    def client_ms(self, node: NodeRecord) -> float:
        return self.query.delays_ms.get(node.peer, DEFAULT_DELAY_MS * (2 if node.reach is Reach.RELAYED else 1))

    def link_ms(self, sender: NodeRecord, receiver: NodeRecord) -> float:
        ends_ms = self.client_ms(sender), self.client_ms(receiver)
        are_relayed = sender.reach is receiver.reach is Reach.RELAYED
        delay_ms = dict(sender.delays_ms).get(receiver.peer, sum(ends_ms) if are_relayed else max(ends_ms))
        rate = sender.uplink_mbit_per_s or DEFAULT_LINK_MBIT_PER_S
        return delay_ms + (self.query.nodes + 1) * (sender.row_bytes or DEFAULT_ROW_BYTES) * 8e-3 / rate

    def hop_ms(self, node: NodeRecord, span: Span) -> float | None:
        kept = RouteHop(node.peer, span) in self.query.keep
        if node.peer in self.query.avoid or not node.span.contains(span):
            return None
        if not kept and (node.state is not NodeState.SERVING or node.kv_tokens_free < self.query.kv_tokens):
            return None
        whole_ms = node.sweep_ms[0][1]
        once_ms = 0.0 if kept else self.query.replay_layer_ms * len(span)
        failed_ms = sum(
            FAILURE_PENALTY_MS / 2 ** ((self.query.now - at) / 60)
            for peer, at in self.query.failures
            if peer == node.peer
        )
        if not kept and node.endpoint.relay is not None and node.endpoint.relay in self.query.avoid:
            return None
        failed_ms += RELAYED_MS * (node.reach is Reach.RELAYED)
        wait = whole_ms * node.busy / (2 - 2 * node.busy)
        return whole_ms * len(span) / len(node.span) + HOP_OVERHEAD_MS + wait + once_ms + failed_ms

    def chains(self, begun: tuple[tuple[NodeRecord, Span], ...] = ()) -> Iterator[tuple[tuple[NodeRecord, Span], ...]]:
        start = begun[-1][1].end if begun else 0
        if start == LAYERS:
            yield begun
            return
        for node in self.records:
            if any(node.peer == other.peer for other, _ in begun):
                continue
            if begun and node.numeric_class != begun[0][0].numeric_class:
                continue
            for end in range(start + 1, LAYERS + 1):
                if self.hop_ms(node, Span(start, end)) is not None:
                    yield from self.chains((*begun, (node, Span(start, end))))

    def cost_ms(self, chain: tuple[tuple[NodeRecord, Span], ...]) -> float:
        nodes = [node for node, _ in chain]
        hops = [self.hop_ms(node, span) for node, span in chain]
        assert None not in hops
        links = [self.link_ms(sender, receiver) for sender, receiver in pairwise(nodes)]
        ends = self.client_ms(nodes[0]) + self.client_ms(nodes[-1])
        return ends + sum(links) + sum(ms for ms in hops if ms is not None)


def random_swarm(rng: random.Random) -> Swarm:
    names = "abcde"[: rng.randint(2, 5)]
    delays = [0.5, 1.0, 5.0, 20.0, 80.0]
    records = []
    for name in names:
        start = min(rng.randrange(LAYERS) for _ in range(3))
        others = [PeerId(other) for other in names if other != name]
        made = replace(
            record(
                name,
                start,
                max(rng.randint(start + 1, LAYERS) for _ in range(2)),
                rng.choice([0.0, 5.0, 20.0, 80.0, 400.0]),
            ),
            numeric_class=rng.choice(["cpu-float32"] * 4 + ["cuda-bfloat16"]),
            state=rng.choice([NodeState.SERVING] * 6 + [NodeState.DRAINING]),
            delays_ms=tuple((other, rng.choice(delays)) for other in rng.sample(others, rng.randint(0, len(others)))),
            kv_tokens_free=rng.choice([100, 100, 40]),
            busy=rng.choice([0.0, 0.0, 0.5, 0.9]),
            uplink_mbit_per_s=rng.choice([None, 1.0, 100.0]),
            row_bytes=rng.choice([None, 1_000, 20_000]),
        )
        records.append(behind(made, rng.choice(RELAYS)) if rng.random() < 0.4 else made)
    keep = []
    for node in rng.sample(records, rng.choice([0, 0, 1, 2])):
        start = rng.randrange(node.span.start, node.span.end)
        keep.append(RouteHop(node.peer, Span(start, rng.randint(start + 1, node.span.end))))
    query = replace(
        QUERY,
        kv_tokens=rng.choice([0, 50]),
        delays_ms={PeerId(name): rng.choice(delays) for name in names if rng.random() < 0.5},
        avoid=frozenset(rng.sample([*names, *RELAYS], rng.choice([0, 0, 1]))),
        failures=tuple((name, rng.uniform(0, 500)) for name in rng.sample(names, rng.choice([0, 0, 1, 2]))),
        now=500.0,
        keep=tuple(keep),
        replay_layer_ms=rng.choice([0.0, 10.0, 100.0]) if keep else 0.0,
    )
    return Swarm(tuple(records), query)


@pytest.mark.parametrize("seed", range(4))
def test_the_route_is_the_cheapest_chain(seed: int) -> None:
    rng = random.Random(seed)
    covered = 0
    for _ in range(500):
        here = random_swarm(rng)
        least_ms = min(map(here.cost_ms, here.chains()), default=None)
        if least_ms is None:
            with pytest.raises(RouteError):
                best_route(here.records, here.query)
            continue
        covered += 1
        route = best_route(rng.sample(here.records, len(here.records)), here.query)
        chain = tuple(zip(route.records, (hop.span for hop in route.hops), strict=True))
        assert chain in list(here.chains())
        assert here.cost_ms(chain) == pytest.approx(least_ms)
        assert route.gap_ms == 0
    assert covered > 150


def test_a_route_says_what_it_predicts() -> None:
    rng = random.Random(1)
    said = 0
    for _ in range(200):
        here = random_swarm(rng)
        plain = Swarm(here.records, replace(here.query, keep=(), replay_layer_ms=0.0, failures=()))
        try:
            route = best_route(plain.records, plain.query)
        except RouteError:
            continue
        said += 1
        chain = tuple(zip(route.records, (hop.span for hop in route.hops), strict=True))
        price_ms = RELAYED_MS * sum(node.reach is Reach.RELAYED for node in route.records)  # no sweep takes it
        assert route.sweep_ms + price_ms == pytest.approx(plain.cost_ms(chain))
        assert route.costs[0].is_measured == (route.hops[0].peer in plain.query.delays_ms)
    assert said > 50


def test_a_route_says_what_sweeps_should_take_by_their_size() -> None:
    """Another row takes `b` 2 ms for all that it has, of which half is used; rows leave `a` at 10 a millisecond."""
    rows_ms = ((1, 8.0), (64, 134.0))
    first = replace(record("a", 0, 4), sweep_ms=((1, 20.0),), delays_ms=((PeerId("b"), 50.0),), uplink_mbit_per_s=80.0)
    last = replace(record("b", 2, 6), sweep_ms=rows_ms, busy=0.5)
    query = replace(QUERY, delays_ms={PeerId("a"): 3.0, PeerId("b"): 5.0}, nodes=63)
    route = best_route([first, last], query)
    assert [str(hop.span) for hop in route.hops] == ["0-4", "4-6"]
    forecast = route.forecast
    assert (forecast.links_ms, forecast.compute_ms, forecast.hops) == (58.0, 24.0 + 2 * HOP_OVERHEAD_MS, 2)
    assert [forecast.row_ms, forecast.link_row_ms] == pytest.approx([1.0, 0.1])
    assert forecast.bottleneck_share == pytest.approx(
        (20.0 + HOP_OVERHEAD_MS) / (forecast.compute_ms + forecast.waiting_ms)
    )
    assert forecast.waiting_ms == pytest.approx(wait_ms(last, 8.0)), "behind sweeps as small as it is"


def test_a_relay_is_spared_where_another_chain_is_as_fast() -> None:
    """At the same measured delay the open machine is taken; a faster one behind a relay is taken all the same."""
    open_one, home = record("a", 0, 6), behind(record("b", 0, 6), RELAYS[0])
    query = replace(QUERY, delays_ms={PeerId("a"): 20.0, PeerId("b"): 20.0})
    assert best_route([open_one, home], query).records == (open_one,)
    nearer = replace(query, delays_ms={PeerId("a"): 20.0, PeerId("b"): 17.0})
    assert best_route([open_one, home], nearer).records == (home,)
    assert best_route([open_one, home], QUERY).records == (open_one,), "unmeasured, it is taken to be twice as far"


def test_behind_a_relay_that_is_gone_around_no_hop_begins_but_one_that_holds_the_session_stays() -> None:
    first, second = (behind(record(name, 0, 6), relay) for name, relay in zip("ab", RELAYS, strict=True))
    query = replace(QUERY, avoid=frozenset({RELAYS[0]}), delays_ms={PeerId("a"): 1.0, PeerId("b"): 90.0})
    assert best_route([first, second], query).records == (second,)
    kept = replace(query, keep=(RouteHop(first.peer, first.span),), replay_layer_ms=10.0)
    assert best_route([first, second], kept).records == (first,)


@pytest.mark.parametrize(("saved_ms", "chain"), [(2.0, ["a", "c"]), (3.0, ["b", "a", "c"])])
def test_a_hop_more_must_pay_for_its_messages(saved_ms: float, chain: list[str]) -> None:
    """The way over `b`, which takes a layer off `a`, is shorter; its rows take .64 ms, its own link .1."""
    a, b, c = PeerId("a"), PeerId("b"), PeerId("c")
    first = replace(record("a", 0, 3), delays_ms=((c, 0.1),))
    detour = replace(record("b", 0, 3), delays_ms=((a, 0.1), (c, 9.0)))
    query = replace(QUERY, delays_ms={a: 0.1 + saved_ms, b: 0.1, c: 0.1})
    assert [hop.peer for hop in best_route([first, detour, record("c", 3, 6)], query).hops] == chain


def test_a_machine_that_would_stand_twice_stands_once() -> None:
    """`slow` holds everything, `fast` the middle; beside them only a dear detour: `a` before and `z` behind."""
    slow = replace(record("slow", 0, 6, 60.0), delays_ms=((PeerId("fast"), 0.1),))
    fast = replace(record("fast", 2, 4, 0.1), delays_ms=((PeerId("slow"), 0.1),))
    records = [slow, fast, record("a", 0, 2, 500.0), record("z", 4, 6, 500.0)]
    query = replace(QUERY, delays_ms={PeerId(node.peer): 0.1 for node in [*records, record("z2", 4, 6)]})
    assert [hop.peer for hop in best_route(records, query).hops] == ["slow"]
    assert [hop.peer for hop in best_route([*records, record("z2", 4, 6, 5.0)], query).hops] == ["slow", "fast", "z2"]


def test_compute_time_is_interpolated_and_goes_on_with_the_last_slope() -> None:
    node = replace(record("a", 0, 2), sweep_ms=((64, 40.0), (1, 2.0), (8, 9.0)))
    assert [sweep_ms(node, rows) for rows in (1, 2, 8, 36, 64, 120)] == [2.0, 3.0, 9.0, 24.5, 40.0, pytest.approx(71.0)]
    falling = replace(node, sweep_ms=((1, 10.0), (8, 4.0)))
    assert [sweep_ms(falling, rows) for rows in (8, 800)] == [4.0, 4.0]
    assert sweep_ms(replace(node, sweep_ms=((8, 3.0),)), 1) == 3.0
    assert sweep_ms(replace(node, sweep_ms=()), 1) == 2 * DEFAULT_LAYER_MS
    assert sweep_ms(replace(node, sweep_ms=((1, -5.0),)), 1) == 0.0
    assert sweep_ms(replace(node, sweep_ms=((1, 1e308), (2, -1e308))), 1) < 1e9


def test_a_chain_of_machines_that_pad_rows_forecasts_the_sum_of_their_staircases() -> None:
    first = replace(record("a", 0, 4), sweep_ms=((16, 4.0), (64, 6.0)), bucketed=True)
    last = replace(record("b", 2, 6), sweep_ms=((32, 8.0), (64, 10.0), (65, 11.0)), bucketed=True)
    route = best_route([first, last], QUERY)
    parts = [len(hop.span) / 4 for hop in route.hops]
    steps = [(16, (4.0, 8.0)), (32, (6.0, 8.0)), (65, (10.0, 11.0))]  # 65 rows run twice; 64 is too near to it
    expected = [
        (rows, sum(ms * part for ms, part in zip(each, parts, strict=True)) + 2 * HOP_OVERHEAD_MS)
        for rows, each in steps
    ]
    assert [rows for rows, _ in route.forecast.steps] == [rows for rows, _ in expected]
    assert [ms for _, ms in route.forecast.steps] == pytest.approx([ms for _, ms in expected])
    assert route.forecast.compute_ms == pytest.approx(expected[0][1])
    for other in (replace(last, bucketed=False), replace(last, sweep_ms=())):
        assert best_route([first, other], QUERY).forecast.steps == (), "not all of them do"


def test_the_tree_size_decides_who_is_fast() -> None:
    small = replace(record("small", 0, 6), sweep_ms=((1, 5.0), (64, 200.0)))
    large = replace(record("large", 0, 6), sweep_ms=((1, 20.0), (64, 40.0)))
    chosen = [best_route([small, large], replace(QUERY, nodes=nodes)).hops[0].peer for nodes in (0, 2, 16, 256)]
    assert chosen == ["small", "small", "large", "large"]


def test_who_is_busy_makes_wait() -> None:
    idle, busy = record("a", 0, 6, 20.0), replace(record("b", 0, 6, 10.0), busy=0.9)
    assert wait_ms(idle, 20.0) == 0
    assert wait_ms(busy, 10.0) == pytest.approx(45.0)
    assert wait_ms(replace(busy, busy=1.0), 10.0) < 100
    assert best_route([idle, busy], QUERY).hops[0].peer == "a"


def test_a_failure_is_forgotten_by_halves_and_never_forbids() -> None:
    failed, other = record("a", 0, 6, 10.0), record("b", 0, 6, 100.0)
    query = replace(QUERY, failures=(("a", 1_000.0),), now=1_000.0)
    penalties = [penalty_ms(PeerId("a"), replace(query, now=1_000.0 + FAILURE_HALF_LIFE_S * n)) for n in range(3)]
    assert penalties == [FAILURE_PENALTY_MS, FAILURE_PENALTY_MS / 2, FAILURE_PENALTY_MS / 4]
    assert best_route([failed, other], query).hops[0].peer == "b"
    assert best_route([failed, other], replace(query, now=2_000.0)).hops[0].peer == "a"
    alone = best_route([failed], query)
    assert alone.hops[0].peer == "a"
    assert alone.sweep_ms == pytest.approx(best_route([failed], QUERY).sweep_ms), "a penalty is no time of a sweep"
    with pytest.raises(RouteError, match="nobody serves layers 0…5"):
        best_route([failed], replace(query, avoid=frozenset("a")))


def test_who_has_no_kv_room_is_not_used() -> None:
    full = replace(record("a", 0, 4, 1.0), kv_tokens_free=10)
    records = [full, record("b", 0, 4, 90.0), record("c", 4, 6)]
    assert [hop.peer for hop in best_route(records, replace(QUERY, kv_tokens=10)).hops] == ["a", "c"]
    assert [hop.peer for hop in best_route(records, replace(QUERY, kv_tokens=11)).hops] == ["b", "c"]
    with pytest.raises(RouteError) as caught:
        best_route(records, replace(QUERY, kv_tokens=101))
    assert caught.value.missing == ((0, 6),)
    assert "no node of layers 0…5 of big has KV room for 101 tokens" in str(caught.value)
    assert str(caught.value).endswith("node serve big --layers 0-6 --join /ip4/192.0.2.1/tcp/1/p2p/Qm")


def hops(*parts: tuple[str, int, int]) -> tuple[RouteHop, ...]:
    return tuple(RouteHop(PeerId(name), Span(start, end)) for name, start, end in parts)


REPAIR = [
    *(record("a", 0, 2), record("b", 2, 4), record("c", 4, 6)),
    *(record("b1", 2, 3), record("b2", 3, 4), record("ab", 0, 4), record("all", 0, 6, 1.0)),
]


@pytest.mark.parametrize(
    ("kept", "dead", "expected"),
    [
        ([("a", 0, 2), ("c", 4, 6)], ["b", "ab", "all"], [("a", 0, 2), ("b1", 2, 3), ("b2", 3, 4), ("c", 4, 6)]),
        (
            [("b1", 2, 3), ("b2", 3, 4), ("c", 4, 6)],
            ["a", "all"],
            [("ab", 0, 2), ("b1", 2, 3), ("b2", 3, 4), ("c", 4, 6)],
        ),
        ([("a", 0, 2), ("c", 4, 6)], ["b1", "ab", "all"], [("a", 0, 2), ("b", 2, 4), ("c", 4, 6)]),
        ([("c", 4, 6)], ["a", "b1", "all"], [("ab", 0, 4), ("c", 4, 6)]),
        ([("a", 0, 2)], ["b", "c"], [("a", 0, 2), ("all", 2, 6)]),
    ],
)
def test_a_repair_keeps_survivors_and_may_move_borders(
    kept: list[tuple[str, int, int]], dead: list[str], expected: list[tuple[str, int, int]]
) -> None:
    query = replace(QUERY, keep=hops(*kept), avoid=frozenset(dead), replay_layer_ms=100.0, kv_tokens=50)
    alive = [replace(node, kv_tokens_free=0) if node.peer in {name for name, *_ in kept} else node for node in REPAIR]
    assert best_route(alive, query).hops == hops(*expected)


def test_a_survivor_is_given_up_where_a_replay_is_cheaper() -> None:
    query = replace(QUERY, keep=hops(("a", 0, 2), ("c", 4, 6)), avoid=frozenset("b"))
    assert [hop.peer for hop in best_route(REPAIR, replace(query, replay_layer_ms=1.0)).hops] == ["all"]


def test_a_draining_survivor_still_serves_its_own_session() -> None:
    records = [replace(node, state=NodeState.DRAINING) if node.peer == "a" else node for node in REPAIR[:3]]
    assert best_route(records, replace(QUERY, keep=hops(("a", 0, 2)))).hops == hops(
        ("a", 0, 2), ("b", 2, 4), ("c", 4, 6)
    )
    with pytest.raises(RouteError, match="0-2"):
        best_route(records, QUERY)


def test_a_chain_has_one_numeric_class() -> None:
    records = [record("a", 0, 3), record("b", 3, 6, kind="cuda-bfloat16")]
    with pytest.raises(RouteError, match="one numeric class"):
        best_route(records, QUERY)
    records += [record("c", 3, 6, ms=900.0), record("d", 0, 3, kind="cuda-bfloat16")]
    assert [hop.peer for hop in best_route(records, QUERY).hops] == ["d", "b"]
    route = best_route(records, replace(QUERY, numeric_class="cpu-float32"))
    assert [hop.peer for hop in route.hops] == ["a", "c"]
    with pytest.raises(RouteError, match="the numeric class cpu-float64"):
        best_route(records, replace(QUERY, numeric_class="cpu-float64"))


def test_only_serving_nodes_count_and_the_gap_is_named() -> None:
    records = [record("a", 0, 2), replace(record("b", 2, 6), state=NodeState.DRAINING)]
    with pytest.raises(RouteError) as caught:
        best_route(records, QUERY)
    assert caught.value.missing == ((2, 6),)
    assert "node serve big --layers 2-6 --join /ip4/192.0.2.1" in str(caught.value)
    with pytest.raises(RouteError, match="nobody serves layers 0…5"):
        best_route([], QUERY)


def test_clients_spread_over_equal_chains() -> None:
    """200 clients, 3 spans of 4 holders: 50 expected on each, standard deviation 6.1, so [26, 74] is 4 of it."""
    records = [record(f"{span}{holder}", 2 * span, 2 * span + 2) for span in range(3) for holder in range(4)]
    routes = [best_route(records, replace(QUERY, seed=seed)) for seed in range(200)]
    taken = Counter(hop.peer for route in routes for hop in route.hops)
    assert len(taken) == 12
    assert all(26 <= count <= 74 for count in taken.values()), taken
    assert len({tuple(hop.peer for hop in route.hops) for route in routes}) > 50
    assert best_route(records, replace(QUERY, seed=7)) == best_route(records[::-1], replace(QUERY, seed=7))


def test_chance_never_costs_more_than_a_few_percent() -> None:
    rng = random.Random(3)
    for seed in range(300):
        here = random_swarm(rng)
        query = replace(here.query, keep=(), replay_layer_ms=0.0, failures=())
        try:
            best = best_route(here.records, query)
        except RouteError:
            continue
        drawn = best_route(here.records, replace(query, seed=seed))
        assert best.sweep_ms <= drawn.sweep_ms + 1e-9
        assert drawn.sweep_ms <= best.sweep_ms * (1 + SPEED_JITTER) + 1e-9


def test_chance_picks_among_nearly_equal_chains_only() -> None:
    query = replace(QUERY, delays_ms={PeerId(name): 0.0 for name in "abc"})
    records = [record("a", 0, 6, 100.0), record("b", 0, 6, 101.0), record("c", 0, 6, 104.0)]
    taken = {best_route(records, replace(query, seed=seed)).hops[0].peer for seed in range(200)}
    assert taken == {"a", "b"}


def test_a_search_cut_short_says_how_far_off_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `slow` twice it would be 40 ms of compute; rightful are 45 with `z` at the end, and `slow` alone with 60."""
    near = tuple((PeerId(name), 0.1) for name in ("slow", "fast", "z"))
    records = [record("slow", 0, 6, 60.0), record("fast", 2, 4, 0.1), record("z", 4, 6, 25.0)]
    records = [replace(node, delays_ms=near) for node in records]
    query = replace(QUERY, delays_ms=dict(near))
    best = best_route(records, query)
    assert ([hop.peer for hop in best.hops], best.gap_ms) == (["slow", "fast", "z"], 0.0)
    monkeypatch.setattr(swarm.routing.search, "MAX_SPLITS", 1)
    hasty = best_route(records, query)
    assert [hop.peer for hop in hasty.hops] == ["slow"]
    assert hasty.gap_ms == pytest.approx(hasty.sweep_ms - best.sweep_ms)


def test_the_runner_up_does_without_one_of_its_machines() -> None:
    records = [record("a", 0, 3), record("b", 3, 6), record("c", 0, 6, 60.0)]
    best = best_route(records, QUERY)
    assert [hop.peer for hop in best.hops] == ["a", "b"]
    second = runner_up(records, QUERY, best)
    assert second is not None
    assert [hop.peer for hop in second.hops] == ["c"]
    assert runner_up(records[:2], QUERY, best) is None
