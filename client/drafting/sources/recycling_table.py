"""Token recycling: the target's late picks after a token are candidates after it again. A source without a model. Pure.

    after[token]   what was picked after it, the latest first, at most `CHILDREN` of them: a row of an adjacency matrix
    chance         of the candidate at each rank: learned from the target's picks, per range of temperatures

Picks after tree nodes that the text never went through count too: nothing that the target computed is thrown away.
Source: Token Recycling (arXiv 2408.08696), here from picks instead of top-k logits, which stay at the tail.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from client.drafting.search.temperatures import TEMPERATURES
from client.drafting.search.tree import Picks, TokenTree
from swarm.protocol.messages import Sampling

CHILDREN = 8
MOST_TOKENS = 16_384
"""Tokens of which it is known what follows; those that stood longest ago are forgotten."""
MOST_TEXT = 8_192
"""Of a prompt the last so many tokens are read."""
LEAST_CHANCE = 0.01
"""Of a path: what is less likely is not proposed."""
PRIOR = (0.3, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01)
PRIOR_WEIGHT = 8.0
MEMORY = 400.0
"""Labels that a rank remembers: beyond, old ones fade."""

Proposed = tuple[int, tuple[int, ...], float]
"""A node's token, what was proposed after it, best first, and at which temperature."""


class Recycling:
    """One client's table."""

    def __init__(self) -> None:
        self._after: OrderedDict[int, list[int]] = OrderedDict()
        self._text: tuple[int, ...] = ()
        shape = (len(TEMPERATURES) + 1, CHILDREN)
        self._tried, self._right = np.full(shape, PRIOR_WEIGHT), np.tile(np.array(PRIOR) * PRIOR_WEIGHT, (shape[0], 1))

    def fill(self, tree: TokenTree, sequence: Sequence[int], sampling: Sampling) -> dict[int | None, Proposed]:
        """Add what it knows below a tree's root, the last token of `sequence`; what it proposed, by node of `tree`."""
        self._read(tuple(sequence))
        waiting, seen = [(-1.0, TokenTree.ROOT)], dict[int | None, Proposed]()
        while waiting and len(tree.tokens) - 1 < 2 * tree.nodes:
            negative, node = heapq.heappop(waiting)
            if tree.depths[node] >= tree.levels:
                continue
            seen[node] = self.propose(tree, node, sampling.temperature, -negative)
            for token, chance in zip(seen[node][1], self._chances(sampling.temperature), strict=False):
                if -negative * chance >= LEAST_CHANCE:
                    heapq.heappush(waiting, (negative * chance, tree.child(node, token)))
        return seen

    def propose(self, tree: TokenTree, node: int, temperature: float, path: float) -> Proposed:
        """Add candidates below one node, whose own chance is `path`."""
        tokens = tuple(self._after.get(tree.tokens[node], ()))
        pairs = zip(tokens, self._chances(temperature), strict=False)
        tree.add_children(node, [(token, chance) for token, chance in pairs if path * chance >= LEAST_CHANCE])
        return tree.tokens[node], tokens, temperature

    def learn(self, seen: Mapping[int | None, Proposed], picks: Picks, others: Picks) -> None:
        """Take what the target picked: labels where the text went through, and what follows what everywhere."""
        for node, pick in picks.items():
            if node in seen:
                _, proposed, temperature = seen[node]
                ranks = bisect_left(TEMPERATURES, temperature), slice(len(proposed))
                fade = np.where(self._tried[ranks] >= MEMORY, 1 - 1 / MEMORY, 1.0)
                self._tried[ranks] = self._tried[ranks] * fade + 1
                self._right[ranks] = self._right[ranks] * fade + (np.array(proposed, dtype=np.int64) == pick)
        for node, pick in (*others.items(), *picks.items()):
            if node in seen:
                self._put(seen[node][0], pick)

    def _chances(self, temperature: float) -> list[float]:
        heat = bisect_left(TEMPERATURES, temperature)
        chances: list[float] = (self._right[heat] / self._tried[heat]).tolist()
        return chances

    def _read(self, text: tuple[int, ...]) -> None:
        new = len(self._text) - 1 if self._text and text[: len(self._text)] == self._text else -MOST_TEXT
        self._text = text
        for token, following in pairwise(text[new:]):
            self._put(token, following)

    def _put(self, token: int, following: int) -> None:
        """The latest goes first."""
        row = self._after.setdefault(token, [])
        self._after.move_to_end(token)
        self._after[token] = [following, *(other for other in row if other != following)][:CHILDREN]
        if len(self._after) > MOST_TOKENS:
            self._after.popitem(last=False)
