"""Does a chain's repair keep the text under random schedules of faults?

Runs the simulation of the repair rules (`benchmarks/simulation/repair_world.py`) in two processes. The table counts
events by kind; every seed that failed is printed. Pure code: no sockets, no clock.

    python -m benchmarks schedules --record
"""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import tyro

import swarm.protocol.hop_log
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.repair_world import World
from swarm.errors import SwarmError
from swarm.runtime.cli import make_console

BLOCK = 250


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """What to run."""

    schedules: int = 10_000
    """How many schedules."""
    first: int = 0
    """The first seed."""
    processes: int = 2
    """Processes that share the work."""


def run_block(seeds: range) -> tuple[Counter[str], list[tuple[int, str]]]:
    """What happened, and which schedules failed and why."""
    swarm.protocol.hop_log.REPLAY_NODES = 3
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


def sheet(seen: Counter[str], failed: list[tuple[int, str]], schedules: int) -> Sheet:
    made = Sheet(
        "schedules",
        f"{schedules:,} random schedules of one session, {len(failed)} with another text or without an end",
        ("what happened", "times", "per schedule"),
        measured={"schedules": schedules, "seen": dict(seen), "failed": failed},
    )
    made.rows = [(kind, f"{times:,}", f"{times / schedules:.2f}") for kind, times in sorted(seen.items())]
    return made


def main() -> None:
    """Run, print, and fail if a schedule did."""
    options, console = tyro.cli(Options), make_console()
    last = options.first + options.schedules
    blocks = [range(start, min(start + BLOCK, last)) for start in range(options.first, last, BLOCK)]
    seen: Counter[str] = Counter()
    failed: list[tuple[int, str]] = []
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        for some, bad in pool.map(run_block, blocks):
            seen += some
            failed += bad
    sheet(seen, failed, options.schedules).finish(console, options)
    for seed, reason in failed:
        console.print(f"seed {seed}: {reason}")
    sys.exit(bool(failed))
