"""Which machine trouble counts against, how long a chain goes around it, and when a text ends. Pure: time is a
parameter.

A hop speaks of itself and of the machine that comes next in the route, and its signature says that it was it who spoke.
A fault that nobody signed is the doing of whoever passed it on: an honest hop passes none on.

Trouble is of one machine, or of a *link*: then one end said so of the other, or nothing tells which end is at fault,
and both ends carry it.

- What this program saw of a machine, or a machine said of itself, counts in full: it is avoided for `SUSPECT_S`. One
  that broke the protocol, or did not move its sweeps, is avoided twice as long each time.
- What another machine said of it counts half, until a second one says so. Where the accused cannot be replaced, its
  accuser is gone around instead.
- A machine that stands at the other end of troubles with two different machines is what they have in common: it is
  avoided, and twice as long with each further one.
- A machine that is reached through a relay may be gone because the relay is: others behind that relay are not taken in
  its place at first.
- A machine that says that the session itself cannot be (`HopRefused`) is gone around like any other. It is believed
  when routes that share no machine said so, two of a session that ran and `OPENING_ROUTES` of one that never opened, or
  when nobody else has its layers. That the model is another one contradicts the machine's own record: routes add up to
  nothing then.

Before a session is open there is nothing to repair: another route is tried from the beginning. What happens to an open
one is `client.chain.repair_plan`'s.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from swarm.base.errors import (
    Busy,
    HopError,
    HopMisbehaved,
    HopRefused,
    HopTimeout,
    ModelMismatch,
    RemoteProtocolError,
    RouteError,
    SwarmError,
    Unreachable,
)
from swarm.base.ids import SessionId
from swarm.base.version import which_side
from swarm.protocol.faults import SignatureCheck, error_of
from swarm.protocol.messages import Fault, FaultKind, RouteHop
from swarm.routing.route import Route

SUSPECT_S = 30.0
"""How long a machine that was lost is avoided while others can take its place."""
MAX_DOUBLINGS = 5
"""How often that is doubled, at most: sixteen minutes."""
VERDICT_S = 120.0
"""How long it is remembered that a machine said the session cannot be."""
ROUTES, OPENING_ROUTES = 2, 8
"""How many routes that share no machine must say that a session cannot be. Before it opens nobody is known and another
try costs a round trip: a stranger would need as many machines, and all of them before the first honest one."""
MAX_MARKS, MAX_VERDICTS, MAX_NAMES, MAX_RELAYS = 1_024, 64, 16, 64


@dataclass(slots=True)
class _Mark:
    """What one machine was in trouble for.

    Attributes:
        newest_s: when it was last.
        error: the newest error that names it; None where it only stood at the other end.
        seen_s: when that was last seen, or said by itself; None: never.
        misdeeds: how often it broke the protocol, or did not move.
        accused_s: when another machine last said so; None: never.
        accusers: those that did, and that are believed together.
        other_s: when it last stood at the other end of a trouble.
        others: the machines that those troubles named.
    """

    newest_s: float
    error: HopError | None = None
    seen_s: float | None = None
    misdeeds: int = 0
    accused_s: float | None = None
    accusers: set[str] = field(default_factory=set)
    other_s: float = 0.0
    others: set[str] = field(default_factory=set)

    @property
    def is_hearsay(self) -> bool:
        """Whether one other machine alone says that it is at fault."""
        return self.seen_s is None and self.accused_s is not None and len(self.accusers) < 2

    @property
    def is_common(self) -> bool:
        """Whether it is what several troubles have in common."""
        return len(self.others) >= 2

    def is_suspect(self, now_s: float) -> bool:
        """Whether it is named in a trouble that is not forgotten."""
        long_s = SUSPECT_S * 2 ** min(max(self.misdeeds - 1, 0), MAX_DOUBLINGS)
        told_s = SUSPECT_S if len(self.accusers) >= 2 else SUSPECT_S / 2
        is_seen = self.seen_s is not None and now_s - self.seen_s < long_s
        return is_seen or (self.accused_s is not None and now_s - self.accused_s < told_s)

    def is_offender(self, now_s: float) -> bool:
        """Whether it is suspect for what it did more than once."""
        common_s = SUSPECT_S * 2 ** min(max(len(self.others) - 2, 0), MAX_DOUBLINGS)
        is_common = self.is_common and now_s - self.other_s < common_s
        return is_common or (self.misdeeds >= 2 and self.is_suspect(now_s))


class Suspicion:
    """What one client holds against machines."""

    def __init__(self) -> None:
        self._marks: dict[str, _Mark] = {}
        self._relays: dict[str, float] = {}

    def add(self, error: HopError, now_s: float, relay: str | None = None) -> None:
        """Note one more trouble.

        Args:
            error: what is known of it.
            now_s: when.
            relay: `host:port` of the relay through which the machine that it names is reached; None: it is dialled.
        """
        if relay is not None and isinstance(error, Unreachable | HopTimeout):
            self._relays.pop(relay, None)
            self._relays[relay] = now_s
            if len(self._relays) > MAX_RELAYS:
                del self._relays[next(iter(self._relays))]
        mark = self._mark(error.peer, now_s)
        mark.error = error
        if error.other is None:
            mark.seen_s = now_s
            mark.misdeeds += isinstance(error, HopMisbehaved)
            return
        mark.accused_s = now_s
        _keep(mark.accusers, error.other)
        other = self._mark(error.other, now_s)
        other.other_s = now_s
        _keep(other.others, error.peer)

    def avoided(self, now_s: float) -> frozenset[str]:
        """Machines to go around while others can take their place."""
        return frozenset(
            peer for peer, mark in self._marks.items() if mark.is_suspect(now_s) or mark.is_offender(now_s)
        )

    def relays(self, now_s: float) -> frozenset[str]:
        """Relays, as `host:port`, behind which a machine was lost lately."""
        return frozenset(relay for relay, at_s in self._relays.items() if now_s - at_s < SUSPECT_S)

    def in_turn(self, now_s: float) -> tuple[frozenset[str], ...]:
        """Sets of peers for routes to avoid, best first: the next one counts where a set leaves no route.

        First those of whom one other machine alone speaks ill make way for that machine. Then those make way that are
        only what troubles have in common: a machine that nobody can replace meets several that fail.
        """
        avoided = self.avoided(now_s)
        instead = self._accusers_instead(avoided, now_s)
        named = frozenset(peer for peer in avoided if self._marks[peer].is_suspect(now_s))
        turns = [avoided, *([] if instead is None else [instead]), named]
        return tuple(dict.fromkeys(turns))

    def _accusers_instead(self, avoided: frozenset[str], now_s: float) -> frozenset[str] | None:
        told = {peer for peer in avoided if self._marks[peer].is_hearsay and not self._marks[peer].is_offender(now_s)}
        accusers = {accuser for peer in told for accuser in self._marks[peer].accusers}
        return frozenset(avoided - told | accusers) if told else None

    def offenders(self, now_s: float) -> frozenset[str]:
        """Machines that are suspect for more than one thing."""
        return frozenset(peer for peer, mark in self._marks.items() if mark.is_offender(now_s))

    def seen(self) -> frozenset[str]:
        """Machines that were ever seen to fail, or said so themselves."""
        return frozenset(peer for peer, mark in self._marks.items() if mark.seen_s is not None)

    def within(self, seconds: float, kind: type[HopError], now_s: float) -> frozenset[str]:
        """Machines that were lost so lately, in this way."""
        return frozenset(
            peer
            for peer, mark in self._marks.items()
            if isinstance(mark.error, kind) and now_s - max(mark.seen_s or 0.0, mark.accused_s or 0.0) < seconds
        )

    def _mark(self, peer: str, now_s: float) -> _Mark:
        mark = self._marks.setdefault(peer, _Mark(now_s))
        mark.newest_s = now_s
        if len(self._marks) > MAX_MARKS:
            del self._marks[min(self._marks, key=lambda known: self._marks[known].newest_s)]
        return mark


class Verdicts:
    """Which machines said of one session that it cannot be, and over which routes."""

    def __init__(self, routes: int = ROUTES) -> None:
        """Believe so many routes that share no machine."""
        self._routes = routes
        self._said: list[tuple[float, frozenset[str], type[SwarmError]]] = []

    def add(self, error: HopRefused, route: Collection[str], now_s: float) -> bool:
        """Note what was said over a route of these peers; whether enough routes that share no machine said so."""
        peers, kind = frozenset(route), type(error.cause)
        self._said = [one for one in self._said if now_s - one[0] < VERDICT_S][-MAX_VERDICTS:]
        heard, count = peers, 1
        for _, others, known in self._said:
            if known is kind and not heard & others:
                heard, count = heard | others, count + 1
        self._said.append((now_s, peers, kind))
        return count >= self._routes and kind is not ModelMismatch

    def heard_over(self, now_s: float) -> frozenset[str]:
        """Machines of all these routes, where there were several: one without them settles the question."""
        recent = [peers for said_s, peers, _ in self._said if now_s - said_s < VERDICT_S]
        return frozenset().union(*recent) if len(recent) > 1 else frozenset()


def plain_error(error: SwarmError) -> SwarmError:
    """What a user is told at the end: what a machine said of the session, in its own words."""
    return error.cause if isinstance(error, HopRefused) else error


def _keep(names: set[str], name: str) -> None:
    if len(names) < MAX_NAMES:
        names.add(name)


OF_OTHERS = {FaultKind.UNREACHABLE, FaultKind.TIMEOUT, FaultKind.CLOSED}
"""What a hop may say of the one that comes next."""


def blamed(fault: Fault, via: RouteHop, session: SessionId, route: Route, is_signed: SignatureCheck) -> HopError:
    """The trouble that a fault is, with the machines that carry it.

    Args:
        fault: as it arrived.
        via: the first hop, or its replica, on whose stream it came.
        session: whose fault it is.
        route: over which the session goes now.
        is_signed: whether its reporter signed it.
    """
    if not is_signed(fault, session, route.sealed):
        if fault.peer == via.peer:  # its own stream vouches for what it says of itself
            return error_of(fault, str(via.span))
        return HopMisbehaved(via.peer, str(via.span), "passed on a fault that nobody signed")
    places: dict[str, int] = {hop.peer: index for index, hop in enumerate(route.hops)}
    if route.hedge is not None:
        places[route.hedge.replica] = route.hedge.index
    reporter, index = fault.reporter, places.get(fault.reporter or "")
    if reporter is None or index is None:
        return HopMisbehaved(via.peer, str(via.span), "passed on a fault of a machine outside the route")
    span = str(route.hops[index].span)
    if fault.peer == fault.reporter:
        if fault.kind is FaultKind.DIFFERENT:
            return HopMisbehaved(reporter, span, "says that it differs from itself")
        error = error_of(fault, span)
        if fault.kind is FaultKind.PROTOCOL and index:  # what it refuses came from the hop before
            error.on_link(route.hops[index - 1].peer, is_even=True)
        return error
    accused = places.get(fault.peer)
    is_replica = route.hedge is not None and accused == route.hedge.index == index - 1
    may_say = {FaultKind.DIFFERENT, FaultKind.CLOSED} if is_replica else OF_OTHERS if accused == index + 1 else set()
    if accused is None or fault.kind not in may_say:
        return HopMisbehaved(reporter, span, f"says what it cannot know: {fault.kind.value} at {fault.peer}")
    return error_of(fault, str(route.hops[accused].span)).on_link(reporter)


def advised(error: HopError, route: Route) -> HopError:
    """The trouble, and which side is to be updated where two releases may not understand each other.

    Args:
        error: what a machine of the route said, or did.
        route: whose records say which release each machine runs.
    """
    records = route.records if route.replica is None else (*route.records, route.replica)
    release = next((record.version for record in records if record.peer == error.peer), None)
    advice = None if release is None else which_side(release)
    match error:
        case HopRefused(cause=RemoteProtocolError() as cause) if advice is not None:
            said = RemoteProtocolError(cause.field, f"{cause.reason}; {advice}")
            return HopRefused(error.peer, error.span, said).on_link(error.other, is_even=error.is_even)
        case HopMisbehaved() if advice is not None:
            told = HopMisbehaved(error.peer, error.span, f"{error.reason}; {advice}")
            return told.on_link(error.other, is_even=error.is_even)
        case _:
            return error


ATTEMPTS = 3
"""How often one machine is asked although its refusal is not one that may pass."""
MAX_TRIES = 256
"""How often a session is tried to be opened, whoever refuses."""
TRIES_S = 20.0
"""How long other machines are tried, where the user waits less for one that is gone."""
RETRY_S = 0.5
"""How long a machine that could not be reached is not asked again: twice as long each time, up to `MAX_RETRY_S`."""
MAX_RETRY_S = 2.0
MAY_PASS = (Unreachable, HopTimeout)
"""Refusals that may pass: the machine may start again, be replaced, or have been slow."""
BUSY_S = 5.0
"""How long a machine that has no room is asked again where no other is left: by then it is free of sessions that nobody
uses (`node.session.table`)."""
QUEUED_S = 30.0
"""The same for one that keeps a place for this session (P16)."""
MAX_ASKED_S = 5.0
"""A machine may ask to be left alone for so long."""
JITTER = 0.25
"""By so much of it earlier or later it is asked again: those who were refused together do not come back together."""


class Refusals:
    """What kept one session from opening so far.

    Attributes:
        gap: which layers nobody serves without those machines; None: a chain is left, or nothing was tried.
    """

    def __init__(
        self,
        wait_s: float,
        timer: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """Begin without any.

        Args:
            wait_s: how long, from the first refusal on, machines that went are waited for.
            timer: a monotonic clock, in seconds.
            uniform: draws a number between two.
        """
        self.gap: RouteError | None = None
        self._told: str | None = None
        self._wait_s, self._timer, self._uniform = wait_s, timer, uniform
        self._first_s = 0.0
        self._due_s: dict[str, float] = {}
        self._last: dict[str, tuple[float, HopError]] = {}
        self._counts: Counter[tuple[str, str | None]] = Counter()
        self._suspicion = Suspicion()
        self._verdicts = Verdicts(OPENING_ROUTES)

    @property
    def last(self) -> HopError | None:
        """The newest one."""
        return max(self._last.values(), key=lambda one: one[0])[1] if self._last else None

    def final(self, error: HopError) -> SwarmError:
        """What to raise in the end; a machine that cannot be dialled is gone, so its layers are what is missing."""
        return self.gap if self.gap is not None and isinstance(error, Unreachable) else plain_error(error)

    @property
    def may_wait(self) -> bool:
        """Whether there is time left, and somebody for whom to wait."""
        can_pass = any(self._can_pass(error) for _, error in self._last.values())
        return can_pass and not isinstance(self.last, HopRefused) and self._timer() - self._first_s < self._wait_s

    def news(self) -> str | None:
        """What the user should know of the wait, once: again where the place among those that wait is another one."""
        last, told = self.last, self._told
        if isinstance(last, Busy) and last.position is not None:
            expected = "" if last.expected_s is None else f", about {max(last.expected_s, 1.0):.0f} s"
            self._told = f"number {last.position} of those that wait for room{expected}"
            return None if told == self._told else f"{self._told}: {last}"
        self._told = "waits"
        if told is not None:
            return None
        if isinstance(last, Busy):
            return f"waiting up to {min(self._wait_s, BUSY_S):.0f} s for room: {last}"
        return f"waiting up to {self._wait_s:.0f} s: {self.gap}"

    def add(self, error: HopError, route: Collection[str] = ()) -> bool:
        """Note one more; returns whether to try again.

        Args:
            error: what a machine said, or what became of it.
            route: the peers of the route that did not open.
        """
        now = self._timer()
        if not self._last:
            self._first_s = now
        self._counts[error.peer, error.other] += 1
        self._last[error.peer] = now, error
        if isinstance(error, Busy) and error.retry_after_s is not None:
            asked_s = min(error.retry_after_s, MAX_ASKED_S)
            self._due_s[error.peer] = now + asked_s * self._uniform(1 - JITTER, 1 + JITTER)
        self._suspicion.add(error, now)
        if isinstance(error, HopRefused) and self._verdicts.add(error, route, now):
            return False  # machines that share nothing say the same
        count = self._counts[error.peer, error.other]
        is_endless = self._counts.total() >= MAX_TRIES or now - self._first_s > max(self._wait_s, TRIES_S)
        return not is_endless and (count < ATTEMPTS or (self._can_pass(error) and self.may_wait))

    def avoided(self) -> tuple[frozenset[str], ...]:
        """Peers to avoid: all in trouble; then, where that leaves no chain, others in turn.

        Those whom one machine alone accuses make way for their accusers. At last, all but those that may be back.
        """
        now = self._timer()
        refused = frozenset(self._last)
        first, *others = self._suspicion.in_turn(now)
        sets = [refused | first, *others]
        if isinstance(self.last, HopRefused):
            if heard := self._verdicts.heard_over(now):
                sets.insert(0, refused | first | heard)
            return tuple(sets)
        back = {peer for peer, (at_s, error) in self._last.items() if self._may_be_back(at_s, error, now)}
        if back:
            sets.append(refused - back)
        return tuple(sets)

    def _can_pass(self, error: HopError) -> bool:
        if not isinstance(error, Busy):
            return isinstance(error, MAY_PASS)
        return self._timer() - self._first_s < (BUSY_S if error.position is None else QUEUED_S)

    def _may_be_back(self, at_s: float, error: HopError, now: float) -> bool:
        times = self._counts[error.peer, error.other]
        if isinstance(error, HopTimeout) and times == 1:  # its packets were lost, perhaps
            return True
        due_s = self._due_s.get(error.peer, at_s + min(RETRY_S * 2 ** (times - 1), MAX_RETRY_S))
        return self._can_pass(error) and now >= due_s
