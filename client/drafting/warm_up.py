"""Before the first text: a model's first passes take long, and what further CPU threads are worth is measured.

They are worth nothing to a small draft, and harm where something else computes on this machine: threads that wait for
each other wait for whoever has their core, up to a fifth of a second per tree.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from itertools import cycle, product
from threading import Thread

import torch

from client.drafting.drafter import Drafter, TreeDrafter
from swarm.protocol.messages import Sampling

NODES, LEVELS = 16, 2
ON_A_CARD = ((NODES, LEVELS), (4 * NODES, 2 * LEVELS), (16 * NODES, 4 * LEVELS))
"""Nodes and levels of trees with which a card loads its kernels, which differ with the size."""
PAYS = 1.3
"""Twice as many threads are kept where a tree then grows so many times as fast."""
ENOUGH_S = 0.015
"""With each number of threads trees grow for so long; the fastest counts."""


def drafting_thread(drafter: Drafter, hidden_size: int, threads: int | None) -> Executor:
    """The one thread that drafts, which warms up first. Other threads of this process go on with as many as they had.

    hidden_size: of the target's rows. threads: CPU threads that it computes with; None: as many as pay, at most as many
    as torch uses here.
    """
    usual = torch.get_num_threads()
    drafting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="draft")
    drafting.submit(use_threads, threads or 1, usual)
    if isinstance(drafter, TreeDrafter):
        drafting.submit(_warm_up, drafter, hidden_size, usual, is_free=threads is None)
    return drafting


def _warm_up(drafter: TreeDrafter, hidden_size: int, usual: int, *, is_free: bool) -> None:
    """Grow trees of no text; where the number of threads is free, leave as many as pay, up to `usual`."""
    sequences, row = cycle(((0, 1), (0, 2))), torch.zeros(1, hidden_size)

    def grow(nodes: int = NODES, levels: int = LEVELS, temperature: float = 0.0) -> None:
        drafter.observe((0,), row)
        drafter.grow(next(sequences), nodes, levels, Sampling(temperature=temperature))

    try:
        grow()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for (nodes, levels), temperature in product(ON_A_CARD, (0.0, 1.0)):
                grow(nodes, levels, temperature)
        if is_free:
            keep_fewest(partial(_fastest_s, grow), usual)
    finally:
        drafter.forget()


def use_threads(threads: int, usual: int) -> None:
    """Compute with so many CPU threads in this thread, and with `usual` in those that are yet to come."""
    torch.get_num_threads()  # else a thread's first computation takes what was said last, wherever
    torch.set_num_threads(threads)
    other = Thread(target=torch.set_num_threads, args=(usual,))
    other.start()
    other.join()


def keep_fewest(seconds: Callable[[], float], usual: int) -> None:
    """Use as many CPU threads as pay, from 1 to `usual`; `seconds` measures with those that are used."""
    threads, took_s = 1, seconds()
    while threads < usual:
        more = min(2 * threads, usual)
        use_threads(more, usual)
        more_s = seconds()
        if took_s < PAYS * more_s:
            use_threads(threads, usual)
            break
        threads, took_s = more, more_s


def _fastest_s(grow: Callable[[], None]) -> float:
    best_s, ends_s = math.inf, time.perf_counter() + ENOUGH_S
    while (started_s := time.perf_counter()) < ends_s:
        grow()
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s
