"""How often can the last bits of fp32 change a picked token?

In one process, on the bundled demo pair. How a sum is rounded depends on the shape of a forward: a token alone and the
same token in a tree have logits that differ by some millionths. Where the two best scores lie closer than that, the
pick may fall either way. Held-out passages are run token by token and in sweeps of 33 rows; every position is picked
with several seeds.

    python -m benchmarks near_ties --record

A pick turns if its margin is less than what the noise takes from it. Margins are spread evenly near 0, so that happens
as often as half of the noise's mean times their density there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from statistics import mean, median

import torch
import tyro
from rich.progress import track
from tokenizers import Tokenizer

from benchmarks.sheet import Recording, Sheet
from client.draft.sources.model import LocalSession
from swarm.base.cli import make_console
from swarm.base.ids import TreeNodeId
from swarm.compute.ragged_batch import RaggedModel, load_whole
from swarm.compute.sampling import ranking_scores
from swarm.demo import PASSAGES, TARGET
from swarm.protocol.messages import Sampling
from swarm.protocol.session import Limits, Parent

SWEEP = 33
NEAR = 0.05
"""Margins below it show how densely they lie near 0."""
MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure near ties."""

    passages: int = 24
    """How many passages."""
    seeds: int = 8
    """Of each position at temperature 1."""
    threads: int = 1
    """Threads of torch."""


@dataclass(slots=True)
class Margins:
    """Of every pick: the margin between its two best scores.

    Attributes:
        alone: Token by token.
        in_sweeps: Between the same two tokens in sweeps.
    """

    alone: list[float] = field(default_factory=list)
    in_sweeps: list[float] = field(default_factory=list)

    @property
    def noise(self) -> list[float]:
        """By how much they differ."""
        return [abs(one - other) for one, other in zip(self.alone, self.in_sweeps, strict=True)]

    @property
    def near(self) -> float:
        """Share of margins near 0."""
        return mean(margin < NEAR for margin in self.alone)

    @property
    def turns(self) -> float:
        """Share of picks that should turn."""
        return mean(self.noise) / 2 * self.near / NEAR


def logits(target: RaggedModel, text: list[int], rows: int) -> torch.Tensor:
    """After every token of a text, run `rows` at a time: [n, vocabulary]."""
    session = LocalSession(target, Limits(target.vocab_size, len(text), 1, rows))
    last: Parent = None
    found: list[torch.Tensor] = []
    for start in range(0, len(text), rows):
        tokens, first = text[start : start + rows], session.state.next_id
        chain: list[Parent] = [None, *(TreeNodeId(first + place) for place in range(len(tokens) - 1))]
        found.append(target.logits(session.run(session.next(tokens, chain, commit_to=last))))
        last = TreeNodeId(first + len(tokens) - 1)
    return torch.cat(found)


def note(margins: Margins, one_by_one: torch.Tensor, in_sweeps: torch.Tensor, sampling: Sampling) -> None:
    positions = range(1, len(one_by_one) + 1)
    scores = ranking_scores(one_by_one, positions, sampling)
    others = ranking_scores(in_sweeps, positions, sampling)
    best = scores.topk(2)
    there = others.gather(1, best.indices)
    margins.alone += (best.values[:, 0] - best.values[:, 1]).tolist()
    margins.in_sweeps += (there[:, 0] - there[:, 1]).tolist()


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads)
    console = make_console()
    target, tokenizer = load_whole(TARGET, torch.float32), Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    lines = PASSAGES.read_text(encoding="utf-8").splitlines()[: options.passages]
    found = {0.0: Margins(), 1.0: Margins()}
    for line in track(lines, "passages", console=console):
        text = tokenizer.encode(json.loads(line)["text"]).ids
        one_by_one, in_sweeps = (logits(target, text, rows) for rows in (1, SWEEP))
        for temperature, margins in found.items():
            for seed in range(options.seeds if temperature else 1):
                note(margins, one_by_one, in_sweeps, Sampling(seed, temperature))
    made = Sheet(
        "near_ties",
        f"Demo target, fp32: token by token against sweeps of {SWEEP} rows",
        ("T", "picks", "median |Δmargin|", "most", f"margins below {NEAR:g}", "turned", "expected per million"),
    )
    for temperature, margins in found.items():
        turned = sum(margin < 0 for margin in margins.in_sweeps)
        noise = margins.noise
        made.rows.append(
            (
                *(f"{temperature:g}", f"{len(noise):,}", f"{median(noise):.1e}", f"{max(noise):.1e}"),
                *(f"{margins.near:.1%}", f"{turned}", f"{margins.turns * MILLION:.2f}"),
            )
        )
        made.measured[f"{temperature:g}"] = {
            "picks": len(noise),
            "mean_noise": mean(noise),
            "near": margins.near,
            "turns": margins.turns,
        }
    made.finish(console, options)
