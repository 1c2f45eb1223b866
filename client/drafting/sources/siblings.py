"""Siblings as a source: what the target picked behind dead branches, below every node that stands in the tree."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from client.drafting.search.source import Places, Search, Source
from client.drafting.search.tree import Lesson, TokenTree
from client.drafting.sources.lesson import ProposalLesson
from client.drafting.sources.sibling_index import Context, CrossBranchCache, Proposal, spot_after, spot_of

LEAST_CHANCE = 0.002
"""Of a path: what is less likely is not proposed."""
SURE, LEAST_SURE = 0.6, 0.05
"""What is proposed with such a chance goes on at once, while its path's is not below that: a pass less per level."""
NEWS = 1.125
"""So many times the picks that a search began with are reason enough to begin it anew."""


class SiblingSource(Source):
    """Candidates after nodes whoever put them there, before a model weighs them; learns from every verified node."""

    def __init__(self, siblings: CrossBranchCache) -> None:
        self._siblings = siblings
        self._seen: dict[int, Proposal] = {}
        self._tree: TokenTree | None = None
        self._spots: dict[int, Context] = {}
        self._picks = 0

    def begin(self, search: Search) -> bool:
        """What was picked at the next position."""
        self._seen, self._tree = {}, search.tree
        self._spots = {TokenTree.ROOT: spot_of(search.sequence, len(search.sequence))}
        self._siblings.follow(search.sequence, search.sampling)
        self._picks = self._siblings.picks
        self.expand(search, [TokenTree.ROOT])
        return False

    def is_stale(self) -> bool:
        """Whether many picks came since: sweeps on branches that died are answered while the next tree grows."""
        return self._siblings.picks > self._picks * NEWS

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        """What was picked at the positions after these nodes, and on behind what is sure."""
        tree = search.tree
        waiting = [(-tree.chances[node], node) for node in nodes]
        heapq.heapify(waiting)
        most = len(tree.tokens) + tree.nodes
        while waiting:
            _, node = heapq.heappop(waiting)
            if node in self._seen or tree.depths[node] >= tree.levels:
                continue
            told, candidates = self._siblings.propose(_spot(tree, self._spots, node), search.sampling.temperature)
            self._seen[node] = told
            least = LEAST_CHANCE / max(tree.chances[node], LEAST_CHANCE)
            tree.add_children(node, [(token, chance) for token, chance in candidates if chance >= least])
            for token, chance in candidates:
                is_sure = chance >= SURE and tree.chances[node] * chance >= LEAST_SURE
                if is_sure and len(tree.tokens) < most:
                    child = tree.child(node, token)
                    heapq.heappush(waiting, (-tree.chances[child], child))
        return False

    def lesson(self, places: Places) -> Lesson | None:
        """What is picked after any node, whether or not anything was proposed there."""
        tree, seen, spots = self._tree, self._seen, self._spots
        if tree is None:
            return None
        return ProposalLesson(self._siblings, places, lambda node: seen.get(node) or Proposal(_spot(tree, spots, node)))


def _spot(tree: TokenTree, spots: dict[int, Context], node: int) -> Context:
    """The position after a node, and the last tokens of what leads to it; noted for it and all above it."""
    path: list[int] = []
    while node not in spots:
        path.append(node)
        parent = tree.parents[node]
        assert parent is not None, "the root has its spot"
        node = parent
    spot = spots[node]
    for node in reversed(path):
        spot = spots[node] = spot_after(spot, tree.tokens[node])
    return spot
