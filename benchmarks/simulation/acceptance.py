"""How many tokens does one sweep of the demo pair emit?

In one process and without a network. The protocol: every second held-out passage, its first 96 tokens as the prompt, 48
new tokens, seeds 11, 12, …; fp32. Acceptance length = tokens emitted per sweep, the target's own last token included
and prefill left out, averaged over the prompts. Every text is compared with plain decoding's.

    python -m benchmarks acceptance --prompts 4 --nodes 16
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress
from statistics import mean

import torch
import tyro
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from benchmarks.sheet import Recording, Sheet
from client.decode.walk import WANT_ROWS, Walk, hand_over_rows
from client.draft.drafter import Drafter, ModelDrafter, NoDrafter, TreeDrafter
from client.draft.search.tree import DraftTree
from client.draft.sources.model import LocalSession
from node.session.tail import AcceptedPath, requested_rows
from swarm.base.cli import make_console
from swarm.base.ids import TreeNodeId
from swarm.compute.ragged_batch import RaggedModel, load_whole
from swarm.compute.row_codec import encode_rows, lossless_codec
from swarm.compute.sampling import pick
from swarm.demo import DRAFT, PASSAGES, TARGET
from swarm.protocol.messages import Reply, Sampling, Sweep
from swarm.protocol.session import Limits

PROMPT_TOKENS = 96
FIRST_SEED = 11
LEVELS = 16
REFERENCE = {
    (0.0, 4): 2.10, (0.0, 16): 2.85, (0.0, 64): 3.64,
    (0.6, 4): 2.56, (0.6, 16): 3.57, (0.6, 64): 4.77,
    (1.0, 4): 2.39, (1.0, 16): 3.32, (1.0, 64): 4.29,
}  # fmt: skip
"""What an offline prototype measured by the same protocol with another noise generator."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure the acceptance length of the demo pair."""

    prompts: int = 24
    """How many of the 24 prompts."""
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    """Of sampling; 0 is greedy."""
    nodes: tuple[int, ...] = (4, 16, 64)
    """Tree nodes below the pending token."""
    new_tokens: int = 48
    """New tokens of each text."""
    threads: int = 1
    """Threads of torch."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table.

    Attributes:
        nodes: Tree nodes per sweep (K).
        acceptance: Mean acceptance length over the prompts.
        reference: What the prototype measured, if it measured this cell.
        same_text: Prompts whose text is plain decoding's.
    """

    temperature: float
    nodes: int
    acceptance: float
    reference: float | None
    same_text: int
    prompts: int


@dataclass(frozen=True, slots=True)
class Size:
    """How much to generate.

    Attributes:
        nodes: Tree nodes per sweep (K).
    """

    new_tokens: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Run:
    """One generation.

    Attributes:
        tokens: The new tokens.
        guesses: Of every tree node: its acceptance probability, and whether it was accepted.
    """

    tokens: tuple[int, ...]
    emitted: int
    sweeps: int
    guesses: tuple[tuple[float, bool], ...]


def demo_prompts(count: int, first: int = 0, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """The first tokens of every second passage, from the first or the second one on."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    lines = PASSAGES.read_text(encoding="utf-8").splitlines()[first::2][:count]
    return [tokenizer.encode(json.loads(line)["text"]).ids[:tokens] for line in lines]


def answer(session: LocalSession, sweep: Sweep) -> Reply:
    """The tail's reply to a sweep, from a target that is whole."""
    hidden = session.run(sweep)
    state = session.state
    wanted = [node for node in state.live if node >= sweep.picks_from]
    logits = session.model.logits(hidden[len(sweep.tokens) - len(wanted) :])
    picks = pick(logits, [state.live[node].position + 1 for node in wanted], state.sampling)
    reply = Reply(sweep.sequence, sweep.generation, tuple(zip(wanted, picks, strict=True)))
    accepted_path = AcceptedPath()
    accepted_path.note(dict(reply.picks), state, is_cut=True)
    row_ids = (*map(TreeNodeId, sweep.prompt_nodes), *requested_rows(sweep, accepted_path.walk(state, sweep)))
    if not row_ids:
        return reply
    rows = hidden[[node - sweep.first_id for node in row_ids]]
    return dataclasses.replace(reply, row_ids=row_ids, rows=encode_rows(rows, lossless_codec(rows.dtype)))


def generate(target: RaggedModel, drafter: Drafter, prompt: list[int], sampling: Sampling, size: Size) -> Run:
    window = len(prompt) + size.new_tokens + size.nodes + LEVELS
    limits = Limits(target.vocab_size, window, sweeps=1, nodes=len(prompt) + size.nodes + 1)
    walk, session = Walk(limits, sampling), LocalSession(target, limits)
    observe = drafter.observe if isinstance(drafter, TreeDrafter) and drafter.wants_rows else None
    rows = drafter.prompt_rows if isinstance(drafter, TreeDrafter) else 0
    if observe is None or not rows:
        tokens = prompt + walk.accept(answer(session, walk.prefill(prompt, last=True)))
    else:
        tokens = list(prompt)
        walk.restart(prompt, sampling)
        reply = answer(session, walk.prefill(prompt[:-1], last=False, rows=rows))
        walk.accept(reply)
        hand_over_rows(reply, walk, tokens, observe)
    walk.want = WANT_ROWS if observe is not None else None
    first, sweeps = len(tokens), 0
    guesses: list[tuple[float, bool]] = []
    while len(tokens) < len(prompt) + size.new_tokens:
        tree = drafter.grow(tokens, size.nodes, LEVELS, sampling)
        reply = answer(session, walk.extend(tree))
        tokens += walk.accept(reply)
        if observe is not None:
            hand_over_rows(reply, walk, tokens, observe)
        picks = dict(zip((None, *range(len(tree))), (token for _, token in reply.picks), strict=True))
        hits = accepted(tree, picks)
        guesses += zip(tree.acceptance_probs, hits, strict=True)
        passed = {None, *compress(range(len(tree)), hits)}
        others = {node: pick for node, pick in picks.items() if node not in passed}
        drafter.learn(tree, {node: picks[node] for node in passed}, others)
        sweeps += 1
    return Run(tuple(tokens[len(prompt) :][: size.new_tokens]), len(tokens) - first, sweeps, tuple(guesses))


def accepted(tree: DraftTree, picks: Mapping[int | None, int]) -> list[bool]:
    """Whether each tree node lies on the path of the picks; the key None is the root's pick."""
    certain: set[int | None] = {None}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent in certain and picks[parent] == token:
            certain.add(node)
    return [node in certain for node in range(len(tree))]


def measure(options: Options, console: Console) -> list[Cell]:
    target, draft = load_whole(TARGET, torch.float32), load_whole(DRAFT, torch.float32)
    drafter = ModelDrafter(draft, target.vocab_size, draft.max_positions or 2048)
    prompts = demo_prompts(options.prompts)
    cells: list[Cell] = []
    for temperature in options.temperatures:
        samplings = [Sampling(seed=FIRST_SEED + number, temperature=temperature) for number in range(len(prompts))]
        cases = list(zip(prompts, samplings, strict=True))
        plain = [generate(target, NoDrafter(), *case, Size(options.new_tokens, 0)).tokens for case in cases]
        for nodes in options.nodes:
            size = Size(options.new_tokens, nodes)
            about = f"temperature {temperature}, K = {nodes}"
            runs = [generate(target, drafter, *case, size) for case in track(cases, about, console=console)]
            same = sum(run.tokens == text for run, text in zip(runs, plain, strict=True))
            acceptance = mean(run.emitted / run.sweeps for run in runs)
            cells.append(Cell(temperature, nodes, acceptance, REFERENCE.get((temperature, nodes)), same, len(runs)))
    return cells


def sheet(cells: list[Cell]) -> Sheet:
    made = Sheet(
        "acceptance",
        "Acceptance length of the demo pair with fixed acceptance probabilities, in one process",
        ("temperature", "K", "acceptance length", "reference", "same text"),
        measured={"cells": [dataclasses.asdict(cell) for cell in cells]},
    )
    for cell in cells:
        reference = f"{cell.reference:.2f}" if cell.reference is not None else ""
        same = f"{cell.same_text} of {cell.prompts}"
        made.rows.append((str(cell.temperature), str(cell.nodes), f"{cell.acceptance:.2f}", reference, same))
    return made


def main() -> None:
    """Measure, print, and fail if any text differs from plain decoding's."""
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads)
    console = make_console()
    cells = measure(options, console)
    sheet(cells).finish(console, options)
    if any(cell.same_text < cell.prompts for cell in cells):
        sys.exit("acceptance: a text differs from plain decoding's")
