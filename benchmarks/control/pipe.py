"""How much faster are many sweeps in flight than one at a time, where the delay binds?

As in `benchmarks.control.replay`, but draft and target run themselves, and only time is virtual. What the target picks
behind dead branches depends on what was sent; it is known here as it is in a swarm. A client begins each cell with the
forecast of routing alone. Which node goes first depends on fractions of a millisecond, and a whole text depends on
that. So a cell is replayed several times, with slightly different delays and with other seeds.

    python -m benchmarks pipe --record
    python -m benchmarks pipe --measured benchmarks/results/cells.json     # with what things took on real nodes
    python -m benchmarks pipe --row-ms .01      # rows nearly free, as on a card
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import harmonic_mean, mean

import torch
import tyro
from transformers import AutoTokenizer

from benchmarks.control.replay import (
    DELAY_BOUND,
    OneAtATime,
    ReplayResult,
    ReplaySetup,
    all_cells,
    one_core,
    replay_texts,
)
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.chain import Costs, VirtualDrafter
from benchmarks.simulation.profiles import FIRST_SEED, PROFILES
from benchmarks.simulation.recorded import RecordedText, generate_texts, prompts_of
from client.base.options import DraftOptions
from client.base.target import load_target
from client.decode.goodput import Goodput
from client.decode.policy import FixedPolicy, SpeculationPolicy
from client.draft.drafter import TreeDrafter
from client.draft.loading import load_drafter
from client.library.jobs import MAX_NODES
from swarm.base.cli import make_console
from swarm.compute.ragged_batch import RaggedModel, load_whole
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Sampling
from swarm.routing.costs import RouteForecast

SIZES = (32, 64, 128)
SHIFTS_MS = (0.0, -0.1, 0.1, -0.2, 0.2)
"""By how much a replay's one-way delays differ from the network's, in turn."""
MEASURED_NETWORK = "25 ms, 100 Mbit/s"


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure the full pipe."""

    prompts: int = 12
    """Of each kind, as far as there are so many."""
    new_tokens: int = 96
    """New tokens of each text."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Of sampling; 0 is greedy."""
    kinds: tuple[str, ...] = ("passages", "repetitive")
    """Kinds of text."""
    networks: tuple[str, ...] = DELAY_BOUND
    """Which networks."""
    sizes: tuple[int, ...] = SIZES
    """Of fixed trees, one at a time."""
    replays: int = 3
    """Of each cell: their delays and seeds differ."""
    row_ms: float | None = None
    """What a row adds to a hop's forward, if not as much as in the replay."""
    measured: Path | None = None
    """Results of `benchmarks.control.cells`: forwards and drafting take what it saw at 25 ms, machine by machine."""


@dataclass(frozen=True, slots=True)
class MethodRuns:
    """One method in one cell: a number per replay.

    Attributes:
        tokens_per_s: Tokens per virtual second.
        nodes_per_token: Tree nodes sent per token.
    """

    tokens_per_s: tuple[float, ...]
    nodes_per_token: tuple[float, ...]

    @property
    def speed(self) -> float:
        """The speed of all replays together, which have equally many tokens."""
        return harmonic_mean(self.tokens_per_s)

    def over(self, other: MethodRuns) -> list[float]:
        """How many times as fast as another method, replay by replay."""
        return [one / that for one, that in zip(self.tokens_per_s, other.tokens_per_s, strict=True)]


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell.

    Attributes:
        fixed: One sweep at a time with trees of one size, by that size.
        chosen: One sweep at a time with trees that the controller chooses.
        pipe: What the controller chooses, with many sweeps in flight.
        without_siblings: The same without reuse of picks across branches, replayed once.
    """

    name: tuple[str, str, float]
    fixed: dict[int, MethodRuns]
    chosen: MethodRuns
    pipe: MethodRuns
    without_siblings: MethodRuns

    @property
    def best(self) -> int:
        """The size with which fixed trees are fastest."""
        return max(self.fixed, key=lambda size: self.fixed[size].speed)

    @property
    def of_best(self) -> float:
        """The speed of many sweeps in flight over that of the best fixed size."""
        return self.pipe.speed / self.fixed[self.best].speed

    @property
    def of_chosen(self) -> float:
        """The speed of many sweeps in flight over one at a time, both as the controller chooses."""
        return self.pipe.speed / self.chosen.speed


@cache
def whole_target() -> RaggedModel:
    """The target, loaded once in each process."""
    return load_whole(TARGET, torch.float32)


def replay_with_draft(
    texts: Sequence[RecordedText],
    costs: Costs,
    policy: SpeculationPolicy,
    *,
    siblings: bool = True,
    forecast: Callable[[Costs], RouteForecast | None] = Costs.forecast,
) -> ReplayResult:
    """Replay all texts through one client, with the usual drafter.

    siblings says whether picks of dead branches are reused; forecast is what routing says of the chain.
    """
    drafter = load_drafter(TARGET, load_target(TARGET), DraftOptions((DRAFT,), "cpu", siblings=siblings)).drafter
    assert isinstance(drafter, TreeDrafter)
    setup = ReplaySetup(partial(VirtualDrafter, drafter, costs), whole_target(), forecast)
    return replay_texts(texts, costs, policy, AutoTokenizer.from_pretrained(TARGET), setup)


def measure(name: tuple[str, str, float], options: Options) -> Cell:
    network, kind, temperature = name
    costs, given = PROFILES[network], prompts_of(kind, options.prompts)
    if options.measured is not None:
        costs = measured(options.measured, costs)
    if options.row_ms is not None:
        costs = replace(costs, row_ms=options.row_ms)
    ways: dict[object, list[ReplayResult]] = {}
    for turn, shift_ms in enumerate(SHIFTS_MS[: options.replays]):
        shifted, seed = replace(costs, delay_ms=costs.delay_ms + shift_ms), FIRST_SEED + turn * len(given)
        samplings = [Sampling(seed + place, temperature) for place in range(len(given))]
        texts = generate_texts(whole_target(), given, samplings, options.new_tokens)
        for size in options.sizes:
            ways.setdefault(size, []).append(replay_with_draft(texts, shifted, FixedPolicy(size)))
        ways.setdefault("chosen", []).append(replay_with_draft(texts, shifted, OneAtATime(MAX_NODES)))
        ways.setdefault("pipe", []).append(replay_with_draft(texts, shifted, Goodput(MAX_NODES)))
        if turn == 0:
            ways["deaf"] = [replay_with_draft(texts, shifted, Goodput(MAX_NODES), siblings=False)]
    found = {
        way: MethodRuns(tuple(one.tokens_per_s for one in replayed), tuple(one.nodes_per_token for one in replayed))
        for way, replayed in ways.items()
    }
    fixed = {size: found[size] for size in options.sizes}
    return Cell(name, fixed, found["chosen"], found["pipe"], found["deaf"])


def measured(results: Path, network: Costs) -> Costs:
    """What things took on real nodes, over another network; messages are part of its delays, cores are not shared."""
    cells = json.loads(results.read_text(encoding="utf-8"))["cells"]
    seen = next(cell["costs"] for cell in cells if cell["cell"][0] == MEASURED_NETWORK)
    own = {"cores": None, "handling_ms": 0.0, "handling_row_ms": 0.0, "other_ms": 0.0}
    return Costs(**{**seen, **own, "delay_ms": network.delay_ms, "mbit": network.mbit})


def sheet(cells: Sequence[Cell], options: Options) -> Sheet:
    made = Sheet(
        "pipe",
        "Tokens per virtual second: one sweep at a time at its best, and many in flight, with and without reuse",
        (
            *(
                "network, text",
                "T",
                "one at a time",
                "its K",
                "one, chosen",
                "many in flight",
                "many / one at its best K",
            ),
            *("single replays", "many / one, chosen", "nodes per token", "without reuse", "what it adds"),
        ),
    )
    for cell in cells:
        (network, kind, temperature), best = cell.name, cell.fixed[cell.best]
        single = cell.pipe.over(best)
        made.rows.append(
            (
                *(f"{network}, {kind}", f"{temperature:g}", f"{best.speed:.1f}", f"{cell.best}"),
                *(f"{cell.chosen.speed:.1f}", f"{cell.pipe.speed:.1f}", f"{cell.of_best:.2f}"),
                *(f"{min(single):.2f} … {max(single):.2f}", f"{cell.of_chosen:.2f}"),
                f"{mean(best.nodes_per_token):.0f} → {mean(cell.pipe.nodes_per_token):.0f}",
                *(
                    f"{cell.without_siblings.speed:.1f}",
                    f"{cell.pipe.tokens_per_s[0] / cell.without_siblings.speed - 1:+.0%}",
                ),
            )
        )
    made.notes.append(
        f"{'; '.join(_spread(kind, cells) for kind in options.kinds)}. Up to {options.prompts} prompts of "
        f"{options.new_tokens} new tokens each, costs {_costs(options)}. {options.replays} replays of each cell, whose "
        "delays differ by a tenth of a millisecond and their seeds by as many as there are prompts: speeds of all "
        "together, and what single ones gave. One at a time is at its best K, the fastest fixed tree of "
        f"{', '.join(map(str, options.sizes))} nodes, with reuse too; chosen: what the controller makes of it. Nodes "
        "per token: what those fixed trees send, and what many in flight send. Without reuse: the first replay alone."
    )
    made.measured = {
        "cells": [
            {
                "cell": list(cell.name),
                "pipe": cell.pipe.tokens_per_s,
                "without_siblings": cell.without_siblings.tokens_per_s,
            }
            | {"one_at_a_time": {"chosen": cell.chosen.tokens_per_s}}
            | {"fixed": {str(size): way.tokens_per_s for size, way in cell.fixed.items()}}
            for cell in cells
        ]
    }
    return made


def _spread(kind: str, cells: Sequence[Cell]) -> str:
    """What the pipe is worth on a kind of text."""
    found = [cell for cell in cells if cell.name[1] == kind]
    against = {"at its best K": [cell.of_best for cell in found], "chosen": [cell.of_chosen for cell in found]}
    said = (f"{min(all_):.2f} … {max(all_):.2f} (mean {mean(all_):.2f}) {way}" for way, all_ in against.items())
    return f"Many over one at a time, {kind}: {', '.join(said)}"


def _costs(options: Options) -> str:
    row = "as in the replay"
    if options.measured is not None:
        costs = measured(options.measured, PROFILES[MEASURED_NETWORK])
        row = (
            f"as on real nodes (`benchmarks.control.cells`): hop {costs.forward_ms:.1f} ms + {costs.row_ms:.2f} per "
            f"node, tree {costs.grow_ms:.1f} ms + {costs.pass_ms:.1f} per pass + {costs.pass_row_ms:.3f} per row of a "
            f"pass + {costs.node_ms:.4f} per node, {costs.turn_ms:.1f} until the loop has it, {costs.learn_ms:.1f} to "
            "learn from a reply"
        )
    return row if options.row_ms is None else f"{row}, but {options.row_ms:g} ms per row"


def main() -> None:
    options = tyro.cli(Options)
    if options.record and (options.measured is not None or options.row_ms is not None):
        sys.exit("pipe: only the replay's own costs are recorded")
    if not 1 <= options.replays <= len(SHIFTS_MS):
        sys.exit(f"pipe: 1 to {len(SHIFTS_MS)} replays")
    one_core()
    console = make_console()
    names = [
        (network, kind, temperature)
        for network in options.networks
        for kind in options.kinds
        for temperature in options.temperatures
    ]
    cells = all_cells([partial(measure, name, options) for name in reversed(names)], console)[::-1]  # the longest first
    sheet(cells, options).finish(console, options)
