"""The engine's staircase: it rises whatever was measured, is learned bucket by bucket, and is shared by rows."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.session.step_cost import StaircaseCost

BUCKETS = (16, 32, 64, 128, 256, 512)
TIMES = st.floats(0.0, 1e4)
MEASURED = st.dictionaries(st.sampled_from(BUCKETS), TIMES, min_size=1)
LESSONS = st.lists(st.tuples(st.integers(0, 600), TIMES, st.integers(1, 16)), max_size=30)


@given(MEASURED, LESSONS, st.integers(1, 1_500), st.floats(-50.0, 200.0))
def test_whatever_was_measured_it_rises_and_slices_end_on_edges(
    measured: dict[int, float], lessons: list[tuple[int, float, int]], rows: int, budget_ms: float
) -> None:
    cost = StaircaseCost(measured)
    for lesson in lessons:
        cost.learn(*lesson)
    assert cost.buckets == tuple(sorted(measured))
    assert all(0 <= before <= after for (_, before), (_, after) in pairwise(((0, 0.0), *cost.steps)))
    assert cost.per_session_ms >= 0
    assert cost.rows_within(budget_ms) in cost.buckets
    first = cost.slice_rows(rows, budget_ms)
    assert first == rows or first in cost.buckets
    assert 0 < first <= min(rows, cost.rows_within(budget_ms))
    assert cost.predict_ms(first) <= max(budget_ms, 2 * cost.predict_ms(1)) * (1 + 1e-9)


@given(MEASURED, st.lists(st.integers(0, 64), min_size=1, max_size=8))
def test_the_parts_of_a_forward_are_all_of_it_and_go_by_rows(measured: dict[int, float], rows: list[int]) -> None:
    cost = StaircaseCost(measured)
    shares = cost.shares(rows)
    assert sum(shares) == pytest.approx(1.0)
    total = sum(rows)
    for own, share in zip(rows, shares, strict=True):
        assert share == pytest.approx(own / total if total else 1 / len(rows))
    among_four = cost.shares(rows, sharers=4.0)
    assert sum(among_four) == pytest.approx(min(len(rows) / 4, 1.0)), "alone, its part is as small as usual"


@settings(max_examples=30)
@given(st.integers(0, 1_000), MEASURED)
def test_it_converges_to_what_forwards_take_from_any_start(seed: int, measured: dict[int, float]) -> None:
    rng = random.Random(seed)
    cost = StaircaseCost(measured)
    true_ms = dict(zip(cost.buckets, sorted(rng.uniform(1, 100) for _ in cost.buckets), strict=True))
    for _ in range(100):
        for rows, ms in true_ms.items():
            cost.learn(rng.randint(max(rows // 2 + 1, 1), rows) if rows > 16 else rows, ms)
    for rows, ms in cost.steps:
        assert ms == pytest.approx(true_ms[rows], rel=0.01)


@settings(max_examples=30)
@given(MEASURED, st.sampled_from(BUCKETS), st.floats(0.1, 1e4))
def test_one_bucket_that_is_used_alone_is_believed_against_those_that_are_not(
    measured: dict[int, float], rows: int, ms: float
) -> None:
    cost = StaircaseCost(measured)
    if rows > cost.buckets[-1]:
        return
    for _ in range(200):
        cost.learn(rows, ms)
    assert cost.predict_ms(rows) == pytest.approx(ms, rel=0.01, abs=0.1)


def test_what_more_sessions_cost_is_learned_beside_the_buckets() -> None:
    cost = StaircaseCost({16: 5.0, 64: 6.0})
    for _ in range(300):
        cost.learn(16, 5.0)
        cost.learn(16, 5.0 + 3 * 0.2, 4)
        cost.learn(64, 6.0)
    assert cost.per_session_ms == pytest.approx(0.2, abs=0.02)
    assert cost.predict_ms(16) == pytest.approx(5.0, abs=0.1)
    assert cost.joining_ms(4, beside=12) == pytest.approx(cost.per_session_ms), "its rows are free there"
    assert cost.joining_ms(4, beside=14) == pytest.approx(1.0 + cost.per_session_ms, abs=0.1)


@pytest.mark.parametrize(
    ("measured", "remaining", "rows"),
    [
        ({16: 5.0, 32: 6.0, 64: 8.0}, 200, 64),
        ({16: 5.0, 32: 6.0, 64: 8.0}, 36, 36),  # one forward of 64 rows is cheaper than two
        ({16: 5.0, 32: 10.0, 64: 40.0}, 36, 32),  # two are cheaper than one
        ({16: 5.0, 32: 30.0, 64: 60.0}, 64, 32),  # 64 rows are longer than the quantum
        ({16: 80.0, 32: 90.0, 64: 170.0}, 64, 32),  # all are; twice the smallest is worth it
        ({16: 5.0, 32: 6.0}, 3, 3),
    ],
)
def test_a_slice_ends_on_an_edge_unless_the_rest_fits(measured: dict[int, float], remaining: int, rows: int) -> None:
    assert StaircaseCost(measured).slice_rows(remaining, 50.0) == rows
