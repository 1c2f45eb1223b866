"""The controller's staircase: it rises whatever was measured, and finds each bucket's time."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.profiles import CARD_STEPS, CARDS
from client.decode.goodput import SIZES
from client.decode.latency_model import StaircaseRegression, best_fill, sizes_within

EDGES = st.sets(st.integers(1, 4_096), min_size=1, max_size=12).map(lambda found: tuple(sorted(found)))
LESSONS = st.lists(st.tuples(st.integers(1, 700), st.floats(0.0, 1e5), st.booleans()), max_size=40)


@given(LESSONS)
def test_whatever_was_measured_it_rises(lessons: list[tuple[int, float, bool]]) -> None:
    found = StaircaseRegression(CARD_STEPS)
    for rows, ms, is_shared in lessons:
        found.learn(rows, ms, is_shared=is_shared)
        assert found.edges == tuple(rows for rows, _ in CARD_STEPS)
        assert all(0 <= before <= after for (_, before), (_, after) in pairwise(((0, 0.0), *found.steps)))
        assert found.b >= 0
    assert found.with_new_level().steps == found.steps


@settings(max_examples=20)
@given(st.integers(0, 1_000), st.sampled_from([0.2, 1.0, 5.0]))
def test_each_buckets_time_is_found_however_wrong_claims_are(seed: int, factor: float) -> None:
    """Claims are off by a factor; and a bucket of 64 rows takes as long as one of 128 nearly, which nobody claimed."""
    rng, found = random.Random(seed), StaircaseRegression(CARD_STEPS)
    true_ms = {rows: factor * ms for rows, ms in CARD_STEPS} | {64: factor * 7.0}
    for _ in range(60):
        for rows, ms in true_ms.items():
            found.learn(rows, ms * rng.uniform(0.97, 1.03))
    for rows, ms in found.steps:
        assert ms == pytest.approx(true_ms[rows], rel=0.05)


def test_one_measurement_corrects_every_claim_and_a_single_stall_none() -> None:
    found = StaircaseRegression(CARD_STEPS)
    found.learn(16, 2 * 4.66)
    for rows, ms in CARD_STEPS:
        assert found.at(rows) == pytest.approx(2 * ms, rel=0.01)
    for _ in range(20):
        found.learn(16, 2 * 4.66)
    before = found.steps
    found.learn(64, 500.0)
    assert found.steps == before
    for _ in range(3):
        found.learn(16, 4 * 4.66)
    for rows, ms in CARD_STEPS:
        assert found.at(rows) >= 3 * ms, "a machine that became slower is so at every size"


@given(EDGES, st.integers(1, 512))
def test_sizes_fill_buckets_with_the_pending_token(edges: tuple[int, ...], max_size: int) -> None:
    sizes = sizes_within(edges, SIZES, max_size)
    assert sizes == sorted(set(sizes))
    assert sizes[0] >= 1
    assert sizes[-1] <= max_size
    for size in sizes:
        full = size + 1 in edges or (size + 1) % edges[-1] == 0
        assert full or size < edges[0] or size == max_size


@given(EDGES, st.lists(st.floats(0.0, 1.0), max_size=80), st.integers(0, 1), st.floats(0.001, 1.0))
def test_what_is_sent_is_never_worth_less_than_nothing_more(
    edges: tuple[int, ...], probabilities: list[float], pending: int, step: float
) -> None:
    probabilities.sort(reverse=True)

    def price(nodes: int) -> float:
        return step * sum(edge < nodes + pending for edge in edges)

    nodes, gain = best_fill(edges, probabilities, price, pending)
    assert 0 <= nodes <= len(probabilities)
    assert gain == pytest.approx(sum(probabilities[:nodes]) - price(nodes))
    best = max(sum(probabilities[:count]) - price(count) for count in range(len(probabilities) + 1))
    assert gain == pytest.approx(best), "of all sizes"


def test_cards_that_are_simulated_have_the_steps_of_a_card() -> None:
    for costs in CARDS.values():
        assert costs.compute_ms(1) == costs.compute_ms(16) < costs.compute_ms(17) <= costs.compute_ms(64)
        assert [rows for rows, _ in costs.forecast().steps] == [rows for rows, _ in CARD_STEPS]
