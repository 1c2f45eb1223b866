"""The median of paired measurements and how sure it is. Pure.

Two things are compared by measuring them in turns and taking the ratio within each pair, so that a machine which is
slow for a while is slow for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Median:
    """A median with its confidence interval.

    Attributes:
        value: the median.
        low: the interval's lower end; None where there are too few values for one.
    """

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} ({self.low:.2f} … {self.high:.2f})"


def median_of(values: Sequence[float], confidence: float = 0.95) -> Median:
    """The median and its interval by order statistics, which assumes no distribution.

    The interval from the k-th smallest to the k-th largest of n values misses the true median with probability
    2 · P(Binomial(n, ½) < k); k is the largest for which that is at most 1 − `confidence`. Fewer than 6 values give
    no 95 % interval.
    """
    ordered, n = sorted(values), len(values)
    missed, rank = 0.0, 0
    while (missed := missed + 2 * math.comb(n, rank) / 2**n) <= 1 - confidence:
        rank += 1
    if rank == 0:
        return Median(median(ordered), None, None)
    return Median(median(ordered), ordered[rank - 1], ordered[n - rank])


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours over theirs, pair by pair; pairs in which theirs is 0 are left out."""
    return [a / b for a, b in zip(ours, theirs, strict=True) if b > 0]
