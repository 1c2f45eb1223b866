"""A staircase of claimed times, corrected online by what sweeps took, and the tree sizes that fill its steps. Pure.

A hop that pads rows to buckets computes all sizes of one bucket in the same time. So the next node is free until the
bucket is full, and the one after that costs a whole step. Design: docs/design/controller.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from client.control.regression import (
    FADE,
    FAR_FACTOR,
    MIN_SCALE,
    OUTLIER_FACTOR,
    OUTLIERS_IN_A_ROW,
    YOUNG_WEIGHT,
)
from swarm.routing.staircase import BucketSteps, padded_ms, rising

STALE_PART = 0.25
"""What measurements of other buckets are worth once one of them has changed."""
CLAIM_WEIGHT = 1.0
"""Of what the other buckets say of one, in measurements of its own."""
BETWEEN = 8
"""Every so many nodes a size is compared that fills no bucket."""
MIN_PROBABILITY = 1 / 256
"""A free node of a lower acceptance probability is not sent: it takes bytes and KV room all the same."""


class StaircaseRegression:
    """Milliseconds against rows, where rows are padded to buckets.

    Each bucket has a mean of its own, with fading weights. One factor corrects the claims of all, as machines that are
    slower than they claim are so at every size; it stands for what a bucket has not seen itself. No larger bucket takes
    less than a smaller one. Outliers are kept out as in `Regression`, by bucket.

    Attributes:
        steps: (rows, milliseconds) of each bucket, as learned.
    """

    def __init__(self, claims: BucketSteps) -> None:
        """Start with claims: (rows, milliseconds), at least one; rows rise, milliseconds do not fall."""
        self._claims = self.steps = claims
        self._means, self._weights = [0.0] * len(claims), [0.0] * len(claims)
        self._outliers, self._scale = [0] * len(claims), math.inf

    @property
    def edges(self) -> tuple[int, ...]:
        """Rows of each bucket."""
        return tuple(rows for rows, _ in self.steps)

    @property
    def b(self) -> float:
        """What one more row costs on the mean, from the smallest bucket to the largest."""
        (first_rows, first_ms), (last_rows, last_ms) = self.steps[0], self.steps[-1]
        return (last_ms - first_ms) / (last_rows - first_rows) if last_rows > first_rows else last_ms / last_rows

    def at(self, rows: int) -> float:
        """Milliseconds of so many rows."""
        return padded_ms(self.steps, rows)

    def with_new_level(self) -> StaircaseRegression:
        """The same steps; the next measurement scales all of them."""
        return StaircaseRegression(self.steps)

    def learn(self, rows: int, y: float, *, is_shared: bool = False) -> None:
        """Learn from a measurement.

        Args:
            rows: of the sweep; more than the largest bucket holds teach nothing, since they ran in several forwards.
            y: milliseconds.
            is_shared: whether others may have paid a part of y. They pay by rows, so all steps shrink alike.
        """
        if rows > self._claims[-1][0]:
            return
        place, weight = bisect_left(self.edges, rows), sum(self._weights)
        is_young, expected = weight < YOUNG_WEIGHT, self.at(rows)
        if is_young and weight and FAR_FACTOR * y < expected:
            self._weights = [0.0] * len(self._weights)  # much faster than all before: those were stalls
        elif self._is_outlier(place, y, expected, is_young=is_young):
            return
        self._outliers[place] = 0
        self._weights = [FADE * one for one in self._weights]
        self._weights[place] += 1
        self._means[place] += (y - self._means[place]) / self._weights[place]
        self._settle()

    def _is_outlier(self, place: int, y: float, expected: float, *, is_young: bool) -> bool:
        """Whether a measurement is to be left out. What comes again and again is a bucket's new level."""
        residual, is_far = abs(y - expected), is_young and y > FAR_FACTOR * expected
        if is_far or (any(self._weights) and residual > OUTLIER_FACTOR * max(self._scale, MIN_SCALE * expected)):
            self._outliers[place] += 1
            if self._outliers[place] < (2 if is_far else OUTLIERS_IN_A_ROW):
                return True
            # The machine may have changed, and with it the buckets that were not seen since.
            self._weights = [STALE_PART * weight for weight in self._weights]
            self._weights[place] = 0.0
        elif any(self._weights):
            self._scale = residual if self._scale == math.inf else FADE * self._scale + (1 - FADE) * residual
        return False

    def _settle(self) -> None:
        """The steps by what was measured and claimed."""
        claims_ms = [ms for _, ms in self._claims]
        total = sum(map(mul, self._weights, self._means))
        factor = total / max(sum(map(mul, self._weights, claims_ms)), 1e-9)
        weights = [weight + CLAIM_WEIGHT for weight in self._weights]
        means = [
            (own * mean + CLAIM_WEIGHT * factor * claimed_ms) / weight
            for own, mean, claimed_ms, weight in zip(self._weights, self._means, claims_ms, weights, strict=True)
        ]
        self.steps = tuple(zip(self.edges, rising(means, weights), strict=True))


def sizes_within(edges: Sequence[int], sizes: Sequence[int], max_size: int) -> list[int]:
    """Tree sizes that fill a bucket together with the pending token, and small ones, for drafts that are dear.

    Args:
        edges: rows of each bucket, rising.
        sizes: of trees, rising, the first of them 0.
        max_size: of a tree, at least 1.
    """
    small = [size for size in sizes[1:] if size < edges[0] - 1]
    last = edges[-1]
    full = [edge - 1 for edge in edges] + list(range(2 * last - 1, max_size + last, last))
    return sorted({min(size, max_size) for size in (*small, *full) if size > 0})


def best_fill(
    edges: Sequence[int], probabilities: Sequence[float], price: Callable[[int], float], pending: int
) -> tuple[int, float]:
    """How many nodes, best first, bring most beside what a sweep of them costs.

    Compared are sizes that fill a bucket, all smaller ones than the first of these, and some between them, since links
    may bind before hops do.

    Args:
        edges: rows of each bucket, rising.
        probabilities: of the nodes, falling.
        price: what a sweep of so many nodes costs, in tokens.
        pending: rows beside the nodes: 1 with the pending token.

    Returns:
        The number of nodes, and tokens less their price.
    """
    sums, count = [0.0, *accumulate(probabilities)], len(probabilities)
    full = {edge - pending for edge in edges} | set(range(2 * edges[-1] - pending, count, edges[-1]))
    sizes = {*range(min(edges[0], count)), *range(0, count, BETWEEN), *full, count}
    best = max(sorted(size for size in sizes if 0 <= size <= count), key=lambda nodes: sums[nodes] - price(nodes))
    return best, sums[best] - price(best)
