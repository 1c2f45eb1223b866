"""A distribution of durations in fixed buckets, cheap enough to be kept for every sweep. Pure; one thread writes it.

It is a module of its own because a node's counters need it and must not import prometheus-client.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class Histogram:
    """How often something took how long.

    Attributes:
        sum: of all durations, in seconds.
        counts: [len(BOUNDS_S) + 1] durations per bucket, not cumulative; the last bucket is beyond every bound.
    """

    sum: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def add_ms(self, milliseconds: float) -> None:
        seconds = milliseconds / 1e3
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Each upper bound with the number of durations up to it, as Prometheus expects them."""
        pairs, so_far = [], 0
        for bound, count in zip([*map(str, BOUNDS_S), "+Inf"], self.counts, strict=True):
            so_far += count
            pairs.append((bound, float(so_far)))
        return pairs
