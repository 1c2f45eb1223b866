"""What a node has given: in this run, on each of the last days, and ever. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import date
from typing import Any, Final, Self

DAYS_KEPT: Final = 7
_MOST: Final = 1e18


@dataclass(frozen=True, slots=True)
class Given:
    """Amounts that only grow."""

    tokens: float = 0
    """Tokens of texts that went through this node's layers and stayed."""
    layer_tokens: float = 0
    """Those times the layers that computed them."""
    sweeps: float = 0
    """Sweeps that were run."""
    received_bytes: float = 0
    """Of sessions."""
    sent_bytes: float = 0
    """Of sessions."""
    serving_s: float = 0
    """Time in which it took sessions."""
    paused_s: float = 0
    """Time in which it paused."""
    pauses: float = 0

    def plus(self, other: Given) -> Given:
        """Both together."""
        return Given(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def since(self, before: Given) -> Given:
        """What came after `before`; nothing of an amount that is smaller now."""
        return Given(*(max(getattr(self, one.name) - getattr(before, one.name), 0) for one in fields(self)))

    def as_json(self) -> dict[str, float]:
        """Numbers by name."""
        return {one.name: round(getattr(self, one.name), 3) for one in fields(self)}

    @classmethod
    def of_json(cls, raw: object) -> Self:
        """Read what `as_json` wrote; what a later release adds is read past, what it lacks is 0.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(raw, dict):
            raise ValueError("amounts are an object")
        return cls(*(_amount(raw.get(one.name, 0)) for one in fields(cls)))


class GivenTotals:
    """The same amounts over three spans of time.

    Attributes:
        run: since this start.
        ever: of all runs.
        days: the last `DAYS_KEPT` on which the node ran, by ISO date, local time; the latest last.
    """

    def __init__(self, ever: Given | None = None, days: Mapping[str, Given] | None = None) -> None:
        """Begin a run.

        Args:
            ever: of all runs before.
            days: of the days before.
        """
        self.run = Given()
        self.ever = ever or Given()
        self.days = dict(days or {})
        self._trim()

    def note(self, run: Given, today: date) -> None:
        """This run has given so much by now; what is new counts for today."""
        new = run.since(self.run)
        self.run, self.ever = run, self.ever.plus(new)
        self.days[today.isoformat()] = self.on(today).plus(new)
        self._trim()

    def on(self, day: date) -> Given:
        """What was given on a day."""
        return self.days.get(day.isoformat(), Given())

    def _trim(self) -> None:
        self.days = dict(sorted(self.days.items())[-DAYS_KEPT:])


def read_days(raw: object) -> dict[str, Given]:
    """Amounts by day.

    Raises:
        ValueError: they are something else.
    """
    if not isinstance(raw, dict) or len(raw) > 10 * DAYS_KEPT:
        raise ValueError("days are an object of a few")
    return {date.fromisoformat(day).isoformat(): Given.of_json(amounts) for day, amounts in raw.items()}


def _amount(value: Any) -> float:  # noqa: ANN401 - whatever the file holds
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST:
        raise ValueError("an amount is no number that can be")
    return value
