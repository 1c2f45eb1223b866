"""Drafters: grow a token tree under the pending token (docs/design/drafting.md). Never decides what is accepted.

Sources propose the nodes (`client.draft.search.source`): models, heads, look-up. They are asked about the same
frontier and their candidates merge: one child per token per parent. A model weighs what earlier sources propose; among
sources that do not weigh, the highest probability counts.

Lends drafters: one per running generation, since a drafter's KV, look-up and cache are those of one text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

import torch

from client.draft.search.calibration import AcceptanceModel, SoftmaxPrior
from client.draft.search.ranking import Ranker
from client.draft.search.source import Passes, Search, Source, alone
from client.draft.search.tree import NO_LIMIT, DraftTree, Picks, StopRule, TokenTree
from client.draft.sources.lookup import Lookup, LookupSource
from client.draft.sources.model import LocalSession, ModelSource
from swarm.compute.ragged_batch import RaggedModel
from swarm.protocol.messages import Sampling

MIN_EXPANSIONS = 16
"""Frontier nodes that one round expands, at least."""
MAX_LEVELS = 256
"""Levels of a tree below its root, at most; a text that repeats itself may fill them all."""
NO_PICKS: Picks = MappingProxyType({})


class Drafter(Protocol):
    """Anything that guesses what comes next; a bad guess costs time, never text."""

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, stop_rule: StopRule = NO_LIMIT
    ) -> DraftTree:
        """The best tree of at most `nodes` nodes in `depth` levels below the last token of `sequence`.

        Args:
            sequence: every certain token, prompt and emitted ones, the pending one last.
            nodes: at most.
            depth: levels, at most.
            sampling: how the target picks.
            stop_rule: when to stop before the tree is settled.
        """
        ...

    def learn(self, tree: DraftTree, picks: Picks, others: Picks = NO_PICKS) -> None:
        """Learn what the target picked after the nodes of a tree that `grow` made.

        Changes which trees grow later, never a text. Runs on the thread of `grow`, not beside it.

        Args:
            tree: as `grow` returned it.
            picks: after nodes that the text went through.
            others: after nodes on branches that the text left.
        """
        ...


def expansions(nodes: int) -> int:
    """Frontier nodes that one round expands for a tree of so many nodes."""
    return max(MIN_EXPANSIONS, nodes // 16)


def aux_layers_of(drafter: Drafter) -> tuple[int, ...]:
    """Layers of which a drafter needs what enters them."""
    return drafter.aux_layers if isinstance(drafter, TreeDrafter) else ()


class NoDrafter:
    """Plain decoding: no tree at all."""

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, stop_rule: StopRule = NO_LIMIT
    ) -> DraftTree:
        """An empty tree."""
        return DraftTree()

    def learn(self, tree: DraftTree, picks: Picks, others: Picks = NO_PICKS) -> None:
        """There is nothing to learn."""


class TreeDrafter:
    """Best-first trees from any sources."""

    def __init__(self, sources: Sequence[Source]) -> None:
        """Make a drafter that asks `sources` in this order, but those that weigh others' candidates last."""
        self.sources = tuple(sorted(sources, key=lambda source: source.weighs))
        self._search: Search | None = None

    @property
    def wants_rows(self) -> bool:
        """Whether a source needs the target's hidden rows."""
        return any(source.wants_rows for source in self.sources)

    @property
    def prompt_rows(self) -> int:
        """Of how many of a prompt's last tokens a source can use the rows."""
        return max((source.prompt_rows for source in self.sources), default=0)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of which a source needs what enters them, rising."""
        return tuple(sorted({layer for source in self.sources for layer in source.aux_layers}))

    def observe(self, sequence: Sequence[int], rows: torch.Tensor) -> None:
        """Take the target's hidden rows of the last n tokens of `sequence`; not while a tree grows.

        Args:
            sequence: certain tokens.
            rows: [n, (1 + k) · hidden_size], the last layer's and beside it those of the k `aux_layers`.
        """
        layers = self.aux_layers
        last, *aux = rows.chunk(1 + len(layers), dim=1)
        found = dict(zip(layers, aux, strict=True))
        for source in self.sources:
            wanted = [found[layer] for layer in source.aux_layers]
            source.observe(sequence, torch.cat(wanted, dim=1) if wanted else last)

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, stop_rule: StopRule = NO_LIMIT
    ) -> DraftTree:
        """The best tree of at most `nodes` nodes in `depth` levels below the last token of `sequence`."""
        with torch.inference_mode():
            return alone(self.growing(sequence, nodes, depth, sampling, stop_rule))

    def growing(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, stop_rule: StopRule = NO_LIMIT
    ) -> Passes[DraftTree]:
        """The same, pass by pass; in inference mode."""
        levels = min(depth, MAX_LEVELS)
        if nodes == 0 or levels <= 0:
            return DraftTree()
        search, self._search = self._search, None
        try:
            key = tuple(sequence), levels, sampling
            if search is None or search.key != key or self._is_stale(search, stop_rule):
                tree = TokenTree(sequence[-1], nodes, levels, stop_rule.min_probability)
                search = yield from self._begin(Search(tuple(sequence), levels, sampling, tree))
            else:
                search.tree.widen(nodes, stop_rule.min_probability)
                for source in self.sources:
                    source.widen(search)
            is_settled = yield from self._go_on(search, stop_rule)
        except BaseException:
            self.forget()
            raise
        is_worth_keeping = search.rounds or search.remembered
        self._search = search if is_worth_keeping else None  # a search without a pass begins anew, with what is learned
        return replace(self._settle(search), is_settled=is_settled)

    def forget(self) -> None:
        """Drop all state of texts; calibrations stay."""
        self._search = None
        for source in self.sources:
            source.forget()

    def learn(self, tree: DraftTree, picks: Picks, others: Picks = NO_PICKS) -> None:
        """Let every source learn from what it proposed."""
        for lesson in tree.lessons:
            lesson.learn(picks, others)

    def _begin(self, search: Search) -> Passes[Search]:
        """Add everything that is proposed before there is a frontier."""
        search.tree.frontier(1)  # the root, whose children come now
        passed: list[bool] = []
        for source in self.sources:
            has_passed = yield from source.beginning(search)
            passed.append(has_passed)
        yield from self._remember(search)
        search.rounds = int(any(passed))
        search.is_early = any(source.wants_rows and not did for source, did in zip(self.sources, passed, strict=True))
        return search

    def _is_stale(self, search: Search, stop_rule: StopRule) -> bool:
        """Whether a new search would propose other tokens, or the threshold fell below what this one left out."""
        return stop_rule.min_probability < search.tree.prune_below or any(source.is_stale() for source in self.sources)

    def _remember(self, search: Search) -> Passes[None]:
        """Expand at once the nodes that every source with a model expanded in an earlier search."""
        tree = search.tree
        known = [nodes for source in self.sources if (nodes := source.remember(search)) is not None]
        shared = set(known[0]).intersection(*known[1:]) if known else set[int]()
        floor = tree.floor
        if chosen := [node for node in sorted(shared) if tree.acceptance_probs[node] >= floor]:
            tree.take(chosen)
            for source in self.sources:
                yield from source.expanding(search, chosen)

    def _go_on(self, search: Search, stop_rule: StopRule) -> Passes[bool]:
        """Expand the best nodes until no further round pays. Returns whether the tree is settled."""
        tree, passes = search.tree, 0
        while chosen := tree.frontier(expansions(tree.max_nodes)):
            if free := [node for node in chosen if all(source.is_free(search, node) for source in self.sources)]:
                tree.put_back(node for node in chosen if node not in free)
                chosen = free
            else:
                expected_tokens = sum(tree.acceptance_probs[node] for node in chosen)
                if not stop_rule.per_round <= expected_tokens < stop_rule.per_sweep or not stop_rule.go_on(passes):
                    tree.put_back(chosen)
                    return False
            has_passed = yield from self._round(search, chosen)
            passes, search.rounds = passes + has_passed, search.rounds + has_passed
        return True

    def _round(self, search: Search, nodes: Sequence[int]) -> Passes[bool]:
        """Ask every source about nodes of the frontier. Returns whether a model ran."""
        has_passed = False
        for source in self.sources:
            has_passed |= yield from source.expanding(search, nodes)
        return has_passed

    def _settle(self, search: Search) -> DraftTree:
        """The best tree, and what its sources will learn from."""
        chosen = search.tree.best_nodes(search.tree.max_nodes)
        places: dict[int | None, int] = {None: TokenTree.ROOT, **dict(enumerate(chosen))}
        lessons = [source.lesson(places) for source in self.sources]
        taught = tuple(lesson for lesson in lessons if lesson is not None)
        tree = search.tree.subtree(chosen)
        is_early, has_read = search.is_early, search.has_read
        return replace(tree, rounds=search.rounds, lessons=taught, is_early=is_early, has_read=has_read)


class LookupDrafter(TreeDrafter):
    """Trees of what followed before in the text itself, without a model."""

    def __init__(self, lookup: Lookup) -> None:
        super().__init__([LookupSource(lookup)])


class ModelDrafter(TreeDrafter):
    """Trees of one draft model, and of a look-up where there is one."""

    def __init__(
        self,
        model: RaggedModel,
        vocab_tokens: int,
        window_tokens: int,
        acceptance_model: AcceptanceModel | None = None,
        lookup: Lookup | None = None,
    ) -> None:
        """Make a drafter.

        Args:
            model: as for `ModelSource`, like the next two.
            vocab_tokens: ids that draft and target share.
            window_tokens: tokens of the longest sequence.
            acceptance_model: from the draft's scores to probabilities; the fixed prior by default.
            lookup: None for none.
        """
        ranker = Ranker(vocab_tokens, acceptance_model or SoftmaxPrior())
        self._model = ModelSource(model, vocab_tokens, window_tokens, ranker=ranker)
        super().__init__([self._model] if lookup is None else [LookupSource(lookup), self._model])

    @property
    def session(self) -> LocalSession:
        """The model's KV."""
        return self._model.session


MAX_DRAFTERS = 16
"""Each has KV of its own; further generations decode plainly meanwhile."""


class Drafters:
    """A client's drafters, which share models and calibrations; made as they are needed.

    Attributes:
        first: the one that was loaded.
        all: those that were made so far.
    """

    def __init__(self, first: Drafter, make_another: Callable[[], Drafter] | None = None) -> None:
        """Start with one drafter; `make_another` makes more like it, without it all generations share the first."""
        self.first = first
        self.all = [first]
        self._make_another = make_another
        self._lent: set[int] = set()

    @contextmanager
    def lend(self) -> Iterator[Drafter]:
        """Lend one while a generation runs: the oldest that is free, or none when all are lent."""
        if self._make_another is None:
            yield self.first
            return
        place = next(number for number in range(MAX_DRAFTERS + 1) if number not in self._lent)
        if place == MAX_DRAFTERS:
            yield NoDrafter()
            return
        self._lent.add(place)
        try:
            if place == len(self.all):
                self.all.append(self._make_another())
            yield self.all[place]
        finally:
            self._lent.discard(place)
