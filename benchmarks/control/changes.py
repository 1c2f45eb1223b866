"""How fast is a client after its network changed, beside one that never knew another network?

As in `benchmarks.control.pipe`, the real decode loop and controller run in virtual time, and draft and target run
themselves. Half of the texts go over one network, the others over another. A second client sends all texts over the
second network.

    python -m benchmarks changes --record
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import harmonic_mean

import tyro
from transformers import AutoTokenizer

from benchmarks.control.pipe import whole_target
from benchmarks.control.replay import ReplaySetup, all_cells, one_core, replay_texts
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.chain import Costs, VirtualDrafter
from benchmarks.simulation.profiles import FIRST_SEED
from benchmarks.simulation.recorded import RecordedText, generate_texts, prompts_of
from client.control.goodput import Goodput
from client.drafting.drafter import TreeDrafter
from client.drafting.loading import load_drafter
from client.library.jobs import MAX_NODES
from client.options import DraftOptions
from client.target import load_target
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Sampling
from swarm.runtime.cli import make_console

CHANGES = {
    "25 → 40 ms": (Costs(25, 100), Costs(40, 100)),
    "25 → 32 ms": (Costs(25, 100), Costs(32, 100)),
    "40 → 25 ms": (Costs(40, 100), Costs(25, 100)),
    "5 → 12 ms": (Costs(5, 100), Costs(12, 100)),
    "100 → 20 Mbit/s": (Costs(25, 100), Costs(25, 20)),
}
SOON = 3
"""Texts that come first after a change."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure what is left of a client's speed when the network changes."""

    prompts: int = 12
    """Passages; half of them before the change."""
    new_tokens: int = 64
    """New tokens of each text."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Of sampling; 0 is greedy."""
    changes: tuple[str, ...] = tuple(CHANGES)
    """Which changes, by name."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One change. Speeds are tokens per virtual second of each text after it.

    Attributes:
        changed: Speeds of the client whose network changed.
        settled: Speeds of the client that had the second network from the beginning.
    """

    name: str
    temperature: float
    changed: tuple[float, ...]
    settled: tuple[float, ...]

    def part(self, first: int, last: int | None = None) -> float:
        """What the first client has of the second one's speed, over some texts."""
        return harmonic_mean(self.changed[first:last]) / harmonic_mean(self.settled[first:last])


def speeds_of(texts: Sequence[RecordedText], networks: Sequence[Costs]) -> list[float]:
    """Each text's speed, all by one client, over each network in turn; routing forecasts the first one."""
    drafter = load_drafter(TARGET, load_target(TARGET), DraftOptions((DRAFT,), "cpu")).drafter
    assert isinstance(drafter, TreeDrafter)
    policy, tokenizer, speeds = Goodput(MAX_NODES), AutoTokenizer.from_pretrained(TARGET), list[float]()
    for place, text in enumerate(texts):
        costs = networks[place * len(networks) // len(texts)]
        setup = ReplaySetup(partial(VirtualDrafter, drafter, costs), whole_target())
        speeds.append(replay_texts([text], costs, policy, tokenizer, setup).tokens_per_s)
    return speeds


def measure(name: str, temperature: float, options: Options) -> Cell:
    before, after = CHANGES[name]
    given = prompts_of("passages", options.prompts)
    samplings = [Sampling(FIRST_SEED + place, temperature) for place in range(len(given))]
    texts = generate_texts(whole_target(), given, samplings, options.new_tokens)
    changed, settled = speeds_of(texts, (before, after)), speeds_of(texts, (after,))
    half = -(-len(texts) // 2)
    return Cell(name, temperature, tuple(changed[half:]), tuple(settled[half:]))


def sheet(cells: Sequence[Cell], options: Options) -> Sheet:
    made = Sheet(
        "changes",
        "Tokens per virtual second after a network changed, of a client that never knew another one",
        ("change", "T", "never another", f"of that, first {SOON} texts", "the others", "all"),
    )
    for cell in cells:
        parts = (cell.part(0, SOON), cell.part(SOON), cell.part(0))
        speed = f"{harmonic_mean(cell.settled):.1f}"
        made.rows.append((cell.name, f"{cell.temperature:g}", speed, *(f"{part:.2f}" for part in parts)))
    made.notes.append(
        f"One way, at 100 Mbit/s where nothing else is said; rates at 25 ms. {options.prompts} passages of "
        f"{options.new_tokens} new tokens, the second half after the change. Least: "
        f"{min(cell.part(0) for cell in cells):.2f}. Pings tell of another delay at once here; real ones within 8 of "
        "them, or with the next text."
    )
    made.measured = {
        "cells": [
            {"cell": [cell.name, cell.temperature], "changed": list(cell.changed), "settled": list(cell.settled)}
            for cell in cells
        ]
    }
    return made


def main() -> None:
    options = tyro.cli(Options)
    one_core()
    console = make_console()
    work = [partial(measure, *name, options) for name in product(options.changes, options.temperatures)]
    cells = all_cells(work, console)
    sheet(cells, options).finish(console, options)
