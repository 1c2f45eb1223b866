"""The event-loop overhead of a sweep: CPU milliseconds beside its forward, for messages above all. Owns no session."""

from __future__ import annotations

import time
from collections.abc import Callable

NEAR_S = 0.05
"""Between sweeps that follow each other so closely, all that the loop does is done for them."""
RATE = 0.05


class LoopCost:
    """Learns from the loop's own CPU clock, from one finished sweep to the next.

    Attributes:
        mean_ms: per sweep; 0 until sweeps followed each other.
    """

    def __init__(
        self, cpu_s: Callable[[], float] = time.thread_time, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Know nothing yet.

        Args:
            cpu_s: CPU seconds of the thread that the loop runs on.
            clock_s: seconds that passed.
        """
        self.mean_ms = 0.0
        self._cpu_s, self._clock_s = cpu_s, clock_s
        self._computed_ms = self._last_used_ms = self._last_s = 0.0
        self._is_known = False

    def add_compute(self, milliseconds: float) -> None:
        """So much of the loop's CPU was a forward's."""
        self._computed_ms += milliseconds

    def end_sweep(self) -> None:
        """A sweep is done."""
        now_s, used_ms = self._clock_s(), self._cpu_s() * 1e3 - self._computed_ms
        if self._is_known and now_s - self._last_s <= NEAR_S:
            self.mean_ms += RATE * (used_ms - self._last_used_ms - self.mean_ms)
        self._last_s, self._last_used_ms, self._is_known = now_s, used_ms, True
