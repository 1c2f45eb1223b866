"""A distribution of seconds in fixed buckets: cheap enough to be kept for every sweep. Pure; one thread writes it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class Histogram:
    """How often something took how long. counts: per bucket, the last one beyond every bound."""

    sum: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def add_ms(self, milliseconds: float) -> None:
        """Count one."""
        seconds = milliseconds / 1e3
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Every bound with how many took no longer, as Prometheus wants it."""
        pairs, so_far = [], 0
        for bound, count in zip([*map(str, BOUNDS_S), "+Inf"], self.counts, strict=True):
            so_far += count
            pairs.append((bound, float(so_far)))
        return pairs
