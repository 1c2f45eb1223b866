"""Ctrl-C at every single step of a blocking call: always KeyboardInterrupt, and the loop goes on."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol

import pytest

from client.library import loop_thread
from client.library.loop_thread import LoopThread, interrupts_kept


class Trace(Protocol):
    """What `sys.settrace` takes."""

    def __call__(self, frame: FrameType, event: str, arg: object, /) -> Trace | None: ...


class _Work:
    def __init__(self, rounds: int = 5) -> None:
        self._rounds = rounds
        self.running = 0
        self.finished = 0

    async def go(self) -> int:
        self.running += 1
        try:
            for _ in range(self._rounds):
                await asyncio.sleep(0.0001)
            self.finished += 1
            return 7
        finally:
            await asyncio.sleep(0)
            self.running -= 1


@contextmanager
def ctrl_c_at(step: int, of: frozenset[str]) -> Iterator[list[int]]:
    """Press Ctrl-C before the `step`-th instruction that the main thread runs in one of the files."""
    left = [step]

    def trace(frame: FrameType, event: str, _: object) -> Trace | None:
        if frame.f_code.co_filename not in of:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield left
    finally:
        sys.settrace(before)


WAITING = frozenset({loop_thread.__file__, threading.__file__, sys.modules["concurrent.futures._base"].__file__ or ""})


def test_ctrl_c_before_any_instruction_stops_the_work_and_breaks_nothing() -> None:
    """In a process of its own: what this looks for are locks that are never let go."""
    command = [sys.executable, "-c", f"from {__name__} import press_everywhere as go; go()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=45, cwd=Path(__file__).parents[4])
    assert done.returncode == 0, done.stderr


def press_everywhere() -> None:
    """The traced files hold the locks that the loop's thread needs too."""
    with closing(LoopThread.start()) as loop:
        step, ended = 0, False
        while not ended:
            step += 1
            work, interrupted = _Work(), False
            try:
                with ctrl_c_at(step, WAITING) as left:
                    loop.run(work.go)
                ended = left[0] > 0
            except KeyboardInterrupt:
                interrupted = True
            assert interrupted != ended, f"step {step}: an interrupt got lost"
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert loop.run(_Work().go) == 7, f"step {step}"
            assert work.running == 0, f"step {step}: the work goes on"
    assert step > 300, "nothing was traced"


def test_ctrl_c_while_it_waits_stops_the_work_first() -> None:
    work = _Work(rounds=10**9)
    with closing(LoopThread.start()) as loop:
        threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            loop.run(work.go)
        assert work.running == 0
        assert work.finished == 0


def test_ctrl_c_while_something_ends_is_raised_after_it() -> None:
    work = _Work(rounds=2000)
    with closing(LoopThread.start()) as loop:
        threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            loop.finish(work.go)
        assert work.finished == 1


def test_the_second_ctrl_c_waits_for_nothing() -> None:
    let_go = threading.Event()

    async def stubborn() -> None:
        while not let_go.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    with closing(LoopThread.start()) as loop:
        for after in (0.1, 0.3):
            threading.Timer(after, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        threading.Timer(0.6, let_go.set).start()
        with pytest.raises(KeyboardInterrupt):
            loop.run(stubborn)
        assert let_go.wait(5)


def test_interrupts_are_left_alone_where_somebody_handles_them() -> None:
    pressed: list[int] = []

    def own(number: int, _: FrameType | None) -> None:
        pressed.append(number)

    before = signal.signal(signal.SIGINT, own)
    try:
        with interrupts_kept():
            signal.raise_signal(signal.SIGINT)
            assert pressed == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_that_is_not_the_main_one_waits_as_well() -> None:
    got: list[int] = []
    with closing(LoopThread.start()) as loop:
        thread = threading.Thread(target=lambda: got.append(loop.run(_Work().go)))
        thread.start()
        thread.join(10)
    assert got == [7]


def test_contexts_are_left_in_their_order_and_errors_come_out_as_themselves() -> None:
    left: list[str] = []

    @asynccontextmanager
    async def context(name: str) -> AsyncIterator[str]:
        if name == "bad":
            raise ValueError(name)
        async with asyncio.timeout(10):  # belongs to one task
            yield name
        left.append(name)

    with closing(LoopThread.start()) as loop:
        assert loop.open(context("first")) == "first"
        assert loop.open(context("second")) == "second"
        with pytest.raises(ValueError, match="bad"):
            loop.open(context("bad"))
    assert left == ["second", "first"]
