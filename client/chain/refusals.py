"""Machines that let no session open, and for how long a client goes on asking. Pure but for the clock.

Before a session is open there is nothing to repair: another route is tried from the beginning. What happens to an open
one is `client.chain.repair_plan`'s. Whom trouble counts against is `client.chain.suspicion`'s.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection

from client.chain.suspicion import OPENING_ROUTES, Suspicion, Verdicts, plain_error
from swarm.errors import Busy, HopError, HopRefused, HopTimeout, RouteError, SwarmError, Unreachable

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
uses (`node.session.eviction`)."""


class Refusals:
    """What kept one session from opening so far.

    Attributes:
        gap: which layers nobody serves without those machines; None: a chain is left, or nothing was tried.
        has_warned: whether the user was told that machines are waited for.
    """

    def __init__(self, wait_s: float, timer: Callable[[], float] = time.monotonic) -> None:
        """Begin without any.

        Args:
            wait_s: how long, from the first refusal on, machines that went are waited for.
            timer: a monotonic clock, in seconds.
        """
        self.gap: RouteError | None = None
        self.has_warned = False
        self._wait_s, self._timer = wait_s, timer
        self._first_s = 0.0
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
        return isinstance(error, MAY_PASS) or (isinstance(error, Busy) and self._timer() - self._first_s < BUSY_S)

    def _may_be_back(self, at_s: float, error: HopError, now: float) -> bool:
        times = self._counts[error.peer, error.other]
        if isinstance(error, HopTimeout) and times == 1:  # its packets were lost, perhaps
            return True
        return self._can_pass(error) and now - at_s >= min(RETRY_S * 2 ** (times - 1), MAX_RETRY_S)
