"""Does a boost-tuned pair of drafts get more accepted than two drafts trained alike?

Drafts are trained from the demo draft and from text sampled from the demo target, with as many steps each: one draft;
copies of it with the text in other orders; and, in the same orders, drafts that learn what the first one misses
(SpecInfer). Pairs then draft in one tree, on passages that nobody trained on: with one candidate of each draft below a
node, as SpecInfer merges its drafts' sequences, and with eight, as Canopy's trees have. Every text is compared with
plain decoding's.

    python -m benchmarks boost --record
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
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

from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.acceptance import FIRST_SEED, Size, demo_prompts, generate
from client.drafting.drafter import NoDrafter, TreeDrafter
from client.drafting.search.calibration import Calibration
from client.drafting.search.ranking import Ranker
from client.drafting.sources.model import ModelSource
from client.target import load_target
from client.train.draft_model import BoostTraining, DraftTraining
from client.train.labels import ModelLabels
from client.train.samples import LocalSampler, SampleAmount, load_for_training, sampled_lines
from client.train.steps import Schedule
from swarm.demo import DRAFT, TARGET
from swarm.inference.ragged_batch import RaggedModel, load_whole
from swarm.protocol.messages import Sampling
from swarm.runtime.cli import make_console
from swarm.runtime.library_logging import quiet_libraries

WINDOW = 2_048


WAYS = {"one, trained on": None, "two, trained alike": "alike", "boost-tuned pair": "boosted"}
"""Of what kind the draft beside the first one is; there is one per seed."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The shape of trees.

    Attributes:
        candidates: Candidates of each draft below a node.
    """

    candidates: int
    nodes: int


SHAPES = (TreeShape(1, 8), TreeShape(1, 16), TreeShape(8, 16), TreeShape(8, 64))


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure boost-tuning."""

    steps: int = 300
    """Training steps of each draft."""
    batch: int = 8
    """Lines of a training step."""
    rate: float = 1e-3
    """Learning rate."""
    lines: int = 2_048
    """Lines sampled for training."""
    tokens: int = 128
    """Tokens of a line."""
    seeds: tuple[int, ...] = (2, 3)
    """Orders in which second drafts are trained."""
    samples: Path | None = None
    """File of the sampled text, made if it is not there; default: made anew."""
    prompts: int = 12
    """How many prompts."""
    new_tokens: int = 48
    """New tokens of each text."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Of sampling; 0 is greedy."""
    threads: int = 1
    """Threads of torch."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Mean acceptance length of one set of drafts.

    Attributes:
        seed: Of the second draft; None where there is one.
        acceptance: Tokens per sweep.
    """

    way: str
    seed: int | None
    temperature: float
    shape: TreeShape
    acceptance: float
    same_text: int
    texts: int


def train(options: Options, folder: Path, console: Console) -> dict[str, Path]:
    """Train the drafts; their folders."""
    target = load_for_training(TARGET, "cpu")
    amount = SampleAmount(options.lines, options.tokens, 1)
    with Progress(console=console) as bar:
        task = bar.add_task("sampling the target", total=options.lines)
        kept = options.samples or folder / "samples.safetensors"
        sampler = LocalSampler(target, load_target(TARGET).tokenizer)
        lines = sampled_lines(sampler, amount, kept, lambda done: bar.update(task, completed=done))
        labels = ModelLabels(target, lines, with_rows=False)

        def trained(name: str, seed: int, *earlier: PreTrainedModel) -> PreTrainedModel:
            task = bar.add_task(f"training {name}", total=options.steps)
            draft = load_for_training(DRAFT, "cpu")
            schedule = Schedule(options.steps, options.batch, options.rate, seed)
            what = draft, labels, schedule, folder / f"{name}.pt"
            training = BoostTraining(*what, earlier) if earlier else DraftTraining(*what)
            training.run(lambda done, _: bar.update(task, completed=done))
            draft.train(mode=False)
            draft.save_pretrained(folder / name)
            return draft

        first = trained("first", 1)
        for seed in options.seeds:
            trained(f"alike {seed}", seed)
            trained(f"boosted {seed}", seed, first)
    return {path.name: path for path in folder.iterdir() if path.is_dir()}


def measure(options: Options, folders: dict[str, Path], console: Console) -> list[Cell]:
    """Acceptance lengths of all sets of drafts, temperatures and tree sizes."""
    target = load_whole(TARGET, torch.float32)
    models = {name: load_whole(folder, torch.float32) for name, folder in folders.items()}
    prompts, cells = demo_prompts(options.prompts), list[Cell]()
    sets = [(name, seed) for name, second in WAYS.items() for seed in (options.seeds if second else (None,))]
    with Progress(console=console) as bar:
        task = bar.add_task("measuring", total=len(sets) * len(SHAPES) * len(options.temperatures))
        for temperature in options.temperatures:
            cases = [(prompt, Sampling(FIRST_SEED + number, temperature)) for number, prompt in enumerate(prompts)]
            plain = [generate(target, NoDrafter(), *case, Size(options.new_tokens, 0)).tokens for case in cases]
            for (name, seed), shape in product(sets, SHAPES):
                chosen = [models["first"], *([models[f"{WAYS[name]} {seed}"]] if WAYS[name] else [])]
                drafter = TreeDrafter([_source(model, shape.candidates) for model in chosen])
                runs = [generate(target, drafter, *case, Size(options.new_tokens, shape.nodes)) for case in cases]
                acceptance = mean(run.emitted / run.sweeps for run in runs)
                same = sum(run.tokens == text for run, text in zip(runs, plain, strict=True))
                cells.append(Cell(name, seed, temperature, shape, acceptance, same, len(runs)))
                bar.update(task, advance=1)
    return cells


def _source(model: RaggedModel, candidates: int) -> ModelSource:
    ranker = Ranker(model.vocab_size, Calibration(), max_children=candidates)
    return ModelSource(model, model.vocab_size, WINDOW, ranker=ranker)


def sheet(cells: Sequence[Cell], options: Options) -> Sheet:
    """The table: a line per set of drafts, the mean of its seeds."""
    places = list(product(options.temperatures, SHAPES))
    columns = (f"T={temperature:g}, {shape.candidates} each, K={shape.nodes}" for temperature, shape in places)
    made = Sheet(
        "boost",
        f"Acceptance length on {options.prompts} passages; {options.steps} steps of {options.batch} × {options.tokens} "
        f"sampled tokens for each draft, second drafts from {len(options.seeds)} seeds",
        ("drafts", *columns),
        notes=[
            f"{sum(cell.same_text for cell in cells)} of {sum(cell.texts for cell in cells)} texts are those of plain "
            "decoding.",
        ],
        measured={"cells": [asdict(cell) for cell in cells]},
    )
    found: dict[tuple[str, float, TreeShape], list[float]] = defaultdict(list)
    for cell in cells:
        found[cell.way, cell.temperature, cell.shape].append(cell.acceptance)
    for name in WAYS:
        made.rows.append((name, *(f"{mean(found[name, *place]):.2f}" for place in places)))
    *_, alike, boosted = WAYS
    for candidates in sorted({shape.candidates for shape in SHAPES}):
        some = [place for place in places if place[1].candidates == candidates]
        pairs = [pair for place in some for pair in zip(found[boosted, *place], found[alike, *place], strict=True)]
        gains = [ours / theirs - 1 for ours, theirs in pairs]
        made.notes.append(
            f"Boost-tuned against alike, candidates of each draft below a node: {candidates}: {mean(gains):+.1%} on "
            f"average, more in {sum(gain > 0 for gain in gains)} of {len(gains)} pairs."
        )
    return made


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads)
    quiet_libraries()
    console = make_console()
    with tempfile.TemporaryDirectory(prefix="canopy-boost-") as temporary:
        folders = train(options, Path(temporary), console)
        cells = measure(options, folders, console)
    sheet(cells, options).finish(console, options)
