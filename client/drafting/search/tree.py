"""The token tree that a drafter grows: candidates ranked by their chance to be reached. Pure; knows no model.

    node 0      the root: the pending token, certain, never counted among the tree's nodes
    chance      of a node: the product of its own and its ancestors' chances, so never above its parent's
    best K      the K nodes of highest chance; a parent is at least as good and older, so they form a tree
    floor       the K-th best chance so far: a node below it cannot belong, and neither can anything below that node

Source: SpecExec (arXiv 2406.02532), section 4.1 and algorithm 2: best-first search, here with batched expansion.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from swarm.protocol.draft_distribution import DraftDistribution

Picks = Mapping[int | None, int]
"""What the target picked after nodes of a tree; None is its root."""


class Lesson(Protocol):
    """What one source of a tree's candidates learns from, once the target's picks are known."""

    def learn(self, picks: Picks, others: Picks) -> None:
        """Take what was picked after the tree's nodes: those that the text went through, and others."""
        ...


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Tree nodes below a root, best first and so parents first.

    tokens, parents, chances: equally long; a parent is an index into `tokens`, None is the root. rounds: batches that a
    drafter's models computed. is_settled: further ones would change nothing. lessons: what its sources learn from.
    is_early: it came before what a source needs. has_read: a source had to read the text first. guesses: what children
    were drawn from, where they were (`swarm.inference.multistep_sampling`); an offset of 0 is the root, i + 1 is node
    i.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int | None, ...] = ()
    chances: tuple[float, ...] = ()
    rounds: int = field(default=0, compare=False)
    is_settled: bool = field(default=True, compare=False)
    lessons: tuple[Lesson, ...] = field(default=(), compare=False, repr=False)
    is_early: bool = field(default=False, compare=False)
    has_read: bool = field(default=False, compare=False)
    guesses: tuple[DraftDistribution, ...] = field(default=(), compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Levels below the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent is None else depths[parent] + 1)
        return max(depths, default=0)

    def first(self, count: int) -> DraftTree:
        """The tree of its first nodes."""
        if count >= len(self):
            return self
        return replace(
            self,
            tokens=self.tokens[:count],
            parents=self.parents[:count],
            chances=self.chances[:count],
            guesses=tuple(guess for guess in self.guesses if guess.offset <= count),
        )


UNWANTED = 0.25
"""Part of the least chance that is wanted: nobody will ask for what is less likely before the next search."""


class TokenTree:
    """Grows best-first: take the `frontier`, ask sources for children of each, `add_children`, until it is empty.

    Candidates of several sources merge: one child per token per parent, and the highest chance counts, until a source
    that knows what the others said gives chances of its own (`weigh_children`).
    """

    ROOT = 0

    def __init__(self, token: int, nodes: int, levels: int, least: float = 0.0) -> None:
        """A root that holds `token`; the tree searched for has at most `nodes` nodes in at most `levels` levels.

        least: nobody wants a node of a lower chance.
        """
        self.nodes = nodes
        self.least = least
        self.unwanted = least * UNWANTED
        self.levels = levels
        self.tokens = [token]
        self.parents: list[int | None] = [None]
        self.depths = [0]
        self.chances = [1.0]
        self.guesses: dict[int, DraftDistribution] = {}
        self._own = [1.0]
        self._children: dict[int, dict[int, int]] = {}
        self._weighed: set[int] = set()
        self._remembered: set[int] = set()
        self._is_stale = False
        self._taken: set[int] = set()
        self._waiting: list[tuple[float, int]] = []
        self._best: list[float] = []
        self._rank(self.ROOT)

    @property
    def floor(self) -> float:
        """The chance that a node needs to be among the best so far."""
        if self._is_stale:
            self._rank_again()
        if self.nodes == 0:
            return math.inf
        return max(self._best[0], self.least) if len(self._best) == self.nodes else self.least

    def widen(self, nodes: int, least: float) -> None:
        """Search on, for another number of nodes and another least chance."""
        self.nodes, self.least = nodes, least
        self._rank_again()

    def add_children(self, node: int, candidates: Iterable[tuple[int, float]]) -> None:
        """Add `(token, chance)` pairs below `node`; a chance is that of the token given its parent."""
        children = self._children.setdefault(node, {})
        is_weighed = node in self._weighed
        for token, chance in candidates:
            child = children.get(token)
            if child is None:
                children[token] = self._append(token, node, chance)
            elif child in self._remembered or (chance > self._own[child] and not is_weighed):
                self._remembered.discard(child)
                self._change(child, chance)

    def remember(self, node: int, token: int, chance: float) -> int:
        """The child of `node` that holds `token`, which an earlier search gave a chance; nobody has said it yet."""
        children = self._children.setdefault(node, {})
        child = children.get(token)
        if child is None:
            child = children[token] = self._append(token, node, chance)
            self._remembered.add(child)
        return child

    def own(self, node: int) -> float:
        """The chance of a node given its parent."""
        return self._own[node]

    def said(self, node: int) -> dict[int, float]:
        """The children of `node` that were added so far: their tokens, and the chance of each given its parent."""
        children, own, remembered = self._children.get(node), self._own, self._remembered
        if not children:
            return {}
        return {token: own[child] for token, child in children.items() if child not in remembered}

    def weigh_children(self, node: int, candidates: Iterable[tuple[int, float]]) -> None:
        """As `add_children`, by a source that took into account what was `said`: its chances replace the others'.

        Every token may be named once. What is remembered and not named has no chance any more.
        """
        children, own, remembered = self._children.setdefault(node, {}), self._own, self._remembered
        for token, chance in candidates:
            child = children.get(token)
            if child is None:
                children[token] = self._append(token, node, chance)
                continue
            remembered.discard(child)
            if chance != own[child]:
                self._change(child, chance)
        for child in remembered.intersection(children.values()) if remembered else ():
            remembered.discard(child)
            self._change(child, 0.0)
        self._weighed.add(node)

    def child(self, node: int, token: int) -> int:
        """The child of `node` that holds `token`.

        Raises:
            KeyError: there is none.
        """
        return self._children[node][token]

    def frontier(self, count: int) -> list[int]:
        """Up to `count` of the best nodes not handed out before, of those whose children might be among the best.

        An empty list means that the best nodes are settled.
        """
        taken: list[int] = []
        floor = self.floor  # before the heap is looked at: it is made again where it is stale
        while self._waiting and len(taken) < count and -self._waiting[0][0] >= floor:
            taken.append(heapq.heappop(self._waiting)[1])
        self._taken.update(taken)
        return taken

    def take(self, nodes: Iterable[int]) -> None:
        """Nodes whose children were asked for before the frontier comes to them."""
        self._taken.update(nodes)
        self._is_stale = True

    def put_back(self, nodes: Iterable[int]) -> None:
        """Nodes of the frontier that nobody asked about after all."""
        for node in nodes:
            self._taken.discard(node)
            heapq.heappush(self._waiting, (-self.chances[node], node))

    def best_nodes(self, count: int) -> list[int]:
        """The `count` nodes of highest chance, older first among equals, the root left out."""
        floor = self.floor if count <= self.nodes else self.least
        able = [node for node in range(1, len(self.tokens)) if self.chances[node] >= floor]
        return sorted(able, key=self.chances.__getitem__, reverse=True)[:count]

    def best(self, count: int) -> DraftTree:
        """The tree of the `best_nodes`."""
        return self.cut(self.best_nodes(count))

    def cut(self, chosen: list[int]) -> DraftTree:
        """The tree of these nodes, parents first."""
        index: dict[int | None, int] = {node: place for place, node in enumerate(chosen)}
        tokens, parents, chances = self.tokens, self.parents, self.chances
        return DraftTree(
            tuple([tokens[node] for node in chosen]),
            tuple([index.get(parents[node]) for node in chosen]),
            tuple([chances[node] for node in chosen]),
            guesses=self._guesses_at(index) if self.guesses else (),
        )

    def _guesses_at(self, places: Mapping[int | None, int]) -> tuple[DraftDistribution, ...]:
        offsets = {self.ROOT: 0} | {node: place + 1 for node, place in places.items()}
        found = (replace(guess, offset=offsets[node]) for node, guess in self.guesses.items() if node in offsets)
        return tuple(sorted(found, key=lambda guess: guess.offset))

    def _append(self, token: int, parent: int, chance: float) -> int:
        assert 0.0 <= chance <= 1.0, "a chance is a probability"
        node, chances, depths = len(self.tokens), self.chances, self.depths
        self.tokens.append(token)
        self.parents.append(parent)
        depths.append(depths[parent] + 1)
        chances.append(chances[parent] * chance)
        self._own.append(chance)
        if not self._is_stale:
            self._rank(node)
        return node

    def _change(self, child: int, chance: float) -> None:
        """Another chance of a child given its parent, and with it of everything below; ranks are made again later."""
        assert 0.0 <= chance <= 1.0, "a chance is a probability"
        own, parents, chances, children = self._own, self.parents, self.chances, self._children
        own[child] = chance
        changed = [child]
        for node in changed:  # which grows meanwhile
            parent = parents[node]
            assert parent is not None
            chances[node] = chances[parent] * own[node]
            if below := children.get(node):
                changed += below.values()
        self._is_stale = True

    def _rank(self, node: int) -> None:
        chance = self.chances[node]
        if node != self.ROOT:
            if len(self._best) < self.nodes:
                heapq.heappush(self._best, chance)
            elif chance > self.floor:
                heapq.heapreplace(self._best, chance)
            else:
                return
        if self.depths[node] < self.levels and node not in self._taken:
            heapq.heappush(self._waiting, (-chance, node))

    def _rank_again(self) -> None:
        self._is_stale = False
        falling = sorted(self.chances[1:], reverse=True)[: self.nodes]
        self._best = falling[::-1]  # rising, and so a heap
        floor = self.floor
        self._waiting = [
            (-chance, node)
            for node, (chance, depth) in enumerate(zip(self.chances, self.depths, strict=True))
            if chance >= floor and depth < self.levels and node not in self._taken
        ]
        heapq.heapify(self._waiting)
