"""Machines that let no session open, and for how long a client goes on asking. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from swarm.errors import HopError, HopTimeout, RouteError, SwarmError, Unreachable

ATTEMPTS = 3
"""So often a session is tried to be opened although nothing says that time will help."""
RETRY_S = 0.5
"""Who did not answer is not asked again sooner."""
HEALS = (Unreachable, HopTimeout)
"""It may start again, be replaced, or have been slow."""


class Refusals:
    """What kept one session from opening so far.

    gap: what there is without those machines, if that is no chain. is_told: whether the user knows that it is waited.
    """

    def __init__(self, wait_s: float, timer: Callable[[], float] = time.monotonic) -> None:
        """wait_s: for how long, from the first refusal on, machines that went are waited for."""
        self.gap: RouteError | None = None
        self.is_told = False
        self._wait_s, self._timer = wait_s, timer
        self._first_s = 0.0
        self._last: dict[str, tuple[float, HopError]] = {}
        self._count = 0

    @property
    def last(self) -> HopError | None:
        """The newest one."""
        return max(self._last.values(), key=lambda one: one[0])[1] if self._last else None

    def final(self, error: HopError) -> SwarmError:
        """What to say in the end; whoever cannot be dialled is gone, and serves no layers."""
        return self.gap if self.gap is not None and isinstance(error, Unreachable) else error

    @property
    def may_heal(self) -> bool:
        """Whether there is time left, and somebody for whom to wait."""
        is_hoped = any(isinstance(error, HEALS) for _, error in self._last.values())
        return is_hoped and self._timer() - self._first_s < self._wait_s

    def add(self, error: HopError) -> bool:
        """One more; whether it is worth trying on."""
        now = self._timer()
        if not self._count:
            self._first_s = now
        self._count += 1
        self._last[error.peer] = now, error
        return self._count < ATTEMPTS or (isinstance(error, HEALS) and self.may_heal)

    def avoided(self) -> tuple[frozenset[str], ...]:
        """Whom to go around: everyone of them, and where that leaves nobody, all but those who may be back by now."""
        everyone = frozenset(self._last)
        now = self._timer()
        back = {
            peer
            for peer, (at_s, error) in self._last.items()
            if isinstance(error, HEALS) and (now - at_s >= RETRY_S or isinstance(error, HopTimeout))
        }
        return (everyone, everyone - back) if back else (everyone,)
