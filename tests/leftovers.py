"""Threads and processes that a test may have left behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from swarm.base.workers import FIRST

SERVERS: set[int] = set()
"""Process ids of children that live as long as this process: what `tests.forked` forks programs of."""


def has_ended(thread: threading.Thread, seconds: float) -> bool:
    """Whether a thread ends in time; one that is only just being started is waited for as well."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            thread.join(timeout=max(deadline - time.monotonic(), 0.0))
        except RuntimeError:  # listed already and not started yet, which no event tells
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        else:
            return not thread.is_alive()


def descendants() -> set[psutil.Process]:
    """This process's children, and theirs, without `SERVERS` and workers, which live as long as this process.

    The kernel's lists are read: psutil reads all of them.
    """
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return {child for child in psutil.Process().children(recursive=True) if not is_lasting(child)}
    found: set[psutil.Process] = set()
    for pid in _below(os.getpid()):
        with suppress(psutil.Error):  # gone meanwhile
            found.add(psutil.Process(pid))
    return found


def is_lasting(process: psutil.Process) -> bool:
    """Whether a process is one of `SERVERS`, or a worker (`swarm.base.workers`)."""
    if process.pid in SERVERS or process.pid == FIRST.pid:
        return True
    try:
        return FIRST.pid in {above.pid for above in process.parents()}
    except psutil.Error:
        return False  # gone meanwhile


def started_meanwhile(now: set[psutil.Process], before: set[psutil.Process]) -> set[psutil.Process]:
    """The processes of `now` that neither ran before nor belong to one that did.

    A program that many tests share starts its own whenever it likes, such as a relay that dies and is started again.
    """
    return {process for process in now - before if not _is_below(process, before)}


def _is_below(process: psutil.Process, others: set[psutil.Process]) -> bool:
    try:
        return not others.isdisjoint(process.parents())
    except psutil.Error:
        return False  # gone meanwhile


def _below(pid: int) -> Iterator[int]:
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in listed.read_text(encoding="ascii").split()]
        except OSError:
            continue  # gone meanwhile
        for child in children:
            if child == FIRST.pid:
                continue
            if child not in SERVERS:
                yield child
            yield from _below(child)
