"""Programs under watch: the memory of those that live on, and the processes that outlive those that died.

A program is its first process and all descendants: a node's part in the DHT and that part's daemon are two of them.
Memory is anonymous memory, which no file backs and nobody shares: what was allocated and touched. Linux only.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import linear_regression

import psutil

MB = 1e6


def slope_per_min(samples: Sequence[tuple[float, float]]) -> float:
    """How fast the values of some `(seconds, value)` pairs grow, by least squares; 0 of a single moment."""
    if len({at_s for at_s, _ in samples}) < 2:
        return 0.0
    return 60 * linear_regression(*zip(*samples, strict=True)).slope


def anonymous_mb(processes: Iterable[psutil.Process]) -> float:
    """Anonymous memory of all of them together.

    Raises:
        OSError: one has ended.
    """
    total = 0
    for process in processes:
        found = re.search(
            r"^Anonymous:\s+(\d+) kB", Path(f"/proc/{process.pid}/smaps_rollup").read_text(), re.MULTILINE
        )
        if found is None:
            raise ProcessLookupError(f"process {process.pid} has no memory any more")
        total += int(found[1]) * 1024
    return total / MB


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; one that only waits to be reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class ProcessMonitor:
    """Looks at programs now and then; each has a name of its own in each of its lives."""

    def __init__(self) -> None:
        self.memory: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._seen: dict[str, set[psutil.Process]] = defaultdict(set)

    def look(self, programs: Mapping[str, int], at_s: float) -> None:
        """Note the memory and the processes of some programs, given by their first process."""
        for name, pid in programs.items():
            try:
                root = psutil.Process(pid)
                members = [root, *root.children(recursive=True)]
                self._seen[name] |= set(members)
                self.memory[name].append((at_s, anonymous_mb(members)))
            except (psutil.NoSuchProcess, OSError):
                continue  # it ended meanwhile

    def left_over(self, over: Iterable[str]) -> list[str]:
        """The processes that still run of programs that are over."""
        return [
            f"{name}: {process.pid} {process.name()}"
            for name in over
            for process in sorted(self._seen[name], key=lambda one: one.pid)
            if is_alive(process)
        ]
