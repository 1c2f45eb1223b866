"""What a forward costs, predicted from its rows and sessions, and whose share of it is how large.

Pure arithmetic on measured milliseconds: owns no clock, no queue and no session.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_ROWS = 16
MAX_ROWS = 1_024
SLOPE_ROWS = 32
"""A forward of so many rows shows what one more row costs; a smaller one shows the base."""
LEARNING_RATE = 0.2


class StepCost:
    """Predicts a forward's milliseconds, learned from what was measured.

    The law is `base + per_row · rows + per_session · (sessions − 1)`: sessions attend one after the other.

    Attributes:
        base_ms: what a forward costs without any row.
        per_row_ms: what one more row adds.
        per_session_ms: what one more session adds, beside its rows.
        min_rows: so many rows are always worth a forward of their own.
    """

    def __init__(self, base_ms: float, per_row_ms: float, min_rows: int = MIN_ROWS) -> None:
        self.base_ms = base_ms
        self.per_row_ms = per_row_ms
        self.per_session_ms = 0.0
        self.min_rows = min_rows

    def slice_rows(self, remaining: int, budget_ms: float) -> int:
        """How many of the rows that a sweep has left run next, where a step should take no longer than the budget."""
        return min(remaining, self.rows_within(budget_ms))

    def rows_within(self, budget_ms: float) -> int:
        """Rows that should fit the budget: enough to be worth the base, few enough for masks to stay small."""
        per_row_ms = max(self.per_row_ms, 1e-6)
        worth_it = int(self.base_ms / per_row_ms)
        return max(self.min_rows, min(MAX_ROWS, max(worth_it, int((budget_ms - self.base_ms) / per_row_ms))))

    def predict_ms(self, rows: int, sessions: int = 1) -> float:
        """Milliseconds that so many rows of so many sessions should take."""
        return self.base_ms + self.per_row_ms * rows + self.per_session_ms * (sessions - 1)

    def joining_ms(self, rows: int, beside: int = 0) -> float:
        """Milliseconds that one more session with so many rows should add to a forward of `beside` rows."""
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

    def learn(self, rows: int, measured_ms: float, sessions: int = 1) -> None:
        """Move towards a measurement: many rows show the slope, few the base, many sessions their own cost."""
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
