"""What a sweep costs a node's event loop beside its forward: messages above all, in milliseconds of CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

NEAR_S = 0.05
"""What the loop did between sweeps that follow each other so closely, it did for them."""
RATE = 0.05


class LoopCost:
    """Learns from the loop's own CPU clock, from one finished sweep to the next.

    mean_ms: per sweep; 0 until sweeps followed each other.
    """

    def __init__(
        self, cpu_s: Callable[[], float] = time.thread_time, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """cpu_s: of the thread that the loop runs on."""
        self.mean_ms = 0.0
        self._cpu_s, self._clock_s = cpu_s, clock_s
        self._computed_ms = self._used_ms = self._then_s = 0.0
        self._is_known = False

    def computed(self, milliseconds: float) -> None:
        """So much of the loop's CPU was a forward's."""
        self._computed_ms += milliseconds

    def swept(self) -> None:
        """A sweep is done."""
        now_s, used_ms = self._clock_s(), self._cpu_s() * 1e3 - self._computed_ms
        if self._is_known and now_s - self._then_s <= NEAR_S:
            self.mean_ms += RATE * (used_ms - self._used_ms - self.mean_ms)
        self._then_s, self._used_ms, self._is_known = now_s, used_ms, True
