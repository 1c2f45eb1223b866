"""The one thread of a process whose operators use several CPU threads, and how many it uses.

Each OS thread that enters a parallel region of OpenMP owns a team of workers. With more of them than cores none waits
by spinning: workers sleep between regions, and an operator takes almost twice as long. So a program of Canopy has one
compute thread, and an operator on any other thread uses that thread alone.

Where other programs take the cores meanwhile, a team waits for its slowest member at every operator. So a team is as
large as what others leave while it computes (`CoreShare`), and at least one. What they do in between costs nothing.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Thread
from typing import Final, ParamSpec, TypeVar

import psutil
import torch

P = ParamSpec("P")
T = TypeVar("T")

LOOK_S: Final = 1.0
"""Over so long a time of computing others' use of the cores is judged."""
SPARE: Final = 0.6
"""A core of which others leave so much still pays as a thread: a team's operators take as long as its slowest one."""


class ComputeThread:
    """A thread on which calls run one after the other."""

    def __init__(self, name: str = "compute") -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._share: CoreShare | None = None

    def own_the_pool(self, threads: int | None = None) -> None:
        """Make this the only thread with a team, in a process whose other threads need none.

        Args:
            threads: of the team at most; None for as many as torch uses here.
        """
        most = threads or self.submit(torch.get_num_threads).result()
        self.submit(use_threads, most, 1).result()
        torch.get_num_threads()  # else this thread's first computation would take what it finds then
        torch.set_num_threads(1)
        self._share = CoreShare(most)

    @property
    def threads(self) -> int:
        """How many its team has at most."""
        return torch.get_num_threads() if self._share is None else self._share.most

    def submit(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> Future[T]:
        """Run a call behind those that were given before, with as many threads as other programs leave cores."""
        return self._thread.submit(self._run, partial(call, *args, **options))

    async def run(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run a call, and wait for it."""
        return await asyncio.wrap_future(self.submit(call, *args, **options))

    def _run(self, call: Callable[[], T]) -> T:
        share = self._share
        if share is None or share.most == 1:
            return call()
        share.begin()
        try:
            return call()
        finally:
            before = share.threads
            if share.end() != before:
                use_threads(share.threads, 1)

    def close(self) -> None:
        """Wait for the call that runs; those behind it are dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def use_threads(threads: int, others: int) -> None:
    """Compute with `threads` CPU threads in this thread, and with `others` in threads that start later."""
    torch.get_num_threads()  # else a thread's first computation takes the number that any thread set last
    torch.set_num_threads(threads)
    other = Thread(target=torch.set_num_threads, args=(others,))
    other.start()
    other.join()


class CoreShare:
    """How many threads a team should have, by what other programs leave of the cores. Used on the compute thread."""

    def __init__(
        self,
        most: int,
        cores: int | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        others_s: Callable[[], float] | None = None,
    ) -> None:
        """Begin with the largest team.

        Args:
            most: its threads.
            cores: of the machine.
            clock_s: seconds.
            others_s: CPU seconds that others used so far, on all cores.
        """
        self.most = self.threads = most
        self._cores = cores or os.cpu_count() or 1
        self._clock_s, self._others_s = clock_s, others_s or _used_by_others_s
        self._began_s = self._before_s = self._computed_s = self._used_s = 0.0

    def begin(self) -> None:
        """Something is computed from now on."""
        self._began_s, self._before_s = self._clock_s(), self._others_s()

    def end(self) -> int:
        """It is done: the team's threads from now on, which change at most once in `LOOK_S` of computing."""
        self._computed_s += self._clock_s() - self._began_s
        self._used_s += self._others_s() - self._before_s  # below 0 at times: the system counts in ticks
        if self._computed_s >= LOOK_S:
            left = self._cores - max(0.0, self._used_s) / self._computed_s
            self.threads = min(self.most, max(1, math.floor(left + 1 - SPARE)))
            self._computed_s = self._used_s = 0.0
        return self.threads


def _used_by_others_s() -> float:
    machine, own = psutil.cpu_times(), os.times()
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    guests = getattr(machine, "guest", 0.0) + getattr(machine, "guest_nice", 0.0)  # counted in user and nice too
    return sum(machine) - idle - guests - own.user - own.system
