"""What a forward costs, predicted from its rows and sessions, and whose share of it is how large.

Pure arithmetic on measured milliseconds: owns no clock, no queue and no session.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from swarm.routing.staircase import BucketSteps, padded_ms, rising

MIN_ROWS = 16
MAX_ROWS = 1_024
SLOPE_ROWS = 32
"""A forward of so many rows shows what one more row costs; a smaller one shows the base."""
LEARNING_RATE = 0.2
LONG_TOKENS = 1_024
"""From here on a forward shows what its keys cost, and nothing else: what it takes beside them was learned before."""
READING_ROWS = 6
"""To read a session's keys and values costs what so many rows cost that attend to them."""


class StepCost:
    """Predicts a forward's milliseconds, learned from what was measured.

    The law is `base + per_row · rows + per_session · (sessions − 1) + per_key · context · (rows + READING_ROWS)`:
    sessions attend one after the other, each row to the whole context. Without the last term a long text would teach
    that every row is dear, and leave short ones in small slices.

    Attributes:
        base_ms: what a forward costs without any row.
        per_row_ms: what one more row adds.
        per_session_ms: what one more session adds, beside its rows.
        per_key_ms: what a row adds for each token that it attends to.
        min_rows: so many rows are always worth a forward of their own.
    """

    def __init__(self, base_ms: float, per_row_ms: float, min_rows: int = MIN_ROWS) -> None:
        self.base_ms = base_ms
        self.per_row_ms = per_row_ms
        self.per_session_ms = 0.0
        self.per_key_ms = 0.0
        self.min_rows = min_rows

    def slice_rows(self, remaining: int, budget_ms: float, context: int = 0) -> int:
        """How many of the rows that a sweep has left run next, where a step should take no longer than the budget.

        Args:
            context: tokens that they attend to.
        """
        return min(remaining, self.rows_within(budget_ms, context))

    def rows_within(self, budget_ms: float, context: int = 0) -> int:
        """Rows that should fit the budget: enough to be worth the base, few enough for masks to stay small."""
        base_ms = self.base_ms + self.attention_ms(0, context)
        per_row_ms = max(self.per_row_ms + self.per_key_ms * context, 1e-6)
        worth_it = int(base_ms / per_row_ms)
        return max(self.min_rows, min(MAX_ROWS, max(worth_it, int((budget_ms - base_ms) / per_row_ms))))

    def predict_ms(self, rows: int, sessions: int = 1) -> float:
        """Milliseconds that so many rows of so many sessions should take, without the attention to their contexts."""
        return self.base_ms + self.per_row_ms * rows + self.per_session_ms * (sessions - 1)

    def attention_ms(self, rows: int, context: int) -> float:
        """Milliseconds that so many rows of one session should take to attend to its context."""
        return self.per_key_ms * context * (rows + READING_ROWS)

    def joining_ms(self, rows: int, beside: int = 0) -> float:
        """Milliseconds that one more session with so many rows should add to a forward of `beside` rows, likewise."""
        return self.per_session_ms + self.per_row_ms * rows

    def spared_ms(self, rows: int, beside: int) -> float:
        """Milliseconds that all who wait are spared if so many rows join `beside` others: a forward of their own."""
        return self.base_ms

    def shares(self, rows: Sequence[int], sharers: float | None = None) -> list[float]:
        """Each session's fraction of a forward: its own rows, and an equal part of the base.

        Args:
            rows: of each session.
            sharers: how many sessions share a forward as a rule, which sets each one's part of the base;
                None: those that share this one.
        """
        joining = [self.joining_ms(count) for count in rows]
        whole, common = self.base_ms + sum(joining), self.base_ms / (sharers or len(rows))
        return [(common + own) / whole if whole > 0 else 1 / len(rows) for own in joining]

    def learn(self, rows: int, measured_ms: float, sessions: int = 1, context: int = 0) -> None:
        """Move towards a measurement: many rows show the slope, few the base, many sessions their own cost.

        Args:
            context: tokens that each row attended to, in the mean.
        """
        if self._learn_keys(rows, measured_ms, sessions, context):
            return
        measured_ms = max(measured_ms - self.attention_ms(rows, context), 0.0)
        if sessions > 1:
            step = LEARNING_RATE * (measured_ms - self.predict_ms(rows, sessions)) / 2
            self.base_ms = max(self.base_ms + step, 0.0)
            self.per_session_ms = max(self.per_session_ms + step / (sessions - 1), 0.0)
        elif rows >= SLOPE_ROWS:
            slope = max(measured_ms - self.base_ms, 0.0) / rows
            self.per_row_ms += LEARNING_RATE * (slope - self.per_row_ms)
        elif rows > 0:
            base_ms = max(measured_ms - self.per_row_ms * rows, 0.0)
            self.base_ms += LEARNING_RATE * (base_ms - self.base_ms)

    def _learn_keys(self, rows: int, measured_ms: float, sessions: int, context: int) -> bool:
        """Whether a measurement shows what keys cost, which is then learned."""
        if context < LONG_TOKENS:
            return False
        attending_ms = max(measured_ms - self.predict_ms(rows, sessions), 0.0)
        self.per_key_ms += LEARNING_RATE * (attending_ms / (context * (rows + READING_ROWS)) - self.per_key_ms)
        return True


# What a forward costs where its rows are padded to a bucket, learned bucket by bucket.

FADE = 0.95
"""What a bucket's measurements are worth after another measurement, where neighbours contradict each other."""
MIN_WEIGHT = 1e-6


class StaircaseCost(StepCost):
    """Predicts a forward's milliseconds where rows within a bucket are free.

    The law is `time of the bucket + per_session · (sessions − 1)`, and keys as in `StepCost`. A larger bucket never
    takes less than a smaller one.

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

    def rows_within(self, budget_ms: float, context: int = 0) -> int:
        """The largest bucket that should fit the budget, or take no more than two of the smallest one."""
        times_ms = [(rows, ms + self.attention_ms(rows, context)) for rows, ms in self.steps]
        most_ms = max(budget_ms, 2 * times_ms[0][1])
        return max((rows for rows, ms in times_ms if ms <= most_ms), default=self.min_rows)

    def slice_rows(self, remaining: int, budget_ms: float, context: int = 0) -> int:
        """How many rows run next: up to the edge of a bucket, unless the rest fits into one.

        A rest that would leave much of its bucket empty is cut at the edge below, where both parts take less.
        """
        most = self.rows_within(budget_ms, context)
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

    def learn(self, rows: int, measured_ms: float, sessions: int = 1, context: int = 0) -> None:
        """Move the bucket that ran towards a measurement; many sessions show their own cost as well."""
        if not 0 < rows <= self.buckets[-1] or self._learn_keys(rows, measured_ms, sessions, context):
            return
        measured_ms -= self.attention_ms(rows, context)
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


# The event-loop overhead of a sweep: CPU milliseconds beside its forward, for messages above all.

NEAR_S = 0.05
"""Between sweeps that follow each other so closely, all that the loop does is done for them."""
RATE = 0.05


class LoopCost:
    """Learns from the loop's own CPU clock, from one finished sweep to the next.

    Attributes:
        mean_ms: per sweep; 0 until sweeps followed each other.
    """

    def __init__(
        self, cpu_s: Callable[[], float] = time.thread_time, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Know nothing yet.

        Args:
            cpu_s: CPU seconds of the thread that the loop runs on.
        """
        self.mean_ms = 0.0
        self._cpu_s, self._clock_s = cpu_s, clock_s
        self._last_used_ms = self._last_s = 0.0
        self._is_known = False

    def end_sweep(self) -> None:
        """A sweep is done."""
        now_s, used_ms = self._clock_s(), self._cpu_s() * 1e3
        if self._is_known and now_s - self._last_s <= NEAR_S:
            self.mean_ms += RATE * (used_ms - self._last_used_ms - self.mean_ms)
        self._last_s, self._last_used_ms, self._is_known = now_s, used_ms, True
