"""Does the controller choose well where hidden rows take links longer than they take machines?

As in `benchmarks.control.pipe`, with rows of 8 and 16 KiB (4,096 and 8,192 values of two bytes; the demo pair's own
have 768 bytes), slower machines, and rates from a fibre's to an old telephone line's. Also a client's first text where
nobody measured the machines' links, which routing then takes for 100 Mbit/s.

    python -m benchmarks wide_rows --record
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import tyro

from benchmarks.control.pipe import replay_with_draft, whole_target
from benchmarks.control.replay import all_cells, one_core
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.chain import Costs
from benchmarks.simulation.profiles import FIRST_SEED
from benchmarks.simulation.recorded import generate_texts, prompts_of
from client.control.goodput import Goodput
from client.control.policy import FixedPolicy
from client.library.jobs import MAX_NODES
from swarm.protocol.messages import Sampling
from swarm.routing.costs import DEFAULT_LINK_MBIT_PER_S, RouteForecast
from swarm.runtime.cli import make_console

LARGE, MEDIUM = 16_384, 8_192
NETWORKS = {
    "1 ms, 1 Gbit/s": Costs(1, 1_000, 40, 0.05, 8, row_bytes=LARGE),
    "20 ms, 100 Mbit/s": Costs(20, 100, 40, 0.05, 8, row_bytes=LARGE),
    "40 ms, 20 Mbit/s": Costs(40, 20, 40, 0.05, 8, row_bytes=LARGE),
    "300 ms, 50 Mbit/s": Costs(300, 50, 20, 0.1, 6, row_bytes=MEDIUM),
    "30 ms, 2 Mbit/s": Costs(30, 2, 20, 0.1, 6, row_bytes=MEDIUM),
    "10 ms, 0.5 Mbit/s": Costs(10, 0.5, 20, 0.1, 6, row_bytes=MEDIUM),
    "10 ms, 100 Mbit/s, slow machines": Costs(10, 100, 150, 20, 10, row_bytes=MEDIUM),
}
FIXED = ((4, 1), (16, 1), (64, 1), (4, 8), (16, 8))
"""Trees of so many nodes, so many in flight."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure large models."""

    prompts: int = 4
    """Passages."""
    new_tokens: int = 64
    """New tokens of each text."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Of sampling; 0 is greedy."""
    networks: tuple[str, ...] = tuple(NETWORKS)
    """Which networks."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell. Speeds are tokens per virtual second.

    Attributes:
        first: The mean of first texts, each by a new client, by what routing forecasts.
    """

    name: tuple[str, float]
    plain: float
    fixed: dict[str, float]
    chosen: float
    nodes: float
    first: dict[str, float]

    @property
    def best(self) -> str:
        return max(self.fixed, key=self.fixed.__getitem__)


def assumed(costs: Costs) -> RouteForecast:
    """What routing forecasts for links that nobody measured."""
    return replace(costs, mbit=DEFAULT_LINK_MBIT_PER_S).forecast()


def measure(name: tuple[str, float], options: Options) -> Cell:
    """All methods of one cell."""
    network, temperature = name
    costs, given = NETWORKS[network], prompts_of("passages", options.prompts)
    samplings = [Sampling(FIRST_SEED + place, temperature) for place in range(len(given))]
    texts = generate_texts(whole_target(), given, samplings, options.new_tokens)
    replayed = partial(replay_with_draft, costs=costs)
    fixed = {
        f"{size} × {count}": replayed(texts, policy=FixedPolicy(size, count)).tokens_per_s for size, count in FIXED
    }
    chosen = replayed(texts, policy=Goodput(MAX_NODES))
    first = {
        word: sum(replayed([text], policy=Goodput(MAX_NODES), forecast=forecast).tokens_per_s for text in texts)
        / len(texts)
        for word, forecast in (("true", Costs.forecast), ("assumed", assumed))
    }
    plain = replayed(texts, policy=FixedPolicy(0)).tokens_per_s
    return Cell(name, plain, fixed, chosen.tokens_per_s, chosen.nodes, first)


def sheet(cells: list[Cell], options: Options) -> Sheet:
    made = Sheet(
        "wide_rows",
        "Tokens per virtual second where rows are those of large models",
        (
            *("network", "row, KiB", "hop, ms", "T", "plain", "best fixed", "its K × in flight", "chosen", "median K"),
            *("of plain", "of best fixed", "first texts, of plain", "… links unmeasured"),
        ),
    )
    for cell in cells:
        (network, temperature), best = cell.name, cell.fixed[cell.best]
        costs = NETWORKS[network]
        made.rows.append(
            (
                *(network, f"{costs.row_bytes // 1024}", f"{costs.forward_ms:g} + {costs.row_ms:g} K"),
                *(f"{temperature:g}", f"{cell.plain:.2f}", f"{best:.2f}", cell.best, f"{cell.chosen:.2f}"),
                *(f"{cell.nodes:g}", f"{cell.chosen / cell.plain:.2f}", f"{cell.chosen / best:.2f}"),
                *(f"{cell.first[word] / cell.plain:.2f}" for word in ("true", "assumed")),
            )
        )
    made.notes.append(
        f"{options.prompts} passages, {options.new_tokens} new tokens each, three hops, the demo pair's own guesses. "
        "First texts: each by a client that knows nothing yet, and once more where the links' rate was taken for "
        f"{DEFAULT_LINK_MBIT_PER_S:g} Mbit/s."
    )
    made.measured = {
        "cells": [
            {"cell": list(cell.name), "plain": cell.plain, "fixed": cell.fixed, "chosen": cell.chosen}
            | {"nodes": cell.nodes, "first": cell.first}
            for cell in cells
        ]
    }
    return made


def main() -> None:
    options = tyro.cli(Options)
    one_core()
    console = make_console()
    names = [(network, temperature) for network in options.networks for temperature in options.temperatures]
    cells = all_cells([partial(measure, name, options) for name in names], console)
    sheet(cells, options).finish(console, options)
