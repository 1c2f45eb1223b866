"""How long a session lives without news: renewed by every message, shortened when its upstream is lost (R9)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

ORPHAN_S = 4.0
"""How long a session outlives its upstream's stream."""
HOLD_S = 60.0
"""The longest time for which a client may hold an orphan."""
IDLE_S = 1_800.0
"""How long a session may stay without a sweep: a chat's user may think for a while."""


class Lease:
    """A timer that calls `end` with the reason when it runs out."""

    def __init__(self, end: Callable[[str], None]) -> None:
        self._end = end
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False

    def renew(self) -> None:
        """A message of the session came."""
        self._set(IDLE_S, "nothing was heard of it")

    def orphan(self) -> None:
        """The upstream's stream ended: wait a while for another one."""
        self._set(ORPHAN_S, "its upstream vanished")

    def hold(self, seconds: float) -> None:
        """The client says that it repairs the chain."""
        self._set(min(seconds, HOLD_S), "its chain was not repaired in time")

    def cancel(self) -> None:
        """The session is over."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, seconds: float, reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_over:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._end, reason)
