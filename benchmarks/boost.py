"""Whether a boost-tuned pair of drafts accepts more than two copies that were trained alike (SpecInfer).

From the demo draft and text sampled from the demo target three drafts are trained, with as many steps each: one, a copy
of it in another order, and one on what the first misses. Pairs then draft in one tree, on passages that nobody trained
on: each with its first choice below every node, as SpecInfer merges them, or with its eight best, as Canopy does, where
a draft's own second choice competes with the other's first. Every text is compared with plain decoding's.

    python -m benchmarks.boost --record
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean

import torch
import tyro
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel

from benchmarks.acceptance import FIRST_SEED, Size, demo_prompts, generate
from benchmarks.sheet import Sheet
from client.boost import BoostTraining, score_together
from client.draft import NoDrafter, TreeDrafter
from client.ranking import CHILDREN, Ranker
from client.source import Search
from client.source_model import ModelSource
from client.target import load_target
from client.train_draft import DraftTraining
from client.train_head import Schedule
from client.train_samples import Amount, load_for_training, sampled_lines
from swarm.chance import Calibration
from swarm.demo import DRAFT, TARGET
from swarm.messages import Sampling
from swarm.quiet import quiet_libraries
from swarm.ragged import RaggedModel, load_whole

WINDOW = 2_048
PAIRS = {
    "demo draft": ("demo",),
    "one, trained on": ("first",),
    "two, trained alike": ("first", "alike"),
    "boost-tuned pair": ("first", "boosted"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """Measure boost-tuning."""

    steps: int = 300
    batch: int = 6
    rate: float = 1e-3
    lines: int = 1_792
    tokens: int = 128
    samples: Path | None = None
    """File of the sampled text, made if it is not there; default: made anew."""
    prompts: int = 12
    new_tokens: int = 48
    nodes: tuple[int, ...] = (4, 16, 64)
    """Tree nodes per sweep (K)."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    threads: int = 1
    record: bool = False
    """Write the table into BENCHMARKS.md and the measurements beside it."""
    json: Path | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """Mean acceptance length of one set of drafts."""

    drafts: str
    choices: int
    temperature: float
    nodes: int
    acceptance: float
    same_text: int
    texts: int


class FirstChoice(Ranker):
    """Proposes one candidate below each node; learns from as many as any other."""

    def add(self, search: Search, nodes: Sequence[int], logits: torch.Tensor) -> None:
        """The best candidate below each of some nodes."""
        ranked = self.rank(logits, [search.position(node) for node in nodes], search.sampling)
        for node, tokens, chances in zip(nodes, ranked.tokens.tolist(), ranked.chances.tolist(), strict=True):
            search.tree.add_children(node, [(tokens[0], chances[0])])
        self.note(nodes, ranked)


RANKERS: dict[int, type[Ranker]] = {1: FirstChoice, CHILDREN: Ranker}


@dataclass(frozen=True, slots=True)
class Together:
    """How often a set of drafts has the target's token on top, on held-out lines."""

    drafts: str
    greedy: float
    sampled: float


def train(options: Options, folder: Path, console: Console) -> tuple[list[Together], dict[str, Path]]:
    """Train the drafts; what each set knows, and the drafts' folders."""
    target = load_for_training(TARGET, "cpu")
    amount = Amount(options.lines, options.tokens, 1)
    with Progress(console=console) as bar:
        task = bar.add_task("sampling the target", total=options.lines)
        kept = options.samples or folder / "samples.safetensors"
        lines = sampled_lines(
            target, load_target(TARGET).tokenizer, amount, kept, lambda done: bar.update(task, completed=done)
        )

        def trained(name: str, seed: int, earlier: Sequence[PreTrainedModel] = ()) -> PreTrainedModel:
            task = bar.add_task(f"training {name}", total=options.steps)
            draft = load_for_training(DRAFT, "cpu")
            schedule = Schedule(options.steps, options.batch, options.rate, seed)
            what = draft, target, lines, schedule, folder / f"{name}.pt"
            training = BoostTraining(*what, earlier) if earlier else DraftTraining(*what)
            training.run(lambda done, _: bar.update(task, completed=done))
            draft.train(mode=False)
            draft.save_pretrained(folder / name)
            return draft

        drafts = {"demo": load_for_training(DRAFT, "cpu"), "first": trained("first", 1), "alike": trained("alike", 2)}
        drafts["boosted"] = trained("boosted", 2, [drafts["first"]])
    known = []
    for pair, names in PAIRS.items():
        score = score_together([drafts[name] for name in names], target, lines, 1)
        known.append(Together(pair, score.greedy, score.sampled))
    return known, {name: DRAFT if name == "demo" else folder / name for name in drafts}


def measure(options: Options, folders: dict[str, Path], console: Console) -> list[Cell]:
    """Acceptance lengths of all sets of drafts, temperatures and tree sizes."""
    target = load_whole(TARGET, torch.float32)
    models = {name: load_whole(folder, torch.float32) for name, folder in folders.items()}
    prompts, cells = demo_prompts(options.prompts), list[Cell]()
    with Progress(console=console) as bar:
        ways = list(product(PAIRS.items(), RANKERS.items(), options.nodes))
        task = bar.add_task("measuring", total=len(ways) * len(options.temperatures))
        for temperature in options.temperatures:
            cases = [(prompt, Sampling(FIRST_SEED + number, temperature)) for number, prompt in enumerate(prompts)]
            plain = [generate(target, NoDrafter(), *case, Size(options.new_tokens, 0)).tokens for case in cases]
            for (pair, names), (choices, ranker), nodes in ways:
                drafter = TreeDrafter([_source(models[name], ranker) for name in names])
                runs = [generate(target, drafter, *case, Size(options.new_tokens, nodes)) for case in cases]
                acceptance = mean(run.emitted / run.sweeps for run in runs)
                same = sum(run.tokens == text for run, text in zip(runs, plain, strict=True))
                cells.append(Cell(pair, choices, temperature, nodes, acceptance, same, len(runs)))
                bar.update(task, advance=1)
    return cells


def _source(model: RaggedModel, ranker: type[Ranker]) -> ModelSource:
    return ModelSource(model, model.vocab_size, WINDOW, ranker=ranker(model.vocab_size, Calibration()))


def sheet(known: Sequence[Together], cells: Sequence[Cell], options: Options) -> Sheet:
    """The table."""
    columns = [f"T={temperature:g}, K={nodes}" for temperature in options.temperatures for nodes in options.nodes]
    made = Sheet(
        "boost",
        f"Acceptance length on {options.prompts} passages; {options.steps} steps of {options.batch} × {options.tokens} "
        "sampled tokens for each draft",
        ("drafts", "choices", "on top, greedy", "on top, sampled", *columns),
        notes=[
            "Choices: candidates of each draft below a node. On top: the part of held-out sampled text where one of "
            "the drafts has the target's own token as its first choice, without noise and with noise that all know.",
            f"{sum(cell.same_text for cell in cells)} of {sum(cell.texts for cell in cells)} texts are those of plain "
            "decoding.",
        ],
        measured={"known": [asdict(one) for one in known], "cells": [asdict(cell) for cell in cells]},
    )
    found = {(cell.drafts, cell.choices, cell.temperature, cell.nodes): cell.acceptance for cell in cells}
    for choices, one in product(RANKERS, known):
        row = [found[one.drafts, choices, *where] for where in product(options.temperatures, options.nodes)]
        cells_of_row = [f"{acceptance:.2f}" for acceptance in row]
        made.rows.append((one.drafts, str(choices), f"{one.greedy:.3f}", f"{one.sampled:.3f}", *cells_of_row))
    return made


def main() -> None:
    """Train, measure, print."""
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads)
    quiet_libraries()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="canopy-boost-") as temporary:
        known, folders = train(options, Path(temporary), console)
        cells = measure(options, folders, console)
    sheet(known, cells, options).finish(console, record=options.record, path=options.json)


if __name__ == "__main__":
    main()
