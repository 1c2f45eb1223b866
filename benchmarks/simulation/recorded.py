"""Texts that the demo target made, with the trees that the demo draft would have grown at each of their tokens.

Recorded once by running both models in this process; what a client would have done over any network is then a matter of
arithmetic (`benchmarks.control.replay`), because the target's picks do not depend on how its text is made.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.simulation.acceptance import Size, generate
from client.draft.drafter import MAX_LEVELS, ModelDrafter, NoDrafter, expansions
from client.draft.search.calibration import Calibration
from client.draft.search.tree import NO_LIMIT, DraftTree, StopRule
from client.draft.sources.lookup import Lookup, ProposalLesson
from swarm.compute.ragged_batch import RaggedModel
from swarm.demo import PASSAGES, TARGET
from swarm.protocol.messages import Sampling

PROMPTS = Path(__file__).parents[1] / "prompts"
KINDS = {"passages": PASSAGES, "repetitive": PROMPTS / "repetitive.jsonl", "code-like": PROMPTS / "code.jsonl"}
PROMPT_TOKENS = 96
TREE = 1024
"""Nodes of the recorded trees: a smaller one is a part of it."""


@dataclass(frozen=True, slots=True)
class RecordedText:
    """One text and its trees.

    Attributes:
        tokens: The prompt and what followed it.
        trees: The draft's tree at each length of the text, below the root's next token.
        looked_up: The nodes of those trees that need no model.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    sampling: Sampling
    trees: dict[int, DraftTree]
    looked_up: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelPair:
    """What texts are recorded with.

    Attributes:
        draft: The model that drafts. It has learned already.
    """

    target: RaggedModel
    draft: RaggedModel
    new_tokens: int


def prompts_of(kind: str, count: int) -> list[list[int]]:
    """The first prompts of a kind, cut to `PROMPT_TOKENS`."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    lines = KINDS[kind].read_text(encoding="utf-8").splitlines()[:count]
    return [tokenizer.encode(json.loads(line)["text"]).ids[:PROMPT_TOKENS] for line in lines]


def record_trees(
    pair: ModelPair, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], nodes: int = TREE
) -> list[RecordedText]:
    """Make texts, and grow a tree of `nodes` at each of their tokens.

    One client's: it knows nothing before the first text, and learns every pick of the target once, as one that has one
    sweep on its way at a time.
    """
    drafter = ModelDrafter(
        pair.draft, pair.target.vocab_size, pair.draft.max_positions or 2048, Calibration(), Lookup()
    )
    made: list[RecordedText] = []
    for written in generate_texts(pair.target, prompts, samplings, pair.new_tokens):
        text, prompt = written.tokens, written.prompt
        trees, without_model, due = {}, {}, len(prompt)
        for length in range(len(prompt), len(text)):
            tree = drafter.grow(text[:length], nodes, MAX_LEVELS, written.sampling)
            trees[length] = replace(tree, lessons=())
            without_model[length] = looked_up(tree)
            if length == due:
                picks = picks_of(tree, text, length)
                drafter.learn(tree, picks)
                due += len(picks)
        made.append(replace(written, trees=trees, looked_up=without_model))
    return made


def generate_texts(
    target: RaggedModel, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], new_tokens: int
) -> list[RecordedText]:
    made: list[RecordedText] = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        plain = generate(target, NoDrafter(), list(prompt), sampling, Size(new_tokens, 0))
        made.append(RecordedText(tuple(prompt), (*prompt, *plain.tokens), sampling, {}))
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


def _at_once(_rows: int) -> None:
    """A pass takes no time."""


class RecordedSearch:
    """What a draft knows of a recorded tree after so many passes of its model: a search that may go on.

    Candidates of the look-up are there at once, and so is what an earlier search found below the same text. A pass
    expands the best nodes whose children might be among the best.
    """

    def __init__(
        self,
        tree: DraftTree,
        looked_up: Sequence[int],
        expanded: AbstractSet[tuple[int, ...]],
        passing: Callable[[int], None] = _at_once,
    ) -> None:
        """Begin at the root.

        Args:
            looked_up: Its nodes that need no model.
            expanded: What an earlier search expanded, as tokens below the root; the root itself is ().
            passing: Called at each pass, with its rows.
        """
        self._tree = tree
        self._paths: list[tuple[int, ...]] = []
        self._children: dict[int | None, list[int]] = {}
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            self._paths.append((token,) if parent is None else (*self._paths[parent], token))
            self._children.setdefault(parent, []).append(node)
        self._known = {*looked_up, *self._children.get(None, ())}
        self._free = {node for node, path in enumerate(self._paths) if path in expanded}
        self._expanded: set[int] = set()
        self.rows: list[int] = []
        self._passing = passing
        if () not in expanded:
            self._pass(1)

    @property
    def passes(self) -> int:
        """Of the model, so far."""
        return len(self.rows)

    def below(self, tokens: tuple[int, ...]) -> set[tuple[int, ...]]:
        """What it or an earlier one expanded behind these tokens below its root, which are left out."""
        paths = (self._paths[node] for node in self._expanded | self._free)
        return {path[len(tokens) :] for path in paths if path[: len(tokens)] == tokens}

    def go_on(self, nodes: int, depth: int, stop_rule: StopRule = NO_LIMIT) -> DraftTree:
        """The tree of these limits, after as many further passes as are worth it now."""
        probabilities, past = self._tree.acceptance_probs, 0
        while True:
            best = self._best(nodes, depth, stop_rule.min_probability)
            waiting = [node for node in best if node not in self._expanded and len(self._paths[node]) < depth]
            chosen = waiting[: expansions(nodes)]
            if free := [node for node in chosen if node in self._free]:
                self._expand(free)
                continue
            promise = sum(probabilities[node] for node in chosen)
            is_settled = not chosen
            if is_settled or not stop_rule.per_round <= promise < stop_rule.per_sweep or not stop_rule.go_on(past):
                return self._cut(best, is_settled=is_settled)
            self._expand(chosen)
            self._pass(len(chosen))
            past += 1

    def _pass(self, rows: int) -> None:
        self.rows.append(rows)
        self._passing(rows)

    def _expand(self, nodes: Sequence[int]) -> None:
        self._expanded.update(nodes)
        self._known.update(child for node in nodes for child in self._children.get(node, ()))

    def _best(self, nodes: int, depth: int, least: float) -> list[int]:
        """Recorded trees are sorted: best first."""
        known = sorted(self._known)
        able = (
            node for node in known if len(self._paths[node]) <= depth and self._tree.acceptance_probs[node] >= least
        )
        return list(itertools.islice(able, nodes))

    def _cut(self, kept: list[int], *, is_settled: bool) -> DraftTree:
        tree = self._tree
        place: dict[int | None, int] = {node: index for index, node in enumerate(kept)}
        return DraftTree(
            tuple(tree.tokens[node] for node in kept),
            tuple(place.get(tree.parents[node]) for node in kept),
            tuple(tree.acceptance_probs[node] for node in kept),
            self.passes,
            is_settled,
        )


def looked_up(tree: DraftTree) -> tuple[int, ...]:
    """The nodes of a tree that its look-up proposed, all of whose ancestors it proposed too."""
    found: list[int] = []
    lesson = next((lesson for lesson in tree.lessons if isinstance(lesson, ProposalLesson)), None)
    seen = {} if lesson is None else lesson.proposals((None, *range(len(tree))))
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        is_own = parent is None or parent in found
        if is_own and any(token == proposed for proposed, _ in seen.get(parent, ())):
            found.append(node)
    return tuple(found)
