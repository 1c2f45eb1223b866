"""Texts that the demo target made, with the trees that the demo draft would have grown at each of their tokens.

Recorded once by running both models in this process; what a client would have done over any network is then a matter of
arithmetic (`benchmarks.replay`), because the target's picks do not depend on how its text is made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.acceptance import Size, generate
from client.draft import MAX_LEVELS, ModelDrafter, NoDrafter
from swarm.budget import EVERYTHING, Worth
from swarm.chance import Calibration
from swarm.demo import PASSAGES, TARGET
from swarm.lookup import Lookup
from swarm.messages import Sampling
from swarm.ragged import RaggedModel
from swarm.tree import DraftTree

PROMPTS = Path(__file__).parent / "prompts"
KINDS = {"passages": PASSAGES, "repetitive": PROMPTS / "repetitive.jsonl", "code-like": PROMPTS / "code.jsonl"}
PROMPT_TOKENS = 96
TREE = 128
"""Nodes of the recorded trees: a smaller one is the first part of it."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One text. tokens: prompt and what followed. trees: by the length of the text before their root's next token."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    sampling: Sampling
    trees: dict[int, DraftTree]


@dataclass(frozen=True, slots=True)
class Pair:
    """The models, a draft that has learned, and how many new tokens a text gets."""

    target: RaggedModel
    draft: RaggedModel
    new_tokens: int


def prompts_of(kind: str, count: int) -> list[list[int]]:
    """The first prompts of a kind, cut to `PROMPT_TOKENS`."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    lines = KINDS[kind].read_text(encoding="utf-8").splitlines()[:count]
    return [tokenizer.encode(json.loads(line)["text"]).ids[:PROMPT_TOKENS] for line in lines]


def record(pair: Pair, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[Recorded]:
    """Make texts, and grow a tree at each of their tokens, learning from what the target picked."""
    calibration, made = Calibration(), []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        plain = generate(pair.target, NoDrafter(), list(prompt), sampling, Size(pair.new_tokens, 0))
        text = (*prompt, *plain.tokens)
        window = pair.draft.max_positions or 2048
        drafter = ModelDrafter(pair.draft, pair.target.vocab_size, window, calibration, Lookup())
        trees = {}
        for length in range(len(prompt), len(text)):
            tree = drafter.grow(text[:length], TREE, MAX_LEVELS, sampling)
            trees[length] = tree
            drafter.learn(tree, picks_of(tree, text, length))
        made.append(Recorded(tuple(prompt), text, sampling, trees))
    return made


def picks_of(tree: DraftTree, text: Sequence[int], length: int) -> dict[int | None, int]:
    """What the target picked after those nodes of a tree that the text goes through."""
    picks: dict[int | None, int] = {None: text[length]} if length < len(text) else {}
    depths: dict[int | None, int] = {None: 0}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent in depths and length + depths[parent] < len(text) and text[length + depths[parent]] == token:
            depths[node] = depths[parent] + 1
            if length + depths[node] < len(text):
                picks[node] = text[length + depths[node]]
    return picks


def part_of(tree: DraftTree, nodes: int, depth: int, worth: Worth = EVERYTHING) -> tuple[DraftTree, int]:
    """The tree that a draft would have grown with these limits, and in how many passes of its model."""
    depths: list[int] = []
    kept: list[int] = []
    for node, parent in enumerate(tree.parents):
        depths.append(1 if parent is None else depths[parent] + 1)
        if len(kept) < nodes and depths[node] <= depth and tree.chances[node] >= worth.least:
            kept.append(node)
    passes = 1
    for level in range(1, max((depths[node] for node in kept), default=0)):
        if sum(tree.chances[node] for node in kept if depths[node] == level) < worth.per_round:
            kept = [node for node in kept if depths[node] <= level]
            break
        passes += 1
    place: dict[int | None, int] = {node: index for index, node in enumerate(kept)}
    cut = DraftTree(
        tuple(tree.tokens[node] for node in kept),
        tuple(place.get(tree.parents[node]) for node in kept),
        tuple(tree.chances[node] for node in kept),
        passes,
    )
    return cut, passes
