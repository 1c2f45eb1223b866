"""The cross-branch cache as a source: what the target picked behind dead branches, below every node of the tree."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from client.drafting.search.source import Places, Search, Source
from client.drafting.search.tree import Lesson, TokenTree
from client.drafting.sources.lesson import ProposalLesson
from client.drafting.sources.sibling_index import Context, CrossBranchCache, Proposal, context_at, next_context

MIN_PATH_PROBABILITY = 0.002
"""A candidate whose path is less likely is not proposed."""
SURE_PROBABILITY, MIN_SURE_PATH_PROBABILITY = 0.6, 0.05
"""A candidate this likely is expanded at once, while its path is not less likely than that: no round per level."""
STALE_GROWTH = 1.125
"""A search is stale when the cache holds so many times the picks that the search began with."""


class SiblingSource(Source):
    """Proposes below every node of the tree, before a model weighs the candidates; learns from every verified node."""

    def __init__(self, cache: CrossBranchCache) -> None:
        self._cache = cache
        self._proposals: dict[int, Proposal] = {}
        self._tree: TokenTree | None = None
        self._contexts: dict[int, Context] = {}
        self._picks = 0

    def begin(self, search: Search) -> bool:
        """Add what was picked at the next position."""
        self._proposals, self._tree = {}, search.tree
        self._contexts = {TokenTree.ROOT: context_at(search.sequence, len(search.sequence))}
        self._cache.follow(search.sequence, search.sampling)
        self._picks = self._cache.picks
        self.expand(search, [TokenTree.ROOT])
        return False

    def is_stale(self) -> bool:
        """Whether many picks came since: sweeps on branches that died are answered while the next tree grows."""
        return self._cache.picks > self._picks * STALE_GROWTH

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        """Add what was picked at the positions after these nodes, and on below candidates that are likely enough."""
        tree = search.tree
        waiting = [(-tree.acceptance_probs[node], node) for node in nodes]
        heapq.heapify(waiting)
        max_tokens = len(tree.tokens) + tree.max_nodes
        while waiting:
            _, node = heapq.heappop(waiting)
            if node in self._proposals or tree.depths[node] >= tree.levels:
                continue
            context = _context_of(tree, self._contexts, node)
            self._proposals[node], candidates = self._cache.propose(context, search.sampling.temperature)
            threshold = MIN_PATH_PROBABILITY / max(tree.acceptance_probs[node], MIN_PATH_PROBABILITY)
            tree.add_children(node, [(token, prob) for token, prob in candidates if prob >= threshold])
            for token, prob in candidates:
                is_sure = prob >= SURE_PROBABILITY and tree.acceptance_probs[node] * prob >= MIN_SURE_PATH_PROBABILITY
                if is_sure and len(tree.tokens) < max_tokens:
                    child = tree.child(node, token)
                    heapq.heappush(waiting, (-tree.acceptance_probs[child], child))
        return False

    def lesson(self, places: Places) -> Lesson | None:
        """The pick after any node is a lesson, whether or not anything was proposed there."""
        tree, proposals, contexts = self._tree, self._proposals, self._contexts
        if tree is None:
            return None

        def proposed(node: int) -> Proposal:
            return proposals.get(node) or Proposal(_context_of(tree, contexts, node))

        return ProposalLesson(self._cache, places, proposed)


def _context_of(tree: TokenTree, contexts: dict[int, Context], node: int) -> Context:
    """The context after a node; noted for it and all above it."""
    path: list[int] = []
    while node not in contexts:
        path.append(node)
        parent = tree.parents[node]
        assert parent is not None, "the root has its context"
        node = parent
    context = contexts[node]
    for node in reversed(path):
        context = contexts[node] = next_context(context, tree.tokens[node])
    return context
