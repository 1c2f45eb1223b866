"""Warms a drafter up before the first text: runs a model's slow first passes, and measures how many CPU threads pay.

More threads do not speed up a small draft. Where other programs compute on this machine they slow it down, since
threads that wait for each other also wait for whatever holds their core.
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
"""Of a small tree."""
CARD_TREES = ((NODES, LEVELS), (4 * NODES, 2 * LEVELS), (16 * NODES, 4 * LEVELS))
"""Nodes and levels of trees that make a CUDA card load its kernels, which differ with the size."""
MIN_SPEEDUP = 1.3
"""Twice as many threads are kept where a tree then grows at least so many times as fast."""
MEASURED_S = 0.015
"""How long trees grow with each number of threads; the fastest tree counts."""


def drafting_thread(drafter: Drafter, hidden_size: int, threads: int | None) -> Executor:
    """The one thread that drafts, which warms up first. Computations on other threads keep their CPU threads.

    Args:
        drafter: to warm up.
        hidden_size: values of the target's hidden rows.
        threads: CPU threads that it computes with; None for as many as pay, at most as many as torch uses here.
    """
    usual = torch.get_num_threads()
    drafting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="draft")
    drafting.submit(use_threads, threads or 1, usual)
    if isinstance(drafter, TreeDrafter):
        drafting.submit(_warm_up, drafter, hidden_size, usual, is_free=threads is None)
    return drafting


def _warm_up(drafter: TreeDrafter, hidden_size: int, usual: int, *, is_free: bool) -> None:
    """Grow trees of a made-up text; where the number of threads is free, leave as many as pay, up to `usual`."""
    sequences, row = cycle(((0, 1), (0, 2))), torch.zeros(1, hidden_size * (1 + len(drafter.aux_layers)))

    def grow(nodes: int = NODES, levels: int = LEVELS, temperature: float = 0.0) -> None:
        drafter.observe((0,), row)
        drafter.grow(next(sequences), nodes, levels, Sampling(temperature=temperature))

    try:
        grow()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for (nodes, levels), temperature in product(CARD_TREES, (0.0, 1.0)):
                grow(nodes, levels, temperature)
        if is_free:
            keep_fewest(partial(_fastest_s, grow), usual)
    finally:
        drafter.forget()


def use_threads(threads: int, usual: int) -> None:
    """Compute with `threads` CPU threads in this thread, and with `usual` in threads that start later."""
    torch.get_num_threads()  # else a thread's first computation takes the number that any thread set last
    torch.set_num_threads(threads)
    other = Thread(target=torch.set_num_threads, args=(usual,))
    other.start()
    other.join()


def keep_fewest(seconds: Callable[[], float], usual: int) -> None:
    """Use as many CPU threads as pay, from 1 to `usual`; `seconds` measures a tree with those in use."""
    threads, took_s = 1, seconds()
    while threads < usual:
        doubled = min(2 * threads, usual)
        use_threads(doubled, usual)
        doubled_s = seconds()
        if took_s < MIN_SPEEDUP * doubled_s:
            use_threads(threads, usual)
            break
        threads, took_s = doubled, doubled_s


def _fastest_s(grow: Callable[[], None]) -> float:
    best_s, ends_s = math.inf, time.perf_counter() + MEASURED_S
    while (started_s := time.perf_counter()) < ends_s:
        grow()
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s
