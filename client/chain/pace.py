"""Whether a chain is much slower than it should be, and because of which hop. Pure: time is a parameter.

A machine may move every sweep, and hold each of them back. No single sweep shows that: what takes a second once is
load, or a lost packet. So what hops say of a sweep that takes `SLOW_TIMES` its predicted time, and `EARLY_S` more, is
noted, and a hop is *slow*

- at once where it is the tail that says twice, `AGAIN_S` apart, that it answered a sweep whose reply is not there: its
  word came over the same connection, behind that reply, unless the reply waits for the machine's own limit of its rate;
- after `IDLE_SWEEPS` sweeps at which it was found to do nothing with a sweep that it has;
- after `WORKING_SWEEPS` sweeps at which it was found to work, each `SLOW_S` longer than predicted. First sweeps of a
  route and long prompts do not count: they compile, and predictions of them are rough.

Each sweep that comes in time takes one of these away. The prediction is what the machines' records let expect,
corrected by what this client measured of them in earlier texts, not by this route's own sweeps: else slowness would
excuse itself.

A slow machine broke nothing. The session *moves*, if there is a route that should be `FASTER_TIMES` as fast as the
sweep that shows it. It goes on where it is otherwise. After each move the next one has to wait, twice as long each
time: where all is slow because of this client's own line, machines are not taken in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

EARLY_S = 0.2
"""Beyond the predicted time, before a sweep is looked at."""
SLOW_TIMES, SLOW_S = 3.0, 0.5
AGAIN_S = 0.1
"""Between two looks at one sweep."""
IDLE_SWEEPS, WORKING_SWEEPS = 3, 6
FASTER_TIMES = 2.0
MAX_ROWS = 64
"""Greater sweeps say nothing of a machine that works: nodes measure no greater ones."""
PAUSE_S, MAX_PAUSE_S = 5.0, 320.0
"""After the first move, and after any."""
UNFOUND_S = 2.0
"""Until a faster route is looked for again, where there was none."""


@dataclass(frozen=True, slots=True)
class SweepLook:
    """What was found at one look at a sweep that is late.

    Attributes:
        sequence: of the sweep.
        rows: of it.
        predicted_s: of it.
        waited_s: so far.
        index: place of the hop at which it is.
        is_working: whether that hop says that it works on it.
        is_answered: whether it is the tail, and says that it answered.
        is_first: whether the route did not answer a sweep yet.
    """

    sequence: int
    rows: int
    predicted_s: float
    waited_s: float
    index: int
    is_working: bool = False
    is_answered: bool = False
    is_first: bool = False


class PaceWatch:
    """How fast one chain moves."""

    def __init__(self) -> None:
        self._row: list[int] = []
        self._index = -1
        self._is_working = False
        self._answered: tuple[int, float] | None = None
        self._not_before_s = float("-inf")
        self._moves = 0

    def is_early(self, predicted_s: float, waited_s: float) -> bool:
        """Whether a sweep took long enough to be looked at."""
        return waited_s > early_s(predicted_s)

    def forget(self) -> None:
        """Another route is taken."""
        self._row, self._index, self._answered = [], -1, None

    def answered(self, predicted_s: float, took_s: float) -> None:
        """A sweep came back."""
        self._answered = None
        if not self.is_early(predicted_s, took_s):
            self._row = self._row[1:]

    def look(self, found: SweepLook, now_s: float) -> bool:
        """Note what was found; returns whether the hop is slow, and a faster one may be looked for."""
        is_slow = self._answers_late(found, now_s) or self._holds_back(found)
        return is_slow and now_s >= self._not_before_s

    def may_move(self, around_s: float | None, waited_s: float, now_s: float) -> bool:
        """Whether to leave the slow hop; where it says so, the session moves.

        Args:
            around_s: what the sweep should take on the best route without that hop; None: there is none.
            waited_s: what it took so far.
            now_s: the present.
        """
        if around_s is None or around_s * FASTER_TIMES > waited_s:
            self._not_before_s = max(self._not_before_s, now_s + UNFOUND_S)
            return False
        self._not_before_s = now_s + min(PAUSE_S * 2**self._moves, MAX_PAUSE_S)
        self._moves += 1
        return True

    def _answers_late(self, found: SweepLook, now_s: float) -> bool:
        if not found.is_answered:
            self._answered = None
            return False
        if self._answered is None or self._answered[0] != found.sequence:
            self._answered = found.sequence, now_s
        return now_s - self._answered[1] >= AGAIN_S

    def _holds_back(self, found: SweepLook) -> bool:
        if found.is_working and (
            found.is_first or found.rows > MAX_ROWS or not is_long(found.predicted_s, found.waited_s)
        ):
            return False
        if (found.index, found.is_working) != (self._index, self._is_working):
            self._row, self._index, self._is_working = [], found.index, found.is_working
        if found.sequence not in self._row:
            self._row = [*self._row, found.sequence][-WORKING_SWEEPS:]
        return len(self._row) >= (WORKING_SWEEPS if found.is_working else IDLE_SWEEPS)


def early_s(predicted_s: float) -> float:
    """After how long a sweep is looked at."""
    return max(SLOW_TIMES * predicted_s, predicted_s + EARLY_S)


def is_long(predicted_s: float, waited_s: float) -> bool:
    """Whether a sweep takes much longer than it should, whoever computes."""
    return waited_s >= max(SLOW_TIMES * predicted_s, predicted_s + SLOW_S)
