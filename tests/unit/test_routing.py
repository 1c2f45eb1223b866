"""Chains: against brute force on small random swarms, and what the user reads when there is none."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from swarm.errors import RouteError
from swarm.ids import PeerId
from swarm.layers import Span
from swarm.record import NodeRecord, NodeState
from swarm.registry import ModelIdentity
from swarm.routing import HOP_MS, RouteQuery, best_route

LAYERS = 6
MODEL = ModelIdentity("big", "f" * 64, "c" * 64, "w" * 64, "t" * 64, LAYERS)
QUERY = RouteQuery("big", LAYERS, join=("/ip4/192.0.2.1/tcp/1/p2p/Qm",))


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
        kv_tokens_free=1,
        kv_tokens_total=1,
        sequence=1,
        expires_at=0.0,
    )


def cost(chosen: tuple[tuple[NodeRecord, Span], ...]) -> float:
    return sum(HOP_MS + node.sweep_ms[0][1] * len(span) / len(node.span) for node, span in chosen)


def cheapest(records: list[NodeRecord]) -> float | None:
    """Every order of every subset, with every cut."""
    found = []
    for count in range(1, len(records) + 1):
        for order in itertools.permutations(records, count):
            for cuts in itertools.combinations(range(1, LAYERS), count - 1):
                spans = [Span(a, b) for a, b in itertools.pairwise((0, *cuts, LAYERS))]
                if all(node.span.contains(span) for node, span in zip(order, spans, strict=True)):
                    found.append(cost(tuple(zip(order, spans, strict=True))))
    return min(found, default=None)


def test_the_route_is_the_cheapest_chain() -> None:
    rng = random.Random(5)
    covered = optimal = 0
    for _ in range(300):
        records = []
        for name in "abcd":
            start = rng.randrange(LAYERS)
            records.append(record(name, start, rng.randint(start + 1, LAYERS), rng.choice([5.0, 20.0, 80.0])))
        best = cheapest(records)
        if best is None:
            with pytest.raises(RouteError):
                best_route(records, QUERY)
            continue
        route = best_route(records, QUERY)
        chosen = tuple(zip(route.records, (hop.span for hop in route.hops), strict=True))
        covered += 1
        optimal += cost(chosen) == pytest.approx(best)
        assert len({hop.peer for hop in route.hops}) == len(route.hops), "a machine stands in a chain once"
        assert all(node.span.contains(span) for node, span in chosen)
        assert [hop.span.start for hop in route.hops[1:]] == [hop.span.end for hop in route.hops[:-1]]
    assert covered > 100
    assert optimal >= 0.97 * covered, "a machine may stand once only, which the programme over borders sees late"


def test_a_chain_has_one_numeric_class() -> None:
    records = [record("a", 0, 3), record("b", 3, 6, kind="cuda-bfloat16")]
    with pytest.raises(RouteError, match="numeric class"):
        best_route(records, QUERY)
    route = best_route([*records, record("c", 3, 6, ms=900.0)], QUERY)
    assert [hop.peer for hop in route.hops] == ["a", "c"]


def test_only_serving_nodes_count_and_the_gap_is_named() -> None:
    records = [record("a", 0, 2), replace(record("b", 2, 6), state=NodeState.DRAINING)]
    with pytest.raises(RouteError) as caught:
        best_route(records, QUERY)
    assert caught.value.missing == ((2, 6),)
    assert "node serve big --layers 2-6 --join /ip4/192.0.2.1" in str(caught.value)
