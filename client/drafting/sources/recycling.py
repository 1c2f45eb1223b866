"""Token recycling: the target's late picks after a token are candidates after it again. Needs no model.

    after[token]   what was picked after it, the latest first, at most `MAX_CHILDREN`: a row of an adjacency matrix
    probability    of the candidate at each rank: learned from the target's picks, per range of temperatures

The source fills the tree at once, then adds candidates below nodes of other sources. Picks after tree nodes that the
text never went through count too.
Source: Token Recycling (arXiv 2408.08696), here from picks instead of top-k logits, which stay at the tail.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from client.drafting.search.calibration import TEMPERATURES
from client.drafting.search.source import Places, Search, Source
from client.drafting.search.tree import Lesson, Picks, TokenTree
from client.drafting.sources.lookup import ProposalLesson
from swarm.protocol.messages import Sampling

MAX_CHILDREN = 8
MAX_TOKENS = 16_384
"""Rows of the table; those that were changed longest ago are dropped."""
MAX_PROMPT_TOKENS = 8_192
"""Of a longer prompt only the last tokens are read."""
MIN_PATH_PROBABILITY = 0.01
"""A candidate whose path is less likely is not proposed."""
PRIOR = (0.3, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01)
"""Probabilities of the ranks, until picks are known."""
PRIOR_WEIGHT = 8.0
"""Labels that the prior counts for."""
MEMORY = 400.0
"""Labels that a rank remembers: beyond, old ones fade."""

RecycledRow = tuple[int, tuple[int, ...], float]
"""A node's token, what was proposed after it, best first, and at which temperature."""


class Recycling:
    """One client's table of what was picked after each token."""

    def __init__(self) -> None:
        self._after: OrderedDict[int, list[int]] = OrderedDict()
        self._text: tuple[int, ...] = ()
        shape = (len(TEMPERATURES) + 1, MAX_CHILDREN)
        self._tried, self._right = np.full(shape, PRIOR_WEIGHT), np.tile(np.array(PRIOR) * PRIOR_WEIGHT, (shape[0], 1))

    def fill(self, tree: TokenTree, sequence: Sequence[int], sampling: Sampling) -> dict[int | None, RecycledRow]:
        """Add candidates below a tree's root, the last token of `sequence`, and below these, best first.

        Returns:
            What was proposed, by node of `tree`.
        """
        self._read(tuple(sequence))
        waiting, proposals = [(-1.0, TokenTree.ROOT)], dict[int | None, RecycledRow]()
        while waiting and len(tree.tokens) - 1 < 2 * tree.max_nodes:
            negative, node = heapq.heappop(waiting)
            if tree.depths[node] >= tree.levels:
                continue
            proposals[node] = self.propose(tree, node, sampling.temperature, -negative)
            for token, probability in zip(proposals[node][1], self._rank_probs(sampling.temperature), strict=False):
                if -negative * probability >= MIN_PATH_PROBABILITY:
                    heapq.heappush(waiting, (negative * probability, tree.child(node, token)))
        return proposals

    def propose(self, tree: TokenTree, node: int, temperature: float, path_probability: float) -> RecycledRow:
        """Add candidates below one node, whose acceptance probability is `path_probability`."""
        tokens = tuple(self._after.get(tree.tokens[node], ()))
        pairs = zip(tokens, self._rank_probs(temperature), strict=False)
        able = [(token, prob) for token, prob in pairs if path_probability * prob >= MIN_PATH_PROBABILITY]
        tree.add_children(node, able)
        return tree.tokens[node], tokens, temperature

    def learn(self, proposals: Mapping[int | None, RecycledRow], picks: Picks, others: Picks) -> None:
        """Learn each rank's probability on the text's own path, and what follows which token from all picks."""
        for node, pick in picks.items():
            if node in proposals:
                _, proposed, temperature = proposals[node]
                ranks = bisect_left(TEMPERATURES, temperature), slice(len(proposed))
                fade = np.where(self._tried[ranks] >= MEMORY, 1 - 1 / MEMORY, 1.0)
                self._tried[ranks] = self._tried[ranks] * fade + 1
                self._right[ranks] = self._right[ranks] * fade + (np.array(proposed, dtype=np.int64) == pick)
        for node, pick in (*others.items(), *picks.items()):
            if node in proposals:
                self._put(proposals[node][0], pick)

    def _rank_probs(self, temperature: float) -> list[float]:
        row = bisect_left(TEMPERATURES, temperature)
        probs: list[float] = (self._right[row] / self._tried[row]).tolist()
        return probs

    def _read(self, text: tuple[int, ...]) -> None:
        new = len(self._text) - 1 if self._text and text[: len(self._text)] == self._text else -MAX_PROMPT_TOKENS
        self._text = text
        for token, following in pairwise(text[new:]):
            self._put(token, following)

    def _put(self, token: int, following: int) -> None:
        """Put `following` first after `token`."""
        row = self._after.setdefault(token, [])
        self._after.move_to_end(token)
        self._after[token] = [following, *(other for other in row if other != following)][:MAX_CHILDREN]
        if len(self._after) > MAX_TOKENS:
            self._after.popitem(last=False)


class RecycleSource(Source):
    """Proposes below every node of the tree, whichever source added it; learns from every node too."""

    def __init__(self, table: Recycling) -> None:
        self._table = table
        self._proposals: dict[int | None, RecycledRow] = {}
        self._search: Search | None = None

    def begin(self, search: Search) -> bool:
        """Fill the tree from the table."""
        self._proposals, self._search = {}, search
        self.widen(search)
        return False

    def widen(self, search: Search) -> None:
        """Fill the larger tree."""
        self._proposals |= self._table.fill(search.tree, search.sequence, search.sampling)

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        """Add candidates below nodes that other sources proposed."""
        tree, temperature = search.tree, search.sampling.temperature
        for node in nodes:
            if node not in self._proposals and tree.depths[node] < tree.levels:
                self._proposals[node] = self._table.propose(tree, node, temperature, tree.acceptance_probs[node])
        return False

    def lesson(self, places: Places) -> Lesson | None:
        """The pick after any node is a lesson, whether or not anything was proposed there."""
        if self._search is None:
            return None
        tokens, temperature, proposals = self._search.tree.tokens, self._search.sampling.temperature, self._proposals
        return ProposalLesson(self._table, places, lambda node: proposals.get(node, (tokens[node], (), temperature)))
