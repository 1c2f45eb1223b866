"""Whatever legal records say, routing, hedging and placement find finite answers; what is too fast gains little."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.base.errors import RouteError
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span, missing_layers
from swarm.directory.node_record import NodeRecord
from swarm.protocol.limits import MAX_LAYERS, SWEEP_MS
from swarm.routing.costs import RouteQuery, sweep_ms
from swarm.routing.placement import Newcomer, layout_of, plan_join, typical_capacity
from swarm.routing.plausible import COMPARED_ROWS, PLAUSIBLE_PART, plausible
from swarm.routing.route import best_route, hedged, runner_up
from tests.record_strategies import records

PEERS = tuple(PeerId(name) for name in "abcdefgh")


@st.composite
def swarms(draw: st.DrawFn, max_layers: int = MAX_LAYERS) -> list[NodeRecord]:
    model = ModelIdentity.of("demo", "b2" * 32, "c3" * 32, "d4" * 32, draw(st.sampled_from([1, 2, 12, max_layers])))
    return [draw(records(model, peer, PEERS)) for peer in PEERS[: draw(st.integers(1, 6))]]


@settings(max_examples=40)
@given(swarms(), st.integers(0, 512), st.integers(0, 3), st.booleans())
def test_every_legal_swarm_has_a_route_of_finite_cost_or_a_gap(
    found: list[NodeRecord], nodes: int, seed: int, measured: bool
) -> None:
    num_layers = found[0].model.num_layers
    query = RouteQuery("demo", num_layers, nodes, seed=seed or None)
    if measured:
        query = replace(query, slowness={PEERS[0]: 1e3, PEERS[1]: 0.25}, newcomer=1.2, delays_ms={PEERS[0]: 1_000.0})
    for weighed in (found, plausible(found)):
        try:
            route = best_route(weighed, query)
        except RouteError:
            by_class: dict[str, list[Span]] = {one.numeric_class: [] for one in found}
            for one in found:
                if one.state.value == "serving":
                    by_class[one.numeric_class].append(one.span)
            assert all(missing_layers(spans, num_layers) for spans in by_class.values())
            continue
        route = hedged(route, weighed, query)
        numbers = [route.sweep_ms, route.return_ms, route.gap_ms, *(cost.total_ms for cost in route.costs)]
        forecast = route.forecast
        assert forecast.is_finite
        assert all(low < high for (low, _), (high, _) in pairwise(forecast.steps))
        assert all(low <= high * (1 + 1e-9) for (_, low), (_, high) in pairwise(forecast.steps))
        assert len(forecast.steps) <= 40, "a hostile record makes no long staircase"
        numbers += [forecast.links_ms, forecast.compute_ms, forecast.row_ms, forecast.waiting_ms, forecast.link_row_ms]
        assert all(math.isfinite(number) and number >= 0 for number in numbers)
        assert 0 <= forecast.bottleneck_share <= 1
        second = runner_up(weighed, query, route)
        assert second is None or math.isfinite(second.sweep_ms)


@settings(max_examples=40)
@given(swarms(max_layers=40), st.integers(1, 40))
def test_every_legal_swarm_has_a_place_for_a_newcomer(found: list[NodeRecord], count: int) -> None:
    num_layers = found[0].model.num_layers
    capacity = typical_capacity(found)
    assert math.isfinite(capacity)
    assert capacity > 0
    layout = layout_of(found, num_layers, capacity)
    plan = plan_join(layout, Newcomer(PeerId("new"), min(count, num_layers), capacity))
    assert plan.span.end <= num_layers
    for score in (plan.before, plan.after):
        assert math.isfinite(score.weakest)
        assert math.isfinite(score.evenness)


@settings(max_examples=40)
@given(swarms(), st.integers(0, 5))
def test_no_claim_is_much_faster_than_the_median_of_its_class(found: list[NodeRecord], place: int) -> None:
    liar = place % len(found)
    found[liar] = replace(found[liar], sweep_ms=((1, SWEEP_MS[0]), (2, SWEEP_MS[0])))
    weighed = plausible(found)
    assert [one.peer for one in weighed] == [one.peer for one in found]
    alike = [(before, after) for before, after in zip(found, weighed, strict=True) if _is_alike(before, found[liar])]
    floors_ms = {
        rows: PLAUSIBLE_PART * float(np.median([sweep_ms(one, rows) / len(one.span) for one, _ in alike]))
        for rows in COMPARED_ROWS
    }
    for before, after in alike:
        layers = len(before.span)
        is_quick = {rows: sweep_ms(before, rows) / layers < floors_ms[rows] for rows in COMPARED_ROWS}
        for rows in COMPARED_ROWS:
            layer_ms, was_ms = (sweep_ms(one, rows) / layers for one in (after, before))
            most_ms = SWEEP_MS[1] / layers  # no claim can say more
            assert layer_ms >= min(floors_ms[rows], most_ms) * (1 - 1e-9)
            assert layer_ms >= was_ms * (1 - 1e-9)
            # A staircase is made slower as a whole, so that it still rises.
            is_changed = any(is_quick.values()) if before.bucketed else is_quick[rows]
            assert is_changed or math.isclose(layer_ms, was_ms)


def _is_alike(record: NodeRecord, other: NodeRecord) -> bool:
    return bool(record.sweep_ms) and record.numeric_class == other.numeric_class
