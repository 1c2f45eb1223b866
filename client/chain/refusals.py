"""Machines that let no session open, and for how long a client goes on asking. Pure but for the clock.

Before a session is open there is nothing to repair: another route is tried from the beginning. What happens to an open
one is `client.chain.repair_plan`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from swarm.errors import HopError, HopTimeout, RouteError, SwarmError, Unreachable

ATTEMPTS = 3
"""How often a session is tried to be opened although no refusal is one that may pass."""
RETRY_S = 0.5
"""How long a machine that could not be reached is not asked again."""
MAY_PASS = (Unreachable, HopTimeout)
"""Refusals that may pass: the machine may start again, be replaced, or have been slow."""


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
        self._count = 0

    @property
    def last(self) -> HopError | None:
        """The newest one."""
        return max(self._last.values(), key=lambda one: one[0])[1] if self._last else None

    def final(self, error: HopError) -> SwarmError:
        """What to raise in the end; a machine that cannot be dialled is gone, so its layers are what is missing."""
        return self.gap if self.gap is not None and isinstance(error, Unreachable) else error

    @property
    def may_wait(self) -> bool:
        """Whether there is time left, and somebody for whom to wait."""
        can_pass = any(isinstance(error, MAY_PASS) for _, error in self._last.values())
        return can_pass and self._timer() - self._first_s < self._wait_s

    def add(self, error: HopError) -> bool:
        """Note one more; returns whether to try again."""
        now = self._timer()
        if not self._count:
            self._first_s = now
        self._count += 1
        self._last[error.peer] = now, error
        return self._count < ATTEMPTS or (isinstance(error, MAY_PASS) and self.may_wait)

    def avoided(self) -> tuple[frozenset[str], ...]:
        """Peers to avoid: all that refused; then, for where that leaves no chain, all but those that may be back."""
        refused = frozenset(self._last)
        now = self._timer()
        back = {
            peer
            for peer, (at_s, error) in self._last.items()
            if isinstance(error, MAY_PASS) and (now - at_s >= RETRY_S or isinstance(error, HopTimeout))
        }
        return (refused, refused - back) if back else (refused,)
