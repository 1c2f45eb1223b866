"""A client's first sweeps: what it does on a route before it has measured much, and after a piece of bad luck."""

from __future__ import annotations

from dataclasses import replace

import pytest

from client.base.stats import SweepMeasurement
from client.decode.goodput import FIRST_SIZE, FIRST_TREES, Goodput
from client.decode.latency_model import CLAIMED_ROWS, GROWTH, LatencyModel
from client.decode.policy import PipelineState, SpeculationPlan
from client.draft.search.tree import DraftTree
from swarm.routing.costs import RouteForecast
from tests.sweep_measurements import measured, with_wait

ROUTE = "route"
FAR = RouteForecast(links_ms=400, compute_ms=21, row_ms=0.4, hops=3)
NEAR = RouteForecast(links_ms=4, compute_ms=21, row_ms=0.3, hops=3)
TREE = tuple(0.8 / (1 + place) for place in range(16))
DRAFT_MS = 8.0


def spent(
    forecast: RouteForecast, nodes: int, factor: float = 1.0, *, accepted_tokens: int = 0, is_alone: bool = True
) -> SweepMeasurement:
    """A sweep, where hops are `factor` times as slow as was promised."""
    computed_ms = factor * (forecast.compute_ms + forecast.row_ms * nodes)
    total_ms = forecast.links_ms + forecast.waiting_ms + computed_ms
    return measured(
        nodes,
        total_ms,
        forecast.waiting_ms,
        computed_ms,
        forecast.hops,
        expected_tokens=1.0,
        accepted_tokens=accepted_tokens,
        is_alone=is_alone,
    )


def drafted(control: Goodput, draft_ms: float = DRAFT_MS, *, has_read: bool = False) -> SpeculationPlan:
    """The next tree was planned and drafted."""
    planned = control.plan(ROUTE, 0.0, 512)
    control.observe_draft(0.0, DraftTree((0,) * 16, (None,) * 16, TREE, 2, has_read=has_read), planned, draft_ms)
    return planned


def further(control: Goodput, probabilities: tuple[float, ...]) -> SpeculationPlan:
    """What another sweep would carry while the first is on its way."""
    control.min_probability(ROUTE, 0.0)  # which values time
    return control.extend(ROUTE, probabilities, PipelineState(1, 0.0))


def test_what_routing_promises_fills_the_pipe_from_the_first_trip_on_and_only_where_trips_are_long() -> None:
    sent = {}
    for forecast in (FAR, NEAR):
        control = Goodput(512)
        control.expect(ROUTE, forecast)
        assert control.plan(ROUTE, 0.0, 512).nodes == FIRST_SIZE, "nobody knows what the draft is worth"
        drafted(control)
        assert control.max_nodes(ROUTE, 0.0, 512, PipelineState(1, 0.0)) > 0
        sent[forecast] = further(control, (0.12,) * 4).nodes
    assert sent == {FAR: 4, NEAR: 0}


def test_a_first_tree_carries_no_node_that_costs_more_than_it_may_bring() -> None:
    """Of 8 KiB over 512 kbit/s, sixteen nodes took four seconds."""
    sent = {}
    for link_row_ms in (0.2, 260.0):
        control = Goodput(512)
        control.expect(ROUTE, replace(FAR, links_ms=20, link_row_ms=link_row_ms))
        planned = drafted(control)
        sent[link_row_ms] = control.trim(ROUTE, 0.0, TREE, planned).nodes
    assert sent == {0.2: 16, 260.0: 0}


def test_without_a_promise_the_first_further_sweeps_are_small_and_must_be_worth_it() -> None:
    control = Goodput(512)
    assert control.max_nodes(ROUTE, 0.0, 512, PipelineState(1, 0.0)) == 0, "nothing was drafted"
    drafted(control)
    assert control.max_nodes(ROUTE, 0.0, 512, PipelineState(1, 0.0)) == FIRST_SIZE
    assert further(control, (0.02,) * 16).nodes == 0
    assert further(control, (0.5,) * 16).nodes > 0


def test_promises_end_with_the_first_measurement() -> None:
    cost = LatencyModel(replace(FAR, waiting_ms=30))
    assert cost.sweep_ms(0) == pytest.approx(400 + 21 + 30)
    assert cost.service_interval_ms(1) == pytest.approx((21 + 30) / 3), "the hops share it"
    cost.learn(spent(NEAR, 8))
    assert cost.sweep_ms(8) == pytest.approx(spent(NEAR, 8).total_ms)


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_machines_that_are_slower_than_they_promise_are_so_with_every_row(factor: float) -> None:
    """Else a claim of three times too much made small sweeps seem to cost nothing, and they queued at the first hop."""
    cost = LatencyModel(NEAR)
    cost.learn(spent(NEAR, 16, factor))
    for nodes in (0, 4, 64):
        assert cost.compute.at(nodes + 1) == pytest.approx(spent(NEAR, nodes, factor).computed_ms, rel=0.02)


def test_who_shares_forwards_learns_nothing_of_how_wrong_claims_are() -> None:
    """A sweep that shares them pays a part of what one row costs, and all of what its others do."""
    cost = LatencyModel(NEAR)
    for nodes in (12, 12, 16):
        took = spent(NEAR, nodes)
        cost.learn(measured(nodes, took.total_ms, 40, 7 + NEAR.row_ms * nodes, 3))
    assert cost.compute.b == pytest.approx(NEAR.row_ms)


def test_who_waits_for_its_own_kind_shares_nothing() -> None:
    cost = LatencyModel(NEAR)
    cost.learn(with_wait(spent(NEAR, 16, 1 / 3, is_alone=False), 60))
    assert cost.compute.b == pytest.approx(NEAR.row_ms / 3, rel=0.1)


def test_a_sweep_that_met_its_own_kind_is_a_guess_until_one_was_alone() -> None:
    cost = LatencyModel()
    cost.learn(spent(replace(FAR, links_ms=500), 16, is_alone=False))
    assert cost.sweep_ms(16) == pytest.approx(500 + spent(FAR, 16).computed_ms)
    cost.learn(spent(replace(FAR, links_ms=450), 16, is_alone=False))
    assert cost.links.at(17) == pytest.approx(450), "the least of them is nearest"
    cost.learn(spent(replace(FAR, links_ms=480), 16, is_alone=False))
    assert cost.links.at(17) == pytest.approx(450)
    cost.learn(spent(FAR, 16))
    assert cost.links.at(17) == pytest.approx(400)
    cost.learn(spent(replace(FAR, links_ms=300), 16, is_alone=False))
    assert cost.links.at(17) == pytest.approx(400), "measured is measured"


def test_one_unlucky_tree_does_not_end_speculation() -> None:
    """Near by, with a draft that takes a while, a client fell back to plain decoding for the rest of a short text."""
    control = Goodput(512)
    control.expect(ROUTE, NEAR)
    for _ in range(FIRST_TREES - 1):
        assert drafted(control, 20.0).nodes > 0
        control.observe_sweep(ROUTE, replace(spent(NEAR, 16), expected_tokens=8.0))
    assert control.plan(ROUTE, 0.0, 512).is_whole
    drafted(control, 20.0)
    control.observe_sweep(ROUTE, replace(spent(NEAR, 16), expected_tokens=8.0))
    assert control.plan(ROUTE, 0.0, 512).nodes == 0, "but three do"


def test_a_promise_that_was_broken_once_is_still_believed() -> None:
    control = Goodput(512)
    control.expect(ROUTE, NEAR)
    drafted(control, 2.0)
    control.observe_sweep(ROUTE, replace(spent(NEAR, 16), expected_tokens=4.0))
    planned = control.plan(ROUTE, 0.0, 512)
    assert planned.nodes > 0
    assert not planned.is_whole


def test_where_drafting_itself_takes_too_long_one_tree_is_enough() -> None:
    control = Goodput(512)
    control.expect(ROUTE, NEAR)
    drafted(control, 800.0)
    control.observe_sweep(ROUTE, spent(NEAR, 16, accepted_tokens=1))
    assert control.plan(ROUTE, 0.0, 512).nodes == 0


def test_another_route_begins_with_what_the_last_one_cost() -> None:
    control = Goodput(512)
    control.expect(ROUTE, FAR)
    drafted(control)
    for _ in range(20):
        control.observe_sweep(ROUTE, spent(FAR, 16, accepted_tokens=1))
    assert control.plan("other", 0.0, 512).predicted_ms == pytest.approx(
        spent(FAR, control.plan("other", 0.0, 512).nodes).total_ms, rel=0.1
    )
    assert "nothing" not in control.plan("other", 0.0, 512).reason


def test_a_tree_before_which_the_text_was_read_says_nothing_of_what_later_ones_take() -> None:
    """Cold, and beside a node that read the prompt too, a draft took ten times as long, and near by all was plain."""
    control = Goodput(512)
    control.expect(ROUTE, NEAR)
    drafted(control, 200.0, has_read=True)
    control.observe_sweep(ROUTE, spent(NEAR, 16, accepted_tokens=1))
    assert not control.draft.is_known
    for _ in range(FIRST_TREES):
        assert drafted(control).nodes > 0
        control.observe_sweep(ROUTE, spent(NEAR, 16, accepted_tokens=1))
    assert control.draft.at(16) == pytest.approx(DRAFT_MS)
    assert control.round.at(1) == pytest.approx(DRAFT_MS / 2)
    drafted(control, 200.0, has_read=True)
    assert control.draft.at(16) == pytest.approx(DRAFT_MS), "the next text"


def test_a_draft_that_is_always_slow_is_found_out_by_its_second_tree() -> None:
    control = Goodput(512)
    control.expect(ROUTE, NEAR)
    for has_read in (True, False):
        assert drafted(control, 800.0, has_read=has_read).nodes > 0
        control.observe_sweep(ROUTE, spent(NEAR, 16, accepted_tokens=1))
    assert control.plan(ROUTE, 0.0, 512).nodes == 0


def test_rows_that_are_said_to_cost_nothing_are_tried_by_and_by() -> None:
    """A machine that had measured itself in a bad moment said so, and a sweep of 512 nodes took half a second."""
    control, cost_ms = Goodput(2048), replace(NEAR, row_ms=1.0)
    control.expect(ROUTE, replace(NEAR, row_ms=0.0))
    sent: list[int] = []
    for _ in range(6):
        assert control.max_nodes(ROUTE, 0.0, 2048, PipelineState(1, 0.0)) <= max(
            GROWTH * (max(sent, default=0) + 1), CLAIMED_ROWS
        )
        planned = control.plan(ROUTE, 0.0, 2048)
        probabilities = tuple(0.9 / (1 + place) for place in range(planned.nodes))
        control.observe_draft(
            0.0, DraftTree((0,) * len(probabilities), (None,) * len(probabilities), probabilities, 2), planned, 1.0
        )
        sent.append(control.trim(ROUTE, 0.0, probabilities, planned).nodes)
        control.observe_sweep(ROUTE, spent(cost_ms, sent[-1], accepted_tokens=2))
    assert max(sent) <= GROWTH * (FIRST_SIZE + 1), "what a row costs is known before larger ones go"
    free = Goodput(2048)
    free.expect(ROUTE, replace(NEAR, row_ms=0.0))
    grown: list[int] = []
    for _ in range(4):
        planned = free.plan(ROUTE, 0.0, 2048)
        probabilities = (0.5,) * planned.nodes
        free.observe_draft(
            0.0, DraftTree((0,) * len(probabilities), (None,) * len(probabilities), probabilities, 2), planned, 0.0
        )
        grown.append(planned.nodes)
        free.observe_sweep(ROUTE, spent(replace(NEAR, row_ms=0.0), planned.nodes, accepted_tokens=8))
    assert grown[0] == FIRST_SIZE
    assert grown[-1] > 1000, "where they do cost nothing that takes three sweeps"


@pytest.mark.parametrize("kind", ["is_early", "has_read"])
def test_what_is_said_of_one_tree_counts_where_it_is_said_of_every_tree(kind: str) -> None:
    """Else a controller that only ever sees such trees would stay with its first trial, whatever that costs."""
    control, is_early, has_read = Goodput(512), kind == "is_early", kind == "has_read"
    control.expect(ROUTE, NEAR)
    for _ in range(2 * FIRST_TREES):
        tree = DraftTree((0,) * 16, (None,) * 16, (0.01,) * 16, 2, is_early=is_early, has_read=has_read)
        control.observe_draft(0.0, tree, control.plan(ROUTE, 0.0, 512), 800.0)
        control.observe_sweep(ROUTE, spent(NEAR, 16))
    assert control.draft.at(16) == pytest.approx(800.0)
    assert control.plan(ROUTE, 0.0, 512).nodes == 0
