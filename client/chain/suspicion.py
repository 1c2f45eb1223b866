"""Whom a chain goes around, for how long, and whose word ends a text. Pure: time is a parameter.

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
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from swarm.errors import HopError, HopMisbehaved, HopRefused, HopTimeout, ModelMismatch, SwarmError, Unreachable

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
        """Whom to go around at first; then, where that leaves no route, whom instead.

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
