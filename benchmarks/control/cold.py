"""How fast are first texts on machines that stall once for every new size of a sweep?

A stall takes a hop long, and happens once per size. A GPU that loads its kernels at first use, or plans its attention
anew for each shape, is such a machine. As in `benchmarks.control.pipe`, but every text is a new client's, over machines
that have only decoded plainly before.

    python -m benchmarks cold --record
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import harmonic_mean

import tyro

from benchmarks.control.pipe import replay_with_draft, whole_target
from benchmarks.control.replay import all_cells, one_core
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.profiles import FIRST_SEED, PROFILES
from benchmarks.simulation.recorded import generate_texts, prompts_of
from client.control.goodput import Goodput
from client.control.policy import FixedPolicy, SpeculationPolicy
from client.library.jobs import MAX_NODES
from swarm.protocol.messages import Sampling
from swarm.runtime.cli import make_console

FIXED = ((16, 1), (64, 1), (16, 8), (32, 16))
"""Trees of so many nodes, so many in flight."""
PLAIN, CHOSEN = "plain", "chosen"
METHODS: dict[str, Callable[[], SpeculationPolicy]] = {
    PLAIN: partial(FixedPolicy, 0),
    **{f"{size} × {count}": partial(FixedPolicy, size, count) for size, count in FIXED},
    CHOSEN: partial(Goodput, MAX_NODES),
}


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure first texts on machines that stall."""

    prompts: int = 6
    """How many prompts."""
    new_tokens: int = 64
    """New tokens of each text."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Of sampling; 0 is greedy."""
    networks: tuple[str, ...] = ("25 ms, 100 Mbit/s",)
    """Which networks."""
    stalls_ms: tuple[float, ...] = (0.0, 100.0, 300.0)
    """How long a stall takes."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell.

    Attributes:
        name: Network, temperature, and the stall in milliseconds.
        speeds: Tokens per virtual second of each text, by method.
    """

    name: tuple[str, float, float]
    speeds: dict[str, list[float]]

    def speed(self, way: str) -> float:
        return harmonic_mean(self.speeds[way])

    @property
    def best(self) -> str:
        return max((way for way in METHODS if way not in (PLAIN, CHOSEN)), key=self.speed)

    @property
    def least_of_plain(self) -> float:
        """The least that a single text has of plain decoding's speed."""
        return min(a / b for a, b in zip(self.speeds[CHOSEN], self.speeds[PLAIN], strict=True))


def measure(name: tuple[str, float, float], options: Options) -> Cell:
    """All methods of one cell."""
    network, temperature, stall_ms = name
    costs, given = replace(PROFILES[network], first_ms=stall_ms), prompts_of("passages", options.prompts)
    samplings = [Sampling(FIRST_SEED + place, temperature) for place in range(len(given))]
    texts = generate_texts(whole_target(), given, samplings, options.new_tokens)
    return Cell(
        name,
        {
            way: [replay_with_draft([text], costs, make()).tokens_per_s for text in texts]
            for way, make in METHODS.items()
        },
    )


def sheet(cells: list[Cell], options: Options) -> Sheet:
    made = Sheet(
        "cold",
        "Tokens per virtual second of first texts where each new size takes a hop long, once",
        (
            *("network", "T", "a stall, ms", "plain", "best fixed", "its K × in flight", "chosen", "of plain"),
            *("the least text's", "of best fixed"),
        ),
    )
    for cell in cells:
        (network, temperature, stall_ms), best, chosen = cell.name, cell.best, cell.speed(CHOSEN)
        made.rows.append(
            (
                *(network, f"{temperature:g}", f"{stall_ms:g}", f"{cell.speed(PLAIN):.1f}", f"{cell.speed(best):.1f}"),
                *(best, f"{chosen:.1f}", f"{chosen / cell.speed(PLAIN):.2f}", f"{cell.least_of_plain:.2f}"),
                f"{chosen / cell.speed(best):.2f}",
            )
        )
    made.notes.append(
        f"{options.prompts} passages of {options.new_tokens} new tokens, each a new client's. Sizes: powers of two of "
        "a sweep's rows, at each of three hops, all but one row. A fixed choice has few of them and stalls seldom; "
        "what is chosen has several."
    )
    made.measured = {"cells": [{"cell": list(cell.name), "speeds": cell.speeds} for cell in cells]}
    return made


def main() -> None:
    options = tyro.cli(Options)
    one_core()
    console = make_console()
    names = product(options.networks, options.temperatures, options.stalls_ms)
    cells = all_cells([partial(measure, name, options) for name in names], console)
    sheet(cells, options).finish(console, options)
