"""What a forward costs where its rows are padded to a bucket, learned bucket by bucket. Pure.

Owns no clock, no queue and no session.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from node.engine.step_cost import LEARNING_RATE, StepCost
from swarm.routing.staircase import BucketSteps, padded_ms, rising

FADE = 0.95
"""What a bucket's measurements are worth after another measurement, where neighbours contradict each other."""
MIN_WEIGHT = 1e-6


class StaircaseCost(StepCost):
    """Predicts a forward's milliseconds where rows within a bucket are free.

    The law is `time of the bucket + per_session · (sessions − 1)`. A larger bucket never takes less than a smaller one.

    Attributes:
        buckets: rows of each bucket, rising.
        steps: (rows, milliseconds) of each bucket, as learned.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        """Begin with what each bucket took: milliseconds by rows, at least one of them."""
        self.buckets = tuple(sorted(measured))
        super().__init__(0.0, 0.0, self.buckets[0])
        self._times_ms = [max(measured[rows], 0.0) for rows in self.buckets]
        self._weights = [1.0] * len(self.buckets)
        self.steps: BucketSteps = ()
        self._settle()

    def rows_within(self, budget_ms: float) -> int:
        """The largest bucket that should fit the budget, or take no more than two of the smallest one."""
        most_ms = max(budget_ms, 2 * self.steps[0][1])
        return max((rows for rows, ms in self.steps if ms <= most_ms), default=self.min_rows)

    def slice_rows(self, remaining: int, budget_ms: float) -> int:
        """How many rows run next: up to the edge of a bucket, unless the rest fits into one.

        A rest that would leave much of its bucket empty is cut at the edge below, where both parts take less.
        """
        most = self.rows_within(budget_ms)
        if remaining > most:
            return most
        below = bisect_left(self.buckets, remaining) - 1
        if below < 0:
            return remaining
        edge = self.buckets[below]
        cut_ms = self.predict_ms(edge) + self.predict_ms(remaining - edge)
        return edge if cut_ms < self.predict_ms(remaining) else remaining

    def predict_ms(self, rows: int, sessions: int = 1) -> float:
        """Milliseconds that so many rows of so many sessions should take."""
        return padded_ms(self.steps, rows) + self.per_session_ms * (sessions - 1)

    def joining_ms(self, rows: int, beside: int = 0) -> float:
        """Milliseconds that one more session should add to `beside` rows; without its own cost, 0 in their bucket."""
        return self.per_session_ms + padded_ms(self.steps, beside + rows) - padded_ms(self.steps, beside)

    def spared_ms(self, rows: int, beside: int) -> float:
        """Milliseconds that all who wait are spared if so many rows join: a forward less what they add."""
        return padded_ms(self.steps, rows) - self.joining_ms(rows, beside)

    def shares(self, rows: Sequence[int], sharers: float | None = None) -> list[float]:
        """Each session's fraction of a forward, by its rows.

        Args:
            rows: of each session.
            sharers: how many sessions share a forward as a rule; with fewer, each one's part is as small as it usually
                is. None: those that share this one, so that all parts are the whole.
        """
        count, total = len(rows), sum(rows)
        part = min(count / sharers, 1.0) if sharers else 1.0
        return [part * (own / total if total else 1 / count) for own in rows]

    def learn(self, rows: int, measured_ms: float, sessions: int = 1) -> None:
        """Move the bucket that ran towards a measurement; many sessions show their own cost as well."""
        if not 0 < rows <= self.buckets[-1]:
            return
        place = bisect_left(self.buckets, rows)
        step = LEARNING_RATE * (measured_ms - self.per_session_ms * (sessions - 1) - self._times_ms[place])
        if sessions > 1:
            step /= 2
            self.per_session_ms = max(self.per_session_ms + step / (sessions - 1), 0.0)
        self._times_ms[place] = max(self._times_ms[place] + step, 0.0)
        self._weights = [max(FADE * weight, MIN_WEIGHT) for weight in self._weights]
        self._weights[place] += 1
        self._settle()

    def _settle(self) -> None:
        self.steps = tuple(zip(self.buckets, rising(self._times_ms, self._weights), strict=True))
        self.base_ms = self.steps[0][1]


def staircase(measured: Mapping[int, float]) -> StepCost:
    """The cost of a span that runs in buckets.

    Args:
        measured: milliseconds of a forward by the rows of its bucket, at least one.
    """
    return StaircaseCost(measured)
