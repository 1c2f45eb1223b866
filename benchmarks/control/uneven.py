"""How fast is a chain with one slow or busy machine?

As in `benchmarks.control.pipe`, in virtual time. One machine of three takes six times as long as each of the others, or
four other sweeps wait there before each of ours. Beside what is chosen: a controller that takes all hops for alike.

    python -m benchmarks uneven --record
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import tyro

from benchmarks.control.pipe import replay_with_draft, whole_target
from benchmarks.control.replay import OneAtATime, all_cells, one_core
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.chain import Costs
from benchmarks.simulation.profiles import FIRST_SEED, PROFILES
from benchmarks.simulation.recorded import generate_texts, prompts_of
from client.control.goodput import Goodput
from client.control.policy import FixedPolicy
from client.library.jobs import MAX_NODES
from client.stats import SweepMeasurement
from swarm.protocol.messages import HopTime, Sampling
from swarm.routing.costs import RouteForecast
from swarm.runtime.cli import make_console

EVEN, IDLE = (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)
CHAINS = {
    "all alike": (EVEN, IDLE),
    "the first 6 × slower": ((6.0, 1.0, 1.0), IDLE),
    "the last 6 × slower": ((1.0, 1.0, 6.0), IDLE),
    "4 others at the last": (EVEN, (0.0, 0.0, 4.0)),
}
"""How many times as long each machine's forwards take, and who waits there."""
FIXED = ((32, 1), (64, 1), (16, 3), (16, 8))
"""Trees of so many nodes, so many in flight."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure chains of machines that are not alike."""

    prompts: int = 6
    """How many prompts."""
    new_tokens: int = 64
    """New tokens of each text."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Of sampling; 0 is greedy."""
    kinds: tuple[str, ...] = ("passages",)
    """Kinds of text."""
    networks: tuple[str, ...] = ("10 ms, 200 Mbit/s", "50 ms, 20 Mbit/s")
    """Which networks."""
    chains: tuple[str, ...] = tuple(CHAINS)
    """Which chains, by name."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell. Speeds are tokens per virtual second.

    Attributes:
        name: Network, kind of text, chain, temperature.
        alone: One sweep at a time, as the controller chooses.
        alike: What a controller chooses that takes all hops for alike.
    """

    name: tuple[str, str, str, float]
    plain: float
    fixed: dict[str, float]
    alone: float
    alike: float
    chosen: float

    @property
    def best(self) -> str:
        return max(self.fixed, key=self.fixed.__getitem__)


class UniformHops(Goodput):
    """A controller that takes all hops for alike."""

    def expect(self, route: Hashable, forecast: RouteForecast) -> None:
        """Of a forecast, keep what holds for all hops."""
        super().expect(route, replace(forecast, bottleneck_share=0.0))

    def observe_sweep(self, route: Hashable, spent: SweepMeasurement) -> None:
        super().observe_sweep(route, _evened(spent))


def _evened(sweep: SweepMeasurement) -> SweepMeasurement:
    """As if every hop had waited and computed as long as the others."""
    count = max(len(sweep.hops), 1)
    hop = HopTime(sweep.waited_ms / count, sweep.computed_ms / count, 0.0, 0.0)
    return replace(sweep, hops=tuple(replace(hop, link_ms=real.link_ms) for real in sweep.hops))


def measure(name: tuple[str, str, str, float], options: Options) -> Cell:
    """All methods of one cell."""
    network, kind, chain, temperature = name
    paces, others = CHAINS[chain]
    costs, given = replace(PROFILES[network], paces=paces, others=others), prompts_of(kind, options.prompts)
    samplings = [Sampling(FIRST_SEED + place, temperature) for place in range(len(given))]
    texts = generate_texts(whole_target(), given, samplings, options.new_tokens)
    replayed = partial(replay_with_draft, texts, costs)
    return Cell(
        name,
        replayed(FixedPolicy(0)).tokens_per_s,
        {f"{size} × {count}": replayed(FixedPolicy(size, count)).tokens_per_s for size, count in FIXED},
        replayed(OneAtATime(MAX_NODES)).tokens_per_s,
        replayed(UniformHops(MAX_NODES)).tokens_per_s,
        replayed(Goodput(MAX_NODES)).tokens_per_s,
    )


def sheet(cells: list[Cell], options: Options) -> Sheet:
    made = Sheet(
        "uneven",
        "Tokens per virtual second where machines are not alike",
        (
            *("network, text", "machines", "T", "plain", "best fixed", "its K × in flight", "one, chosen"),
            *("as if alike", "chosen", "of plain", "of best fixed", "of as if alike"),
        ),
    )
    for cell in cells:
        (network, kind, chain, temperature), best = cell.name, cell.fixed[cell.best]
        made.rows.append(
            (
                *(f"{network}, {kind}", chain, f"{temperature:g}", f"{cell.plain:.1f}", f"{best:.1f}", cell.best),
                *(f"{cell.alone:.1f}", f"{cell.alike:.1f}", f"{cell.chosen:.1f}", f"{cell.chosen / cell.plain:.2f}"),
                *(f"{cell.chosen / best:.2f}", f"{cell.chosen / cell.alike:.2f}"),
            )
        )
    made.notes.append(
        f"{options.prompts} prompts of {options.new_tokens} new tokens each, one client per cell. A hop takes "
        f"{Costs(0, 1).forward_ms:g} ms + {Costs(0, 1).row_ms:g} per node, times so much as is said. Others do not "
        "change what they do; where there are some, what is chosen leaves them room, which fixed choices do not. As if "
        "alike: a controller that knows of all hops together only."
    )
    made.measured = {
        "cells": [
            {"cell": list(cell.name), "plain": cell.plain, "fixed": cell.fixed, "alone": cell.alone}
            | {"alike": cell.alike, "chosen": cell.chosen}
            for cell in cells
        ]
    }
    return made


def main() -> None:
    options = tyro.cli(Options)
    one_core()
    console = make_console()
    names = product(options.networks, options.kinds, options.chains, options.temperatures)
    cells = all_cells([partial(measure, name, options) for name in names], console)
    sheet(cells, options).finish(console, options)
