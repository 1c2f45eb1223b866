"""The controller where hops pad rows to buckets: trees fill them from a client's first sweeps on.

Cards are synthetic (`benchmarks.simulation.profiles`), and all is counted in expected tokens per millisecond.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from benchmarks.simulation.profiles import CARD_STEPS
from client.base.stats import SweepMeasurement
from client.decode.goodput import Goodput
from client.decode.latency_model import LatencyModel
from client.decode.policy import PipelineState, SpeculationPlan
from client.draft.search.tree import DraftTree
from swarm.routing.costs import RouteForecast
from swarm.routing.staircase import padded_ms
from tests.sweep_measurements import measured
from tests.unit.client.decode.test_goodput import HOPELESS, PASSAGES, REPETITIVE, ROUTE, World, draft

EDGES = tuple(rows for rows, _ in CARD_STEPS)
FIRST_TEXT = 20
"""Sweeps of a first text."""


@dataclass(frozen=True, slots=True)
class CardWorld(World):
    """A route over cards: forwards take `pace` times the synthetic staircase and a hop's messages."""

    pace: float = 1.0

    @property
    def steps(self) -> tuple[tuple[int, float], ...]:
        return tuple((rows, self.pace * ms + self.forward_ms) for rows, ms in CARD_STEPS)

    def forecast(self, claim: float = 1.0) -> RouteForecast:
        """What routing forecasts where the card claims `claim` times the truth."""
        steps = tuple((rows, claim * ms) for rows, ms in self.steps)
        return RouteForecast(self.links_ms, steps[0][1], 0.0, self.row_ms, steps=steps)

    def sweep(self, nodes: int) -> SweepMeasurement:
        compute, links = padded_ms(self.steps, nodes + 1), self.links_ms + self.row_ms * (nodes + 1)
        expected = sum(self.probabilities[:nodes])
        return measured(nodes, links + compute, 0.0, compute, expected_tokens=expected, accepted_tokens=round(expected))


def card(links_ms: float, round_ms: float, probabilities: tuple[float, ...], row_ms: float = 0.002) -> CardWorld:
    return CardWorld(links_ms, row_ms, 1.5, 0.0, round_ms, probabilities)


WORLDS = {
    "1 ms, passages": card(2, 1, PASSAGES),
    "25 ms, passages": card(50, 1, PASSAGES),
    "1 ms, repetitive": card(2, 1, REPETITIVE),
    "25 ms, repetitive": card(50, 1, REPETITIVE),
    "1 ms, hopeless": card(2, 1, HOPELESS),
    "1 ms, slow draft": card(2, 6, PASSAGES),
    "a slow card": replace(card(2, 2, PASSAGES), pace=8.0),
    "10 Mbit/s": card(50, 1, PASSAGES, 0.8),
}


def first_text(world: CardWorld, rng: random.Random, forecast: RouteForecast) -> tuple[float, list[int]]:
    """Expected tokens per millisecond of a client that knows a forecast only, and the tree sizes that it sent.

    Times are noisy, and one sweep stalls.
    """
    control, tokens, time_ms, sizes = Goodput(256), 0.0, 0.0, list[int]()
    control.expect(ROUTE, forecast)
    stalled = rng.randrange(FIRST_TEXT)
    for turn in range(FIRST_TEXT):
        planned, nodes = control.plan(ROUTE, 0.0, 256), 0
        if planned.nodes:
            drafted = draft(world, planned.nodes, control.stop_rule(ROUTE, 0.0, planned))
            probabilities = world.probabilities[:drafted]
            tree = DraftTree((0,) * drafted, (None,) * drafted, probabilities, world.rounds(drafted))
            control.observe_draft(0.0, tree, planned, world.draft_ms(drafted) * rng.uniform(0.95, 1.05))
            nodes = control.trim(ROUTE, 0.0, probabilities, planned).nodes
            time_ms += world.draft_ms(drafted)
        spent, shaken = world.sweep(nodes), rng.uniform(0.97, 1.03) * (5 if turn == stalled else 1)
        hops = tuple(replace(hop, compute_ms=hop.compute_ms * shaken) for hop in spent.hops)
        control.observe_sweep(ROUTE, replace(spent, total_ms=spent.total_ms * shaken, hops=hops))
        tokens, time_ms = tokens + 1 + sum(world.probabilities[:nodes]), time_ms + spent.total_ms
        sizes.append(nodes)
    return tokens / time_ms, sizes


@pytest.mark.parametrize("claim", [0.4, 1.0, 2.5])
@pytest.mark.parametrize("name", WORLDS)
def test_a_first_text_comes_near_the_best_fixed_tree(name: str, claim: float) -> None:
    world = WORLDS[name]
    best = max(world.goodput(nodes) for nodes in (*range(16), 23, 31, 47, 63, 95, 127, 191, 255))
    for seed in range(6):
        found, sizes = first_text(world, random.Random(seed), world.forecast(claim))
        assert found >= 0.95 * best, sizes


@pytest.mark.parametrize("name", ["1 ms, passages", "1 ms, repetitive"])
def test_trees_fill_buckets_with_the_pending_token(name: str) -> None:
    world = WORLDS[name]
    _, sizes = first_text(world, random.Random(1), world.forecast())
    assert {nodes + 1 for nodes in sizes if nodes >= EDGES[0]} <= set(EDGES), sizes
    assert len(set(sizes)) > 1, "the first tree fills the smallest"


def test_machines_that_announce_no_buckets_are_a_straight_line() -> None:
    """Such a line, in this world, costs a good part of the speed: it knows no edges."""
    world = WORLDS["1 ms, repetitive"]
    steps = world.steps
    straight = replace(world.forecast(), steps=(), row_ms=(steps[2][1] - steps[0][1]) / 63)
    found, sizes = first_text(world, random.Random(0), straight)
    assert sizes[0] == 16
    assert found < 0.95 * world.goodput(63)


def known(world: CardWorld) -> Goodput:
    """A controller that has seen trees of all buckets on a route."""
    control = Goodput(256)
    control.expect(ROUTE, world.forecast())
    for _ in range(10):
        for nodes in (15, 31, 63, 127):
            tree = DraftTree((0,) * nodes, (None,) * nodes, world.probabilities[:nodes], 4)
            control.observe_draft(0.0, tree, SpeculationPlan(nodes, None, ""), 4.0)
            control.observe_sweep(ROUTE, world.sweep(nodes))
    return control


def test_a_trees_last_nodes_go_only_if_they_pay_for_their_bucket() -> None:
    control, planned = known(WORLDS["1 ms, passages"]), SpeculationPlan(63, None, "planned")
    few = control.trim(ROUTE, 0.0, (0.5,) * 4 + (0.06,) * 13, planned)
    assert few.nodes == 17, "the second bucket takes a fifth of a millisecond"
    slow = known(WORLDS["a slow card"]).trim(ROUTE, 0.0, (0.5,) * 4 + (0.06,) * 11 + (0.01,) * 2, planned)
    assert slow.nodes == 15, "and here eight fifths"
    assert "next bucket" in slow.reason
    assert control.trim(ROUTE, 0.0, (0.5,) * 4 + (0.001,) * 11, planned).nodes == 4, "not even where rows are free"


def test_further_sweeps_fill_buckets_without_a_pending_token() -> None:
    control = known(WORLDS["25 ms, passages"])
    least = control.min_probability(ROUTE, 0.0)
    sent = control.extend(ROUTE, (0.3,) * 8 + (0.002,) * 192, PipelineState(1, 0.0))
    assert sent.nodes in {*EDGES, *(edge - 1 for edge in EDGES)}
    assert 0 < sent.nodes < 200
    assert control.extend(ROUTE, (least,) * 8, PipelineState(1, 0.0)).nodes == 0
    assert control.extend(ROUTE, (), PipelineState(1, 0.0)).nodes == 0


def test_a_row_is_free_for_its_sender_and_not_for_those_who_wait() -> None:
    """Sessions that share a card fill its buckets together."""
    forecast = WORLDS["1 ms, passages"].forecast()
    alone, among = LatencyModel(forecast), LatencyModel(replace(forecast, waiting_ms=3 * forecast.compute_ms))
    assert alone.per_node_ms == pytest.approx(alone.links.b)
    assert alone.node_price_ms() == 0
    assert alone.later_ms(15) == pytest.approx(alone.links.b * 15)
    assert among.per_node_ms > among.links.b + 2 * among.compute.b
    assert among.node_price_ms() > 0


def test_a_tree_is_cut_only_where_links_are_slow() -> None:
    fast, slow = (
        LatencyModel(replace(WORLDS["1 ms, passages"].forecast(), link_row_ms=ms, hops=3)) for ms in (0.0, 2.0)
    )
    assert fast.chunk(63) == 63
    assert slow.chunk(127) < 127
