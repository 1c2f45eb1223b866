"""Medians of paired measurements and their intervals."""

from __future__ import annotations

import random
from statistics import median

import pytest

from client.tools.bench.paired_ratio import median_of, ratios


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (9, 2), (10, 2), (12, 3), (20, 6)])
def test_the_interval_is_the_textbooks(count: int, rank: int) -> None:
    """Ranks from published tables of the binomial interval for a median."""
    found = median_of([float(value) for value in range(1, count + 1)])
    assert (found.low, found.high) == (rank, count + 1 - rank)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_values_have_no_interval(count: int) -> None:
    found = median_of([1.0] * count)
    assert (found.value, found.low, found.high) == (1.0, None, None)
    assert str(found) == "1.00"


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    """Of 2,000 samples 95 % or more; 93 % or less has a chance below 1e-4."""
    rng = random.Random(3)
    hits = 0
    for _ in range(2_000):
        found = median_of([rng.expovariate(1.0) for _ in range(11)])
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 0.6931 <= found.high
    assert 0.93 * 2_000 < hits < 2_000


def test_ratios_are_taken_within_pairs() -> None:
    assert ratios([2.0, 9.0, 1.0], [1.0, 3.0, 0.0]) == [2.0, 3.0]
    assert median_of(ratios([2, 40], [1, 10])).value == median([2, 4])
