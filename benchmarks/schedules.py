"""How often which fault was survived: `python -m benchmarks.schedules [--schedules N] [--first SEED]`.

Runs the repair rules' simulation (`tests/property/repair_world.py`) in two processes, prints a table by kind of fault
and every seed that failed. Pure code: no sockets, no clock.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import tyro
from rich.console import Console
from rich.table import Table

import swarm.hop_log
from swarm.errors import SwarmError
from tests.property.repair_world import World

BLOCK = 250


@dataclass(frozen=True, slots=True)
class Options:
    """What to run."""

    schedules: int = 10_000
    first: int = 0
    processes: int = 2


def run_block(seeds: range) -> tuple[Counter[str], list[tuple[int, str]]]:
    """What happened, and which schedules failed and why."""
    swarm.hop_log.REPLAY_NODES = 3
    seen: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    for seed in seeds:
        world = World(seed)
        try:
            world.run()
        except (AssertionError, SwarmError) as error:
            failed.append((seed, f"{type(error).__name__}: {error}"))
        seen += world.seen
    return seen, failed


def table_of(seen: Counter[str], schedules: int) -> Table:
    """Kinds by name."""
    table = Table("what happened", "times", "per schedule", title=f"{schedules:,} schedules")
    for kind, times in sorted(seen.items()):
        table.add_row(kind, f"{times:,}", f"{times / schedules:.2f}")
    return table


def main() -> None:
    """Run, print, and fail if a schedule did."""
    options, console = tyro.cli(Options), Console()
    last = options.first + options.schedules
    blocks = [range(start, min(start + BLOCK, last)) for start in range(options.first, last, BLOCK)]
    seen: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    started = time.monotonic()
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        for some, bad in pool.map(run_block, blocks):
            seen += some
            failed += bad
    console.print(table_of(seen, options.schedules))
    console.print(f"{len(failed)} failed, {time.monotonic() - started:.0f} s")
    for seed, reason in failed:
        console.print(f"seed {seed}: {reason}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
