"""The whole process on the clock of a virtual loop (`benchmarks.simulation.virtual_loop`).

What is given to a thread runs at once, in the loop's own. So what happens, and in which order, depends on the program
alone. Whoever waits for another process, or for a real socket, needs a real loop.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import pytest

from benchmarks.simulation.virtual_loop import CLOCKS, VirtualClock, VirtualLoop


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
    clocks = {name: getattr(clock, how) for name, how in CLOCKS.items()}
    real = {getattr(time, name): made for name, made in clocks.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, made in clocks.items():
            patch.setattr(time, name, made)
        patch.setattr(ThreadPoolExecutor, "submit", _at_once)
        _exchange_defaults(real)
        yield clock
    _exchange_defaults({made: one for one, made in real.items()})  # also of modules that were imported meanwhile


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
