"""An event loop on a virtual clock: no wait takes time, and nothing that a machine is slow at is ever late.

The clock stands while anything can run and jumps to the next timer when nothing can.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Final, TypeVar
from unittest.mock import patch

T = TypeVar("T")

TICK_S: Final = 1e-6
"""By how much each look moves the clock: two moments are never the same one."""
STUCK_S: Final = 30.0
"""Real seconds in which another thread may wake a loop that has nothing left to do."""
CLOCKS: Final = {"monotonic": "seconds", "perf_counter": "seconds", "perf_counter_ns": "nanoseconds"}
"""Clocks of the module `time`, and what stands for them."""


class VirtualClock:
    """Virtual seconds, from some moment on."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def seconds(self) -> float:
        """A moment, as `time.monotonic` and `time.perf_counter` give one."""
        self.now_s += TICK_S
        return self.now_s

    def nanoseconds(self) -> int:
        return int(self.seconds() * 1e9)


class _Selector(selectors.DefaultSelector):
    """Passes virtual time where a real one would wait."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if found or timeout == 0:
            return found
        if timeout is None:
            if found := super().select(STUCK_S):
                return found
            raise RuntimeError("nothing is left that could happen")
        self._clock.now_s += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a clock of its own."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        super().__init__(_Selector(self.clock))

    def time(self) -> float:
        """The loop's moment; a look at it does not move the clock."""
        return self.clock.now_s


def run_virtual(main: Callable[[], Coroutine[object, object, T]]) -> T:
    """Run a program on a loop of its own, while all that asks `time` by a clock's name looks at the loop's clock."""
    with ExitStack() as stack, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        for name, made in CLOCKS.items():
            stack.enter_context(patch.object(time, name, getattr(loop.clock, made)))
        return runner.run(main())
