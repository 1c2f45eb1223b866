"""Drafters: grow a token tree under the pending token (docs/design/drafting.md). Never decides what is accepted.

What a tree is made of comes from sources (`client.drafting.search.source`): models, heads, look-up. They are asked
about the same frontier and their candidates merge: one child per token per parent. A model weighs what was said before
it; among sources that do not, the highest chance counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

import torch

from client.drafting.search.calibration import ChanceModel, SoftmaxPrior
from client.drafting.search.local_session import LocalSession
from client.drafting.search.ranking import Ranker
from client.drafting.search.source import Search, Source
from client.drafting.search.stopping import NO_LIMIT, StopRule
from client.drafting.search.tree import DraftTree, Picks, TokenTree
from client.drafting.sources.lookup import LookupSource
from client.drafting.sources.model import ModelSource
from client.drafting.sources.suffix_lookup import Lookup
from swarm.inference.ragged_batch import RaggedModel
from swarm.protocol.messages import Sampling

LEAST_EXPANSIONS = 16
MAX_LEVELS = 256
"""Most levels of a tree below its root; where a text repeats itself, so many tokens are on their way."""
NONE: Picks = MappingProxyType({})
"""No picks."""


class Drafter(Protocol):
    """Anything that guesses what comes next; a bad guess costs time, never text."""

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, stop_rule: StopRule = NO_LIMIT
    ) -> DraftTree:
        """The best tree of at most `nodes` nodes in `depth` levels below the last token of `sequence`.

        sequence: every certain token, prompt and emitted ones, the pending one last. stop_rule: where to stop before.
        """
        ...

    def learn(self, tree: DraftTree, picks: Picks, others: Picks = NONE) -> None:
        """Learn what the target picked after the nodes of a tree that `grow` made.

        picks: after nodes that the text went through, others: after the rest, where the target was led astray.

        Changes which trees grow later, never a text. Runs where `grow` does, not beside it.
        """
        ...


def expansions(nodes: int) -> int:
    """Frontier nodes that one round expands for a tree of so many nodes."""
    return max(LEAST_EXPANSIONS, nodes // 16)


class NoDrafter:
    """Plain decoding: no tree at all."""

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, stop_rule: StopRule = NO_LIMIT
    ) -> DraftTree:
        """An empty tree."""
        return DraftTree()

    def learn(self, tree: DraftTree, picks: Picks, others: Picks = NONE) -> None:
        """There is nothing to learn."""


class TreeDrafter:
    """Best-first trees from any sources."""

    def __init__(self, sources: Sequence[Source]) -> None:
        """A drafter that asks `sources`, each time in this order, those that weigh what others said after them."""
        self.sources = tuple(sorted(sources, key=lambda source: source.weighs))
        self._search: Search | None = None

    @property
    def wants_rows(self) -> bool:
        """Whether a source needs the target's hidden rows."""
        return any(source.wants_rows for source in self.sources)

    def observe(self, sequence: Sequence[int], rows: torch.Tensor) -> None:
        """Take the target's hidden rows [n, width] of the last n tokens of `sequence`; not while a tree grows."""
        for source in self.sources:
            source.observe(sequence, rows)

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, stop_rule: StopRule = NO_LIMIT
    ) -> DraftTree:
        """The best tree of at most `nodes` nodes in `depth` levels below the last token of `sequence`."""
        levels = min(depth, MAX_LEVELS)
        if nodes == 0 or levels <= 0:
            return DraftTree()
        search, self._search = self._search, None
        try:
            with torch.inference_mode():
                key = tuple(sequence), levels, sampling
                if search is None or search.key != key or self._is_stale(search, stop_rule):
                    tree = TokenTree(sequence[-1], nodes, levels, stop_rule.min_probability)
                    search = self._begin(Search(tuple(sequence), levels, sampling, tree))
                else:
                    search.tree.widen(nodes, stop_rule.min_probability)
                    for source in self.sources:
                        source.widen(search)
                is_settled = self._go_on(search, stop_rule)
        except BaseException:
            self.forget()
            raise
        is_dear = search.rounds or search.recalled
        self._search = search if is_dear else None  # what cost nothing is made afresh, by what was learned since
        return replace(self._settle(search), is_settled=is_settled)

    def forget(self) -> None:
        """Be as new, but for what was learned of whom to believe."""
        self._search = None
        for source in self.sources:
            source.forget()

    def learn(self, tree: DraftTree, picks: Picks, others: Picks = NONE) -> None:
        """Every source learns from what it proposed."""
        for lesson in tree.lessons:
            lesson.learn(picks, others)

    def _begin(self, search: Search) -> Search:
        """Everything that is proposed before there is a frontier."""
        search.tree.frontier(1)  # the root, whose children come now
        passed = [source.begin(search) for source in self.sources]
        self._remember(search)
        search.rounds = int(any(passed))
        search.is_early = any(source.wants_rows and not did for source, did in zip(self.sources, passed, strict=True))
        return search

    def _is_stale(self, search: Search, stop_rule: StopRule) -> bool:
        """Whether it would say other things if it began now, or what was left out is wanted after all."""
        return stop_rule.min_probability < search.tree.unwanted or any(source.is_stale() for source in self.sources)

    def _remember(self, search: Search) -> None:
        """Expand at once what takes no pass because every source that needs one has it from an earlier search."""
        tree = search.tree
        known = [nodes for source in self.sources if (nodes := source.remember(search)) is not None]
        shared = set(known[0]).intersection(*known[1:]) if known else set[int]()
        floor = tree.floor
        if chosen := [node for node in sorted(shared) if tree.chances[node] >= floor]:
            tree.take(chosen)
            for source in self.sources:
                source.expand(search, chosen)

    def _go_on(self, search: Search, stop_rule: StopRule) -> bool:
        """Expand the best nodes until the tree is settled, which it returns, or no further round is worth it now."""
        tree, passes = search.tree, 0
        while chosen := tree.frontier(expansions(tree.nodes)):
            if free := [node for node in chosen if all(source.is_free(search, node) for source in self.sources)]:
                tree.put_back(node for node in chosen if node not in free)
                chosen = free
            else:
                promise = sum(tree.chances[node] for node in chosen)
                if not stop_rule.per_round <= promise < stop_rule.per_sweep or not stop_rule.go_on(passes):
                    tree.put_back(chosen)
                    return False
            has_passed = self._round(search, chosen)
            passes, search.rounds = passes + has_passed, search.rounds + has_passed
        return True

    def _round(self, search: Search, nodes: Sequence[int]) -> bool:
        """Ask every source about nodes of the frontier; whether that took a model's pass."""
        passed = [source.expand(search, nodes) for source in self.sources]
        return any(passed)

    def _settle(self, search: Search) -> DraftTree:
        """The best tree, and what its sources will learn from."""
        chosen = search.tree.best_nodes(search.tree.nodes)
        places: dict[int | None, int] = {None: TokenTree.ROOT, **dict(enumerate(chosen))}
        lessons = [source.lesson(places) for source in self.sources]
        taught = tuple(lesson for lesson in lessons if lesson is not None)
        tree = search.tree.cut(chosen)
        is_early, has_read = search.is_early, search.has_read
        return replace(tree, rounds=search.rounds, lessons=taught, is_early=is_early, has_read=has_read)


class LookupDrafter(TreeDrafter):
    """Trees of what followed before in the text itself: a draft without a model."""

    def __init__(self, lookup: Lookup) -> None:
        super().__init__([LookupSource(lookup)])


class ModelDrafter(TreeDrafter):
    """Trees of one draft model, and of a look-up where there is one."""

    def __init__(
        self,
        model: RaggedModel,
        vocab_tokens: int,
        window_tokens: int,
        chances: ChanceModel | None = None,
        lookup: Lookup | None = None,
    ) -> None:
        """A drafter for sequences of up to `window_tokens`; see `ModelSource`."""
        ranker = Ranker(vocab_tokens, chances or SoftmaxPrior())
        self._model = ModelSource(model, vocab_tokens, window_tokens, ranker=ranker)
        super().__init__([self._model] if lookup is None else [LookupSource(lookup), self._model])

    @property
    def session(self) -> LocalSession:
        """The model's KV."""
        return self._model.session
