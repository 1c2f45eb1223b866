"""A staircase of any steps: more rows never take less, and values that are made to rise stay as near as they can."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.routing.staircase import padded_ms, rising

TIMES = st.floats(0.0, 1e6)


@st.composite
def staircases(draw: st.DrawFn) -> tuple[tuple[int, float], ...]:
    edges = sorted(draw(st.sets(st.integers(1, 600), min_size=1, max_size=8)))
    return tuple(zip(edges, sorted(draw(st.tuples(*[TIMES] * len(edges)))), strict=True))


@given(staircases(), st.integers(0, 2_000))
def test_more_rows_take_no_less_and_rows_within_a_bucket_the_same(
    steps: tuple[tuple[int, float], ...], rows: int
) -> None:
    assert 0 <= padded_ms(steps, rows) <= padded_ms(steps, rows + 1) * (1 + 1e-12)
    for (edge, _), (higher, ms) in pairwise(((0, 0.0), *steps)):
        assert padded_ms(steps, edge + 1) == padded_ms(steps, higher) == ms


@given(st.lists(st.tuples(TIMES, st.floats(1e-6, 20.0)), min_size=1, max_size=12))
def test_values_are_pooled_until_they_rise_and_keep_their_mean(pairs: list[tuple[float, float]]) -> None:
    values, weights = zip(*pairs, strict=True)
    found = rising(values, weights)
    assert len(found) == len(values)
    assert all(before <= after for before, after in pairwise(found))
    assert min(values) * (1 - 1e-9) <= found[0]
    assert found[-1] <= max(values) * (1 + 1e-9)
    total = sum(value * weight for value, weight in pairs)
    assert sum(map(float.__mul__, found, weights)) == pytest.approx(total, rel=1e-6, abs=1e-6)
    assert rising(sorted(values), weights) == sorted(values), "what rises stays"
