"""Is a full pipe worth its nodes? Against one sweep at a time at its best, where the delay binds.

As `benchmarks.replay`, but draft and target run themselves, and only time is virtual: what the target picks behind dead
branches, which hangs on what was sent, is known here as it is in a swarm. A client begins each cell with nothing
but what routing promises.

    python -m benchmarks.pipe --record
    python -m benchmarks.pipe --measured benchmarks/results/cells.json     # with what things took on real nodes
    python -m benchmarks.pipe --row-ms .01      # rows nearly free, as on a card
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor as Pool
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.progress import track
from transformers import AutoTokenizer

from benchmarks.recorded import Recorded, prompts_of, write
from benchmarks.replay import DELAY_BOUND, FIRST_SEED, PROFILES, Cast, OneAtATime, Told, one_core, run
from benchmarks.sheet import Sheet
from benchmarks.virtual import Costs, VirtualDrafter
from client.draft import TreeDrafter
from client.drafts import Wanted, load_drafter
from client.jobs import MOST_NODES
from client.target import load_target
from swarm.budget import Budget, FixedBudget, Prospect
from swarm.demo import DRAFT, TARGET
from swarm.goodput import Goodput
from swarm.messages import Sampling
from swarm.ragged import RaggedModel, load_whole

SIZES = (8, 16, 32, 64, 128)
CHOSEN = "chosen"
MEASURED_NETWORK = "25 ms, 100 Mbit/s"


@dataclass(frozen=True, slots=True)
class Options:
    """Measure the full pipe."""

    prompts: int = 12
    """Of each kind, as far as there are so many."""
    new_tokens: int = 96
    temperatures: tuple[float, ...] = (0.0, 1.0)
    kinds: tuple[str, ...] = ("passages", "repetitive")
    networks: tuple[str, ...] = DELAY_BOUND
    sizes: tuple[int, ...] = SIZES
    """Of fixed trees, one at a time."""
    row_ms: float | None = None
    """What a row adds to a hop's forward, if not as much as in the replay."""
    measured: Path | None = None
    """Results of `benchmarks.cells`: forwards and drafting take what it saw at 25 ms, each machine by itself."""
    record: bool = False
    """Write the table into BENCHMARKS.md and the measurements beside it."""
    json: Path | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell. alone: one sweep at a time, by the size of its trees. pipe, deaf: full, and without siblings."""

    name: tuple[str, str, float]
    alone: dict[str, Told]
    pipe: Told
    deaf: Told

    @property
    def best(self) -> str:
        """The fastest way to send one sweep at a time."""
        return max(self.alone, key=lambda way: self.alone[way].tokens_per_s)

    @property
    def of_alone(self) -> float:
        """The full pipe's speed over that."""
        return self.pipe.tokens_per_s / self.alone[self.best].tokens_per_s


@cache
def whole_target() -> RaggedModel:
    """The target, loaded once in each process."""
    return load_whole(TARGET, torch.float32)


def tell(
    texts: Sequence[Recorded],
    costs: Costs,
    budget: Budget,
    *,
    siblings: bool = True,
    promise: Callable[[Costs], Prospect | None] = Costs.prospect,
) -> Told:
    """All texts through one client, whose drafter is the usual one, with or without what dead branches told.

    promise: what routing says of the chain.
    """
    drafter = load_drafter(TARGET, load_target(TARGET), Wanted((DRAFT,), "cpu", siblings=siblings)).drafter
    assert isinstance(drafter, TreeDrafter)
    cast = Cast(partial(VirtualDrafter, drafter, costs), whole_target(), promise)
    return run(texts, costs, budget, AutoTokenizer.from_pretrained(TARGET), cast)


def measure(name: tuple[str, str, float], options: Options) -> Cell:
    """All ways of one cell."""
    network, kind, temperature = name
    costs, given = PROFILES[network], prompts_of(kind, options.prompts)
    if options.measured is not None:
        costs = measured(options.measured, costs)
    if options.row_ms is not None:
        costs = replace(costs, row_ms=options.row_ms)
    samplings = [Sampling(FIRST_SEED + place, temperature) for place in range(len(given))]
    texts = write(whole_target(), given, samplings, options.new_tokens)
    alone = {f"{size}": tell(texts, costs, FixedBudget(size)) for size in options.sizes}
    alone[CHOSEN] = tell(texts, costs, OneAtATime(MOST_NODES))
    pipe, deaf = (tell(texts, costs, Goodput(MOST_NODES), siblings=siblings) for siblings in (True, False))
    return Cell(name, alone, pipe, deaf)


def measured(results: Path, network: Costs) -> Costs:
    """What things took on real nodes, over another network; messages are part of its delays, cores are not shared."""
    cells = json.loads(results.read_text(encoding="utf-8"))["cells"]
    seen = next(cell["costs"] for cell in cells if cell["cell"][0] == MEASURED_NETWORK)
    own = {"cores": None, "handling_ms": 0.0, "handling_row_ms": 0.0, "other_ms": 0.0}
    return Costs(**{**seen, **own, "delay_ms": network.delay_ms, "mbit": network.mbit})


def sheet(cells: Sequence[Cell], options: Options) -> Sheet:
    """The table."""
    made = Sheet(
        "pipe",
        "Tokens per virtual second: one sweep at a time at its best, and a full pipe, with and without siblings",
        (
            *("network, text", "T", "one at a time", "its K", "full pipe", "pipe / one at a time", "nodes per token"),
            *("without siblings", "what they add"),
        ),
    )
    for cell in cells:
        (network, kind, temperature), best = cell.name, cell.alone[cell.best]
        made.rows.append(
            (
                *(f"{network}, {kind}", f"{temperature:g}", f"{best.tokens_per_s:.1f}", cell.best),
                *(f"{cell.pipe.tokens_per_s:.1f}", f"{cell.of_alone:.2f}"),
                f"{best.nodes_per_token:.0f} → {cell.pipe.nodes_per_token:.0f}",
                *(f"{cell.deaf.tokens_per_s:.1f}", f"{cell.pipe.tokens_per_s / cell.deaf.tokens_per_s - 1:+.0%}"),
            )
        )
    spans = []
    row = "as in the replay"
    if options.measured is not None:
        costs = measured(options.measured, PROFILES[MEASURED_NETWORK])
        row = (
            f"as on real nodes (`benchmarks.cells`): hop {costs.forward_ms:.1f} ms + {costs.row_ms:.2f} per node, tree "
            f"{costs.grow_ms:.1f} ms + {costs.pass_ms:.1f} per pass + {costs.pass_row_ms:.3f} per row of a pass + "
            f"{costs.node_ms:.4f} per node, {costs.turn_ms:.1f} until the loop has it, {costs.learn_ms:.1f} to learn "
            "from a reply"
        )
    if options.row_ms is not None:
        row += f", but {options.row_ms:g} ms per row"
    for kind in options.kinds:
        found = [cell.of_alone for cell in cells if cell.name[1] == kind]
        spans.append(f"{kind} {min(found):.2f} … {max(found):.2f}")
    made.notes.append(
        f"Pipe over one at a time: {'; '.join(spans)}. Up to {options.prompts} prompts of {options.new_tokens} new "
        f"tokens each, costs {row}. One at a time is at its best: what goodput chooses or one of "
        f"{', '.join(map(str, options.sizes))} nodes, whichever is faster, with siblings too. Nodes per token: what "
        "that sends, and what the full pipe sends."
    )
    made.measured = {
        "cells": [
            {"cell": list(cell.name), "pipe": cell.pipe.tokens_per_s, "without_siblings": cell.deaf.tokens_per_s}
            | {"one_at_a_time": {way: told.tokens_per_s for way, told in cell.alone.items()}}
            for cell in cells
        ]
    }
    return made


def main() -> None:
    """Measure and print."""
    options = tyro.cli(Options)
    if options.record and (options.measured is not None or options.row_ms is not None):
        sys.exit("pipe: only the replay's own costs are recorded")
    one_core()
    console = Console(width=150)
    names = [
        (network, kind, temperature)
        for network in options.networks
        for kind in options.kinds
        for temperature in options.temperatures
    ]
    with Pool(os.cpu_count(), get_context("spawn"), one_core) as pool:
        work = [pool.submit(measure, name, options) for name in names]
        cells = [cell.result() for cell in track(work, "cells", console=console)]
    sheet(cells, options).finish(console, record=options.record, path=options.json)


if __name__ == "__main__":
    main()
