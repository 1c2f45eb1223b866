"""How much do learned acceptance probabilities gain over a fixed prior?

The demo pair, in one process and without a network. The protocol is that of `benchmarks.simulation.acceptance`; both
sides decode the same prompts with the same seeds, and every text is compared with plain decoding's. The calibration
learns on the passages between those that are measured, with other seeds and 16 tree nodes, and is then frozen. `--cold`
measures a first use instead: nothing is known, and it learns while it is measured.

    python -m benchmarks calibration --json calibration.json

predicted  1 + the sum of a tree's probabilities, averaged over sweeps: what the drafter expected
error      expected calibration error of the tree nodes' probabilities: |predicted − realised| per tenth, by nodes
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from statistics import mean

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.acceptance import FIRST_SEED, Run, Size, demo_prompts, generate
from client.draft.drafter import ModelDrafter, NoDrafter
from client.draft.search.calibration import AcceptanceModel, Calibration, Candidates, SoftmaxPrior
from swarm.base.cli import make_console
from swarm.compute.ragged_batch import RaggedModel, load_whole
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Sampling

LESSON_SEED = 1_011
LESSON_NODES = 16
RESAMPLES = 10_000
TENTHS = 10


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure what learned acceptance probabilities gain over the fixed prior."""

    prompts: int = 24
    """How many of the 24 prompts, and how many others to learn from."""
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    """Of sampling; 0 is greedy."""
    nodes: tuple[int, ...] = (4, 16, 64)
    """Tree nodes below the pending token."""
    new_tokens: int = 48
    """New tokens of each text."""
    threads: int = 1
    """Threads of torch."""
    cold: bool = False
    """Learn while measuring, from nothing, instead of before."""


@dataclass(frozen=True, slots=True)
class Side:
    """One kind of acceptance probabilities in one cell.

    Attributes:
        acceptance: Tokens per sweep.
        error: Expected calibration error of the tree nodes' probabilities.
        tenths: (predicted, realised, nodes) of each tenth that holds nodes.
    """

    acceptance: float
    predicted: float
    error: float
    tenths: tuple[tuple[float, float, int], ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """Both sides of one cell.

    Attributes:
        gain: The mean paired difference in acceptance length.
        interval: Its 95 % bootstrap interval.
        same_text: Texts that are plain decoding's, of both sides.
    """

    temperature: float
    nodes: int
    prior: Side
    learned: Side
    gain: float
    interval: tuple[float, float]
    same_text: int
    texts: int


class Frozen:
    """A calibration that has learned enough."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration

    def acceptance_probs(self, candidates: Candidates) -> NDArray[np.float64]:
        return self._calibration.acceptance_probs(candidates)

    def learn(self, candidates: Candidates, hits: NDArray[np.bool_]) -> None:
        """No more."""


@dataclass(frozen=True, slots=True)
class PairRunner:
    options: Options
    console: Console
    target: RaggedModel
    draft: RaggedModel

    def runs(
        self, cases: list[tuple[list[int], Sampling]], nodes: int, model: AcceptanceModel, about: str
    ) -> list[Run]:
        drafter = ModelDrafter(
            self.draft, self.target.vocab_size, self.draft.max_positions or 2048, acceptance_model=model
        )
        size = Size(self.options.new_tokens, nodes)
        return [generate(self.target, drafter, *case, size) for case in track(cases, about, console=self.console)]

    def cases(self, first: int, seed: int, temperature: float) -> list[tuple[list[int], Sampling]]:
        """Every second passage from `first` on, each with a seed of its own."""
        prompts = demo_prompts(self.options.prompts, first)
        return [(prompt, Sampling(seed + place, temperature)) for place, prompt in enumerate(prompts)]

    def measure(self) -> list[Cell]:
        cells: list[Cell] = []
        for temperature in self.options.temperatures:
            learned = Calibration()
            if not self.options.cold:
                lessons = self.cases(1, LESSON_SEED, temperature)
                self.runs(lessons, LESSON_NODES, learned, f"temperature {temperature}, learning")
            cases = self.cases(0, FIRST_SEED, temperature)
            size = Size(self.options.new_tokens, 0)
            plain = [generate(self.target, NoDrafter(), *case, size).tokens for case in cases]
            for nodes in self.options.nodes:
                about = f"temperature {temperature}, K = {nodes}"
                before = self.runs(cases, nodes, SoftmaxPrior(), f"{about}, prior")
                probabilities = Calibration() if self.options.cold else Frozen(learned)
                after = self.runs(cases, nodes, probabilities, f"{about}, learned")
                same = sum(
                    run.tokens == text for side in (before, after) for run, text in zip(side, plain, strict=True)
                )
                cells.append(_cell(temperature, nodes, (before, after), same))
        return cells


def _cell(temperature: float, nodes: int, sides: tuple[list[Run], list[Run]], same_text: int) -> Cell:
    before, after = (np.array([run.emitted / run.sweeps for run in side]) for side in sides)
    gains = after - before
    rng = np.random.default_rng(0)
    means = gains[rng.integers(len(gains), size=(RESAMPLES, len(gains)))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975)).tolist()
    texts = 2 * len(gains)
    return Cell(
        temperature, nodes, _side(sides[0]), _side(sides[1]), gains.mean().item(), (low, high), same_text, texts
    )


def _side(runs: list[Run]) -> Side:
    guesses = np.array([guess for run in runs for guess in run.guesses], np.float64)
    tenth_of = np.minimum((guesses[:, 0] * TENTHS).astype(int), TENTHS - 1)
    groups = [guesses[tenth_of == tenth] for tenth in range(TENTHS)]
    tenths = tuple((*group.mean(axis=0).tolist(), len(group)) for group in groups if len(group))
    error = sum(nodes * abs(predicted - realised) for predicted, realised, nodes in tenths) / len(guesses)
    predicted = 1 + guesses[:, 0].sum().item() / sum(run.sweeps for run in runs)
    return Side(mean(run.emitted / run.sweeps for run in runs), predicted, error, tenths)


def sheet(cells: list[Cell]) -> Sheet:
    made = Sheet(
        "calibration",
        "Acceptance length of the demo pair, in one process: fixed prior and learned probabilities",
        (
            *("T", "K", "prior", "learned", "gain (95 %)", "expected: prior", "expected: learned"),
            *("error: prior", "error: learned", "same text"),
        ),
        measured={"cells": [dataclasses.asdict(cell) for cell in cells]},
    )
    for cell in cells:
        sides = (cell.prior, cell.learned)
        made.rows.append(
            (
                *(f"{cell.temperature:g}", f"{cell.nodes}", *(f"{side.acceptance:.2f}" for side in sides)),
                f"{cell.gain:+.2f} ({cell.interval[0]:+.2f} … {cell.interval[1]:+.2f})",
                *(f"{side.predicted:.2f}" for side in sides),
                *(f"{side.error:.3f}" for side in sides),
                f"{cell.same_text} of {cell.texts}",
            )
        )
    return made


def main() -> None:
    """Measure, print, and fail if any text differs from plain decoding's."""
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads)
    console = make_console()
    bench = PairRunner(options, console, load_whole(TARGET, torch.float32), load_whole(DRAFT, torch.float32))
    cells = bench.measure()
    sheet(cells).finish(console, options)
    if any(cell.same_text < cell.texts for cell in cells):
        sys.exit("calibration: a text differs from plain decoding's")
