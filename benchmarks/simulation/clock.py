"""Virtual time, in which things wait and compute at once. Deterministic.

    after      a wait of so many milliseconds, beside everything else
    compute    so many milliseconds of a core's time; programs share cores evenly when there are too few, and what one
               program does at once shares one core, as a Python interpreter does
    Line       one thing at a time, in the order of coming: a hop's forwards, a link's bytes

The clock moves only where somebody waits for something: `wait`, `take`, `until`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

Then = Callable[[], None]
Work = Callable[[Then], None]
"""Begins something, and calls `Then` when that is done."""
NEARLY_NOTHING_MS = 1e-9


@dataclass(slots=True)
class Task:
    """Something that computes.

    Attributes:
        left_ms: What is left of it, in milliseconds of a core.
        program: Whose it is: what one program computes at once shares one core.
    """

    left_ms: float
    then: Then
    program: Hashable


@dataclass(slots=True)
class Clock:
    """Virtual milliseconds.

    Attributes:
        cores: Cores that all computing shares; None where every program has cores of its own.
    """

    cores: int | None = None
    now_ms: float = 0.0
    _due: list[tuple[float, int, Then]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _tasks: list[Task] = field(default_factory=list)

    def seconds(self) -> float:
        """The time in seconds, as the decode loop asks for it."""
        return self.now_ms / 1e3

    def after(self, wait_ms: float, then: Then) -> None:
        heapq.heappush(self._due, (self.now_ms + max(wait_ms, 0.0), next(self._order), then))

    def compute(self, took_ms: float, then: Then, program: Hashable = None) -> None:
        """Do something when so much was computed, by a program; None is one that does nothing else."""
        if self.cores is None or not took_ms:
            self.after(took_ms, then)
        else:
            self._tasks.append(Task(took_ms, then, object() if program is None else program))

    def wait(self, wait_ms: float) -> None:
        self._pass(self.after, wait_ms)

    def take(self, took_ms: float, program: Hashable = None) -> None:
        """Time passes until so much was computed."""
        self._pass(partial(self.compute, program=program), took_ms)

    def until(self, is_done: Callable[[], bool]) -> None:
        """Time passes until something holds; what is due by then has happened.

        Raises:
            RuntimeError: it never will.
        """
        while not is_done():
            if not self._step():
                raise RuntimeError("nothing is left that could happen")

    def _pass(self, how: Callable[[float, Then], None], took_ms: float) -> None:
        done: list[bool] = []
        how(took_ms, lambda: done.append(True))
        self.until(lambda: bool(done))

    def _step(self) -> bool:
        """The next thing happens; whether there was one."""
        if not self._due and not self._tasks:
            return False
        threads = Counter(task.program for task in self._tasks)
        rate = min(1.0, (self.cores or 1) / len(threads)) if threads else 1.0
        first = min(self._tasks, key=lambda task: task.left_ms * threads[task.program], default=None)
        done_ms = self.now_ms + first.left_ms * threads[first.program] / rate if first is not None else 0.0
        if first is None or (self._due and self._due[0][0] <= done_ms):
            at_ms, _, then = heapq.heappop(self._due)
        else:
            at_ms, then = done_ms, first.then
            self._tasks.remove(first)
        for task in self._tasks:
            passed_ms = (at_ms - self.now_ms) * rate / threads[task.program]
            task.left_ms = max(task.left_ms - passed_ms, NEARLY_NOTHING_MS)
        self.now_ms = at_ms
        then()
        return True


@dataclass(slots=True)
class FifoServer:
    """Does one thing at a time, in the order of coming."""

    _waiting: deque[tuple[Work, Then]] = field(default_factory=deque)
    _is_busy: bool = False

    def join(self, work: Work, then: Then) -> None:
        """Do some work when all that came before is done, and then something else."""
        self._waiting.append((work, then))
        self._go_on()

    def _go_on(self) -> None:
        if self._is_busy or not self._waiting:
            return
        self._is_busy = True
        work, then = self._waiting.popleft()

        def end() -> None:
            self._is_busy = False
            then()
            self._go_on()

        work(end)
