"""An event loop on a virtual clock: no wait takes time, and nothing that a machine is slow at is ever late.

The clock stands while anything can run and jumps to the next timer when nothing can. What is given to a thread runs at
once, in the loop's own. So what happens, and in which order, depends on the program alone. Whoever waits for another
process, or for a real socket, needs a real loop.

Each look at the clock moves it by `TICK_S`: two moments are never the same one.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import pytest

TICK_S = 1e-6
STUCK_S = 30.0
"""Real seconds in which another thread may wake a loop that has nothing left to do."""


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


def _at_once(_: ThreadPoolExecutor, call: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:  # noqa: ANN401
    """What `ThreadPoolExecutor.submit` gives, of work that is done already."""
    done: Future[Any] = Future()
    try:
        done.set_result(call(*given, **named))
    except Exception as error:  # noqa: BLE001 - whatever it is, whoever waits for the result gets it
        done.set_exception(error)
    return done


@contextmanager
def virtual_time(loop: VirtualLoop) -> Iterator[VirtualClock]:
    """The whole process looks at the loop's clock, and threads are not used."""
    clock = loop.clock
    clocks = {name: getattr(clock, how) for name, how in _CLOCKS.items()}
    real = {getattr(time, name): made for name, made in clocks.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, made in clocks.items():
            patch.setattr(time, name, made)
        patch.setattr(ThreadPoolExecutor, "submit", _at_once)
        _exchange_defaults(real)
        yield clock
    _exchange_defaults({made: one for one, made in real.items()})  # also of modules that were imported meanwhile


_CLOCKS = {"monotonic": "seconds", "perf_counter": "seconds", "perf_counter_ns": "nanoseconds"}
_PACKAGES = ("client.", "node.", "swarm.")


def _exchange_defaults(clocks: Mapping[Any, Any]) -> None:
    """Functions that take a clock and have one as their default: give them another."""
    gc.unfreeze()  # a program that ran in this process may have frozen its imports, which are left out then
    for one in gc.get_objects():
        if type(one) is FunctionType and (one.__module__ or "").startswith(_PACKAGES):  # others may be lazy
            if one.__defaults__:
                one.__defaults__ = tuple(_exchanged(value, clocks) for value in one.__defaults__)
            if one.__kwdefaults__:
                one.__kwdefaults__ = {name: _exchanged(value, clocks) for name, value in one.__kwdefaults__.items()}


def _exchanged(value: Any, clocks: Mapping[Any, Any]) -> Any:  # noqa: ANN401 - any default
    return clocks.get(value, value) if isinstance(value, BuiltinFunctionType | MethodType) else value
