"""The token tree that a drafter grows: candidates ranked by path probability. Pure; knows no model.

    node 0                    the root: the pending token, certain, never counted among the tree's nodes
    conditional probability   of a node: that the target picks it after its parent
    acceptance probability    of a node: the product of its own and its ancestors' conditional probabilities, so never
                              above its parent's
    best K                    the K nodes of highest acceptance probability; a parent is at least as probable and
                              older, so they form a tree
    floor                     the K-th best acceptance probability so far: a node below it cannot be among the best K,
                              and neither can anything below that node

Source: SpecExec (arXiv 2406.02532), section 4.1 and algorithm 2: best-first search, here with batched expansion.

`StopRule` says when another round of drafting does not pay.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from swarm.protocol.pick_rules import DraftDistribution


def _always(_rounds: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class StopRule:
    """When another round of drafting does not pay; costs are in tokens, as the running goodput values time.

    Attributes:
        min_probability: no sweep carries a node of a lower acceptance probability.
        per_round: tokens that another round of drafting costs.
        per_sweep: tokens that another sweep costs. A round that should bring more than that can wait until this tree
            is in flight.
        go_on: whether there is time for a round; called before each, with the number of rounds since drafting began.
    """

    min_probability: float = 0.0
    per_round: float = 0.0
    per_sweep: float = math.inf
    go_on: Callable[[int], bool] = _always


NO_LIMIT = StopRule()
"""Drafts until the tree is settled."""


Picks = Mapping[int | None, int]
"""What the target picked after nodes of a tree; None is its root."""


class Lesson(Protocol):
    """What one source of a tree's candidates learns from, once the target's picks are known."""

    def learn(self, picks: Picks, others: Picks) -> None:
        """Learn from the picks after the tree's nodes.

        Args:
            picks: after nodes that the text went through.
            others: after nodes on branches that the text left.
        """
        ...


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Tree nodes below a root, best first and so parents first.

    Attributes:
        tokens: one per node.
        parents: one per node, an index into `tokens`; None is the root.
        acceptance_probs: one per node, falling.
        rounds: batches that models computed for it.
        is_settled: whether further batches would change nothing.
        lessons: what its sources learn from.
        is_early: whether it was drafted before a source had the hidden row that it needs.
        has_read: whether a source had to read the text from its beginning first.
        guesses: the distributions that children were drawn from, where they were drawn
            (`swarm.compute.multistep_sampling`); an offset of 0 is the root, i + 1 is node i.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int | None, ...] = ()
    acceptance_probs: tuple[float, ...] = ()
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
            acceptance_probs=self.acceptance_probs[:count],
            guesses=tuple(guess for guess in self.guesses if guess.offset <= count),
        )

    def below(self, certain: Sequence[int]) -> DraftTree:
        """This tree at the end of tokens that are certain to come: they are the first nodes, each below the last."""
        count = len(certain)
        if not count:
            return self
        chain = (None, *range(count - 1))
        return replace(
            self,
            tokens=(*certain, *self.tokens),
            parents=(*chain, *(count - 1 if parent is None else parent + count for parent in self.parents)),
            acceptance_probs=(*(1.0 for _ in certain), *self.acceptance_probs),
            lessons=tuple(LessonBelow(lesson, count) for lesson in self.lessons),
        )


@dataclass(frozen=True, slots=True)
class LessonBelow:
    """The lesson of a tree that hangs at the end of a number of certain tokens, which teach nothing."""

    lesson: Lesson
    certain: int

    def learn(self, picks: Picks, others: Picks) -> None:
        """Pass on what was picked at the end of the certain tokens, and below."""
        self.lesson.learn(self._own(picks), self._own(others))

    def _own(self, picks: Picks) -> Picks:
        first = self.certain
        return {
            None if node < first else node - first: pick
            for node, pick in picks.items()
            if node is not None and node >= first - 1
        }


PRUNE_RATIO = 0.25
"""Sources may leave out nodes below this part of the minimum probability, which no sweep needs for now."""


class TokenTree:
    """Grows best-first: take the `frontier`, ask sources for children of each, `add_children`, until it is empty.

    Candidates of several sources merge: one child per token per parent. The highest conditional probability counts,
    until a source that takes the others' into account sets its own (`weigh_children`).

    Attributes:
        max_nodes: nodes of the tree that is searched for, the root not counted.
        min_probability: no sweep carries a node of a lower acceptance probability.
        prune_below: sources may leave out nodes of a lower acceptance probability.
        levels: levels of the tree that is searched for.
        tokens: one per node, as the four that follow.
        parents: None for the root.
        depths: 0 for the root.
        acceptance_probs: 1 for the root.
        guesses: what children of a node were drawn from, where they were drawn.
    """

    ROOT = 0

    def __init__(self, token: int, max_nodes: int, levels: int, min_probability: float = 0.0) -> None:
        """Make a tree of a root that holds `token`."""
        self.max_nodes = max_nodes
        self.min_probability = min_probability
        self.prune_below = min_probability * PRUNE_RATIO
        self.levels = levels
        self.tokens = [token]
        self.parents: list[int | None] = [None]
        self.depths = [0]
        self.acceptance_probs = [1.0]
        self.guesses: dict[int, DraftDistribution] = {}
        self._conditional_probs = [1.0]
        self._children: dict[int, dict[int, int]] = {}
        self._weighed: set[int] = set()
        self._remembered: set[int] = set()
        self._is_stale = False  # whether `_open` and `_best` have to be made again
        self._taken: set[int] = set()
        self._open: list[tuple[float, int]] = []  # heap of (−probability, node): the frontier, not handed out yet
        self._best: list[float] = []  # heap of the `max_nodes` highest probabilities; its first is the floor
        self._rank(self.ROOT)

    @property
    def floor(self) -> float:
        """The acceptance probability that a node needs to be among the best so far."""
        if self._is_stale:
            self._rank_again()
        if self.max_nodes == 0:
            return math.inf
        is_full = len(self._best) == self.max_nodes
        return max(self._best[0], self.min_probability) if is_full else self.min_probability

    def widen(self, max_nodes: int, min_probability: float) -> None:
        """Search on, for another number of nodes and another minimum probability."""
        self.max_nodes, self.min_probability = max_nodes, min_probability
        self._rank_again()

    def add_children(self, node: int, candidates: Iterable[tuple[int, float]]) -> None:
        """Add pairs of a token and its conditional probability below `node`."""
        children = self._children.setdefault(node, {})
        is_weighed = node in self._weighed
        for token, probability in candidates:
            child = children.get(token)
            if child is None:
                children[token] = self._append(token, node, probability)
            elif child in self._remembered or (probability > self._conditional_probs[child] and not is_weighed):
                self._remembered.discard(child)
                self._change(child, probability)

    def remember(self, node: int, token: int, probability: float) -> int:
        """The child of `node` that holds `token`, with the conditional probability that an earlier search gave it.

        Until a source of this search proposes it, `child_probs` leaves it out.
        """
        children = self._children.setdefault(node, {})
        child = children.get(token)
        if child is None:
            child = children[token] = self._append(token, node, probability)
            self._remembered.add(child)
        return child

    def conditional_prob(self, node: int) -> float:
        """The probability of a node given its parent."""
        return self._conditional_probs[node]

    def child_probs(self, node: int) -> dict[int, float]:
        """Tokens that sources proposed below `node` in this search, each with its conditional probability."""
        children, probs, remembered = self._children.get(node), self._conditional_probs, self._remembered
        if not children:
            return {}
        return {token: probs[child] for token, child in children.items() if child not in remembered}

    def weigh_children(self, node: int, candidates: Iterable[tuple[int, float]]) -> None:
        """As `add_children`, by a source that took `child_probs` into account: its probabilities replace the others'.

        Every token may be named once. A remembered child that is not named gets the probability 0.
        """
        children, probs, remembered = self._children.setdefault(node, {}), self._conditional_probs, self._remembered
        for token, probability in candidates:
            child = children.get(token)
            if child is None:
                children[token] = self._append(token, node, probability)
                continue
            remembered.discard(child)
            if probability != probs[child]:
                self._change(child, probability)
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
        while self._open and len(taken) < count and -self._open[0][0] >= floor:
            taken.append(heapq.heappop(self._open)[1])
        self._taken.update(taken)
        return taken

    def take(self, nodes: Iterable[int]) -> None:
        """Take nodes off the frontier whose children sources were asked for out of turn."""
        self._taken.update(nodes)
        self._is_stale = True

    def put_back(self, nodes: Iterable[int]) -> None:
        """Return nodes to the frontier that no source was asked about."""
        for node in nodes:
            self._taken.discard(node)
            heapq.heappush(self._open, (-self.acceptance_probs[node], node))

    def best_nodes(self, count: int) -> list[int]:
        """The `count` nodes of highest acceptance probability, older first among equals, the root left out."""
        floor = self.floor if count <= self.max_nodes else self.min_probability
        able = [node for node in range(1, len(self.tokens)) if self.acceptance_probs[node] >= floor]
        return sorted(able, key=self.acceptance_probs.__getitem__, reverse=True)[:count]

    def best(self, count: int) -> DraftTree:
        """The tree of the `best_nodes`."""
        return self.subtree(self.best_nodes(count))

    def subtree(self, chosen: list[int]) -> DraftTree:
        """The tree of these nodes, parents first."""
        index: dict[int | None, int] = {node: place for place, node in enumerate(chosen)}
        tokens, parents, probs = self.tokens, self.parents, self.acceptance_probs
        return DraftTree(
            tuple([tokens[node] for node in chosen]),
            tuple([index.get(parents[node]) for node in chosen]),
            tuple([probs[node] for node in chosen]),
            guesses=self._guesses_at(index) if self.guesses else (),
        )

    def _guesses_at(self, places: Mapping[int | None, int]) -> tuple[DraftDistribution, ...]:
        offsets = {self.ROOT: 0} | {node: place + 1 for node, place in places.items()}
        found = (replace(guess, offset=offsets[node]) for node, guess in self.guesses.items() if node in offsets)
        return tuple(sorted(found, key=lambda guess: guess.offset))

    def _append(self, token: int, parent: int, probability: float) -> int:
        assert 0.0 <= probability <= 1.0, "a probability lies in [0, 1]"
        node, probs, depths = len(self.tokens), self.acceptance_probs, self.depths
        self.tokens.append(token)
        self.parents.append(parent)
        depths.append(depths[parent] + 1)
        probs.append(probs[parent] * probability)
        self._conditional_probs.append(probability)
        if not self._is_stale:
            self._rank(node)
        return node

    def _change(self, child: int, probability: float) -> None:
        """Set a child's conditional probability, and with it those of all nodes below; ranks are made again later."""
        assert 0.0 <= probability <= 1.0, "a probability lies in [0, 1]"
        conditional, parents, probs, children = (
            self._conditional_probs,
            self.parents,
            self.acceptance_probs,
            self._children,
        )
        conditional[child] = probability
        changed = [child]
        for node in changed:  # which grows meanwhile
            parent = parents[node]
            assert parent is not None
            probs[node] = probs[parent] * conditional[node]
            if below := children.get(node):
                changed += below.values()
        self._is_stale = True

    def _rank(self, node: int) -> None:
        """Enter a node into the heaps, if it is good enough."""
        probability = self.acceptance_probs[node]
        if node != self.ROOT:
            if len(self._best) < self.max_nodes:
                heapq.heappush(self._best, probability)
            elif probability > self.floor:
                heapq.heapreplace(self._best, probability)
            else:
                return
        if self.depths[node] < self.levels and node not in self._taken:
            heapq.heappush(self._open, (-probability, node))

    def _rank_again(self) -> None:
        self._is_stale = False
        falling = sorted(self.acceptance_probs[1:], reverse=True)[: self.max_nodes]
        self._best = falling[::-1]  # rising, and so a heap
        floor = self.floor
        self._open = [
            (-probability, node)
            for node, (probability, depth) in enumerate(zip(self.acceptance_probs, self.depths, strict=True))
            if probability >= floor and depth < self.levels and node not in self._taken
        ]
        heapq.heapify(self._open)
