"""What a forward takes where its rows are padded to a bucket: the same time for all sizes of one bucket. Pure.

A step is a pair (rows of a bucket, milliseconds). More rows than the largest bucket run in several forwards: as many
of the largest as are full, and one for the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter

BucketSteps = tuple[tuple[int, float], ...]
"""BucketSteps of a staircase: rows rise, milliseconds do not fall."""

_ROWS = itemgetter(0)


def padded_ms(steps: Sequence[tuple[int, float]], rows: int) -> float:
    """Milliseconds of so many rows.

    Args:
        steps: of a staircase, at least one.
        rows: of the sweep; none take what one takes.
    """
    last_rows, last_ms = steps[-1]
    if rows <= last_rows:
        return steps[bisect_left(steps, rows, key=_ROWS)][1]
    full, rest = divmod(rows, last_rows)
    return full * last_ms + (padded_ms(steps, rest) if rest else 0.0)


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The values nearest to the given ones, by weighted squares, that do not fall.

    Neighbours that fall are pooled into their mean, until none do. Source: pool adjacent violators (Ayer et al. 1955).

    Args:
        values: one per bucket.
        weights: what each of them is worth, above 0.
    """
    pools: list[tuple[float, float, int]] = []  # mean, weight, buckets
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] > mean:
            other, other_weight, others = pools.pop()
            mean = (mean * total + other * other_weight) / (total + other_weight)
            total, count = total + other_weight, count + others
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]
