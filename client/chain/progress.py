"""Which hop of a chain lives and does not move (R17), and which one is much slower than it should be. Pure.

Pings and receipts say that a machine is there, and nothing of the session's sweeps. So when something is *late*, the
client asks every hop itself how far the session is there (`Held`), and looks for the first that is behind:

- It is late when a route is not attached, or the oldest unanswered sweep has no reply, `LATE_S` after the predicted
  time. The time counts from when the sweep left, the newest reply came or the route was attached, whichever is latest;
  time in which this program did not run is left out.
- A hop that has the sweep and says that it works on it, or that it waits its turn there, *moves*. So a forward of ten
  seconds, a first sweep with compilation, a long prompt, a long replay or a machine with many sessions is not replaced.
  It has `WORK_TIMES` the predicted time and `FIRST_WORK_S`, or `WORK_S` once the route answered a sweep: that is what
  a machine that lies costs, once.
- A hop that has the sweep and does nothing with it is at fault, by its own word; so is a tail that says it answered.
- Where one hop says that it passed the sweep on, and the next says that it never came, one of the two lies: the trouble
  is on their link.
- A hop that does not say anything is at fault if the sweep did not come past it.

Nobody is accused before the same was found twice, `CONFIRM_S` apart: an honest hop may have moved between two answers.
A machine that does nothing is so replaced within three seconds beyond the predicted time.

Hops are asked earlier than that, to find those that hold sweeps back: the session leaves these only where it does
better elsewhere.

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

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from swarm.base.errors import HopError, HopMisbehaved, HopSlow, HopTimeout
from swarm.protocol.messages import (
    Held,
    RouteHop,
)
from swarm.routing.costs import RouteForecast

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


LATE_S = 1.0
"""Beyond the predicted time, before anybody is asked."""
ATTACH_S = 0.7
"""Until a route that is not attached is late."""
CONFIRM_S = 0.5
"""Between two answers that must agree, and between questions."""
WORKING_ASK_S = 2.0
"""Between questions while a hop works."""
UNHEARD_S = 1.2
"""How long a hop may say nothing."""
TAKE_S, RETAKE_S = 3.3, 1.5
"""How long the hop before may take to dial one, when a session is opened and in a repair: it gives itself less."""
HASTE_S = 0.8
"""How long the same hop may keep a session from opening where others can take its place: most dial in less."""
WORK_TIMES, WORK_S, FIRST_WORK_S = 8.0, 12.0, 30.0
"""A hop may work for so many times the predicted time, and so long: longer before the route answered a sweep."""
MAX_PREDICTED_S = 60.0
"""Predictions rest on what machines claim: greater ones are taken as this."""
SWEEPS_KEPT = 16
SHORTEST_S = 0.02
"""Between looks at the clock."""


@dataclass(frozen=True, slots=True)
class DueProgress:
    """What the client waits for.

    Attributes:
        forecast: of the route.
        generation: of the route.
        sequence: of the oldest unanswered sweep; 0: for the route to be attached.
        rows: nodes that the hops have to run for it.
        since_s: when that began.
        first_has: the last sequence that hop 0 has by its receipts; None while it is sent anew.
        is_arriving: whether parts of a reply come.
        is_first: whether the route did not answer a sweep yet.
    """

    forecast: RouteForecast
    generation: int
    sequence: int
    rows: int
    since_s: float
    first_has: int | None = 0
    is_arriving: bool = False
    is_first: bool = True


@dataclass(frozen=True, slots=True)
class _StuckHop:
    """The hop that is behind.

    Attributes:
        index: its place in the route.
        reason: what it does.
        other: the place of the link's other end; None: it said so itself.
        is_working: whether it says that it works.
        is_unheard: whether it says nothing.
        is_answered: whether it is the tail, and says that it answered.
        confirm_s: how long that must last.
    """

    index: int
    reason: str
    other: int | None = None
    is_working: bool = False
    is_unheard: bool = False
    is_answered: bool = False
    confirm_s: float = CONFIRM_S


class ProgressWatch:
    """How one chain moves.

    Attributes:
        pace: whether that is as fast as it should be.
        is_hasty: whether a machine that keeps the first route from standing is left after `HASTE_S`, where another one
            can take its place, and not when it is certain that it does nothing.
    """

    def __init__(self) -> None:
        self.pace = PaceWatch()
        self.is_hasty = False
        self._opening: tuple[_StuckHop, float] | None = None
        self._ratios: deque[float] = deque(maxlen=SWEEPS_KEPT)
        self._ask_s = self._look_s = self._asked_s = 0.0
        self._looked_at = 0
        self._found: tuple[object, float] | None = None

    def answered(self, total_ms: float, rows: int, forecast: RouteForecast) -> None:
        """A sweep took so long."""
        self._ratios.append(total_ms / 1e3 / max(forecast_s(forecast, rows), 1e-6))
        self.pace.answered(forecast_s(forecast, rows), total_ms / 1e3)

    def forget(self) -> None:
        """Another route is taken: what was found of the one before is over."""
        self._found = None
        self._ask_s = self._look_s = 0.0
        self.pace.forget()

    def predicted_s(self, due: DueProgress) -> float:
        """How long it should take: as the route's machines claim, corrected by what sweeps took lately."""
        if not due.sequence:
            return ATTACH_S
        ratio = median(self._ratios) if self._ratios else 1.0
        return min(forecast_s(due.forecast, due.rows) * ratio, MAX_PREDICTED_S)

    def must_ask(self, due: DueProgress, now_s: float) -> bool:
        """Whether it is late, and time to ask all hops."""
        is_late = self._is_late(due, now_s)
        if not is_late:
            self._found = None
        is_news = due.sequence != self._looked_at and now_s >= self._asked_s + AGAIN_S
        may_look = due.sequence > 0 and (is_news or now_s >= self._look_s)
        is_early = self.pace.is_early(_claimed_s(due), now_s - due.since_s)
        return (is_late and now_s >= self._ask_s) or (may_look and is_early)

    def rest_s(self, due: DueProgress | None, now_s: float, longest_s: float) -> float:
        """How long nobody need look again: until a sweep that is due may be looked at, the first time or again."""
        if due is None or not due.sequence:
            return longest_s
        first_s = due.since_s + early_s(_claimed_s(due))
        look_s = self._asked_s + AGAIN_S if due.sequence != self._looked_at else self._look_s
        return min(max(first_s - now_s, look_s - now_s, SHORTEST_S), longest_s)

    def _is_late(self, due: DueProgress, now_s: float) -> bool:
        return now_s - due.since_s > self.predicted_s(due) + (LATE_S if due.sequence else 0.0)

    def judge(
        self, due: DueProgress, hops: Sequence[RouteHop], said: Sequence[Held | None], now_s: float
    ) -> HopError | None:
        """Who is at fault, if that is certain by now; a `HopSlow` where a hop only takes too long.

        Args:
            due: what is late.
            hops: of the route.
            said: [hops] what each said of itself; None where nothing came.
            now_s: when the answers were there.
        """
        found = _not_moving(due, said) if due.sequence else _not_ready(said, due.generation)
        self._asked_s, self._looked_at = now_s, due.sequence
        is_work = found is None or (found.is_working and is_long(_claimed_s(due), now_s - due.since_s))
        self._look_s = now_s + (WORKING_ASK_S if is_work else AGAIN_S)
        if not due.sequence:
            slow = self._opens_late(due, found, hops, now_s)
        else:
            slow = None if None in said else self._slow(due, found, hops, now_s)
        return slow if not self._is_late(due, now_s) else self._stuck(due, found, hops, said, now_s) or slow

    def may_leave(self, due: DueProgress, around: RouteForecast | None, now_s: float) -> bool:
        """Whether the session moves to another route because of a slow hop.

        Args:
            due: what that hop holds back.
            around: of the best route without it; None: there is none.
            now_s: the present.
        """
        around_s = None if around is None else forecast_s(around, due.rows)
        return self.pace.may_move(around_s, now_s - due.since_s, now_s)

    def _opens_late(
        self, due: DueProgress, found: _StuckHop | None, hops: Sequence[RouteHop], now_s: float
    ) -> HopSlow | None:
        """The hop because of which the first route does not stand, if it is the same one for a while."""
        if not self.is_hasty or due.generation or found is None or found.is_working:
            self._opening = None
            return None
        if self._opening is None or self._opening[0] != found:
            self._opening = found, now_s
        if now_s - self._opening[1] < HASTE_S:
            return None
        hop = hops[found.index]
        other = None if found.other is None else hops[found.other].peer
        return HopSlow(hop.peer, str(hop.span), found.reason).on_link(other, is_even=True)

    def _slow(
        self, due: DueProgress, found: _StuckHop | None, hops: Sequence[RouteHop], now_s: float
    ) -> HopSlow | None:
        """The hop that holds sweeps back, if it did so long enough."""
        if found is None or found.other is not None or found.is_unheard:
            return None
        look = SweepLook(
            sequence=due.sequence,
            rows=due.rows,
            predicted_s=_claimed_s(due),
            waited_s=now_s - due.since_s,
            index=found.index,
            is_working=found.is_working,
            is_answered=found.is_answered and not found.is_working,
            is_first=due.is_first,
        )
        if not self.pace.look(look, now_s):
            return None
        hop = hops[found.index]
        reason = f"a sweep takes {look.waited_s:.1f} s there, predicted were {look.predicted_s:.2f} s"
        return HopSlow(hop.peer, str(hop.span), reason)

    def _stuck(
        self,
        due: DueProgress,
        found: _StuckHop | None,
        hops: Sequence[RouteHop],
        said: Sequence[Held | None],
        now_s: float,
    ) -> HopError | None:
        """The hop that does not move, once that is certain."""
        self._ask_s = now_s + (WORKING_ASK_S if found is not None and found.is_working else CONFIRM_S)
        if found is None:
            self._found = None
            return None
        held = said[found.index]
        key = found, None if held is None else (held.passed, held.working)
        if self._found is None or self._found[0] != key:
            self._found = key, now_s
        is_certain = not found.is_working and now_s - self._found[1] >= found.confirm_s
        work_s = WORK_TIMES * self.predicted_s(due) + (FIRST_WORK_S if due.is_first else WORK_S)
        is_over = now_s - due.since_s > work_s
        if not (is_certain or is_over):
            return None
        self._found = None
        hop = hops[found.index]
        kind = HopTimeout if found.is_unheard else HopMisbehaved
        other = None if found.other is None else hops[found.other].peer
        return kind(hop.peer, str(hop.span), found.reason).on_link(other, is_even=True)


def merged(one: Held | None, other: Held | None) -> Held | None:
    """What two replicas say, as one hop: it is as far as either of them."""
    if one is None or other is None or not (one.held and other.held):
        return next((said for said in (one, other) if said is not None and said.held), one or other)
    return Held(
        held=True,
        generation=max(one.generation, other.generation),
        is_ready=one.is_ready or other.is_ready,
        received=max(one.received, other.received),
        passed=max(one.passed, other.passed),
        working=max(one.working, other.working),
    )


def forecast_s(forecast: RouteForecast, rows: int) -> float:
    """How long a sweep of so many rows should take over a route, by what is known of its machines."""
    row_ms = forecast.row_ms + forecast.link_row_ms
    return (forecast.links_ms + forecast.compute_ms + forecast.waiting_ms + row_ms * max(rows - 1, 0)) / 1e3


def _claimed_s(due: DueProgress) -> float:
    return min(forecast_s(due.forecast, due.rows), MAX_PREDICTED_S)


def _unheard(index: int) -> _StuckHop:
    return _StuckHop(index, "does not say how far the session is", is_unheard=True, confirm_s=UNHEARD_S)


def _not_ready(said: Sequence[Held | None], generation: int) -> _StuckHop | None:
    """The hop because of which a route is not attached."""
    for index, held in enumerate(said):
        if held is None:
            return _unheard(index)
        if not held.held or held.generation < generation:
            before = index - 1 if index else None
            return _StuckHop(index, "did not take the session", before, confirm_s=RETAKE_S if generation else TAKE_S)
    states = [held for held in said if held is not None]
    for index in reversed(range(len(states))):
        if not states[index].is_ready:
            is_working = states[index].working > 0
            if index + 1 < len(states):  # the next one is ready, and should have said so to this one
                return _StuckHop(index, "does not become ready", index + 1, is_working=is_working)
            return _StuckHop(index, "does not become ready", is_working=is_working)
    return _StuckHop(0, "is ready, and does not say so")


def _not_moving(due: DueProgress, said: Sequence[Held | None]) -> _StuckHop | None:
    """The hop at which a sweep got stuck."""
    sequence = due.sequence
    unheard: int | None = None
    for index, held in enumerate(said):
        if held is None:
            unheard = index if unheard is None else unheard
            continue
        if not held.held:
            return _StuckHop(index, "no longer holds this session")
        if held.passed >= sequence:
            unheard = None  # it came past whoever said nothing
        elif any(behind is not None and behind.held and behind.received >= sequence for behind in said[index + 1 :]):
            continue  # the receipt of it is on its way
        elif held.received >= sequence or held.working:
            reason = "does nothing with a sweep that it has" if not held.working else "works on one sweep for too long"
            return _StuckHop(index, reason, is_working=held.working > 0)
        elif unheard is not None:
            break
        elif index == 0:
            is_sent = due.first_has is not None and due.first_has >= sequence
            return _StuckHop(0, "did not take a sweep that it receipted") if is_sent else None
        else:
            return _StuckHop(index, "says that a sweep did not come, which the hop before says it passed on", index - 1)
    if unheard is not None:
        return _unheard(unheard)
    reason = "says that it answered a sweep, and no reply came"
    return _StuckHop(len(said) - 1, reason, is_working=due.is_arriving, is_answered=True)
