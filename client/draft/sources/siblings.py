"""The cross-branch cache, a source without a model: what the target picked behind dead branches that end alike.

Most nodes that a sweep verifies lie on branches that the text never takes. But a branch that died differs from the text
in few tokens, and what the target picked behind it, it often picks behind the right one too.

    sampled       the pick at a position depends on the noise there (`swarm.compute.gumbel`), so only contexts at the
                  same position count; those that the text has passed are forgotten
    greedy        there is no noise: what was picked after a context is picked after it again at any position
    probability   rises with the number of last tokens, up to `MAX_CONTEXT_TOKENS`, that a node and the contexts share;
                  learned (`client.draft.sources.lookup`)

Token Recycling (arXiv 2408.08696) uses dead branches too, by the last token alone.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from client.draft.search.calibration import TEMPERATURES
from client.draft.search.source import Places, Search, Source
from client.draft.search.tree import Lesson, Picks, TokenTree
from client.draft.sources.lookup import MEAN_SHARES, CountCalibrator, CountCell, ProposalLesson
from swarm.protocol.messages import Sampling

MAX_CONTEXT_TOKENS = 8
"""Last tokens of a context that are compared."""
MAX_CHILDREN = 4
"""Candidates after one node, at most."""
MAX_PICKS = 16_384
"""Picks of a sampled text that are kept; the text soon passes their positions."""
MAX_ENDINGS = 65_536
"""Endings of greedy contexts that are kept; those that came longest ago are dropped."""
MAX_CACHED_VOTES = 8_192
"""Votes whose cells are cached: every node of every tree asks."""
MAX_PICKS_PER_ENDING = 16
"""Picks after one ending that vote, those that came last."""
PRIOR = (0.08, 0.5, 0.68, 0.78, 0.88, 0.9, 0.9, 0.9, 0.9)
GREEDY_PRIOR = (0.02, 0.3, 0.5, 0.65, 0.78, 0.82, 0.86, 0.88, 0.9)
"""By tokens shared: the probability that a unanimous vote is right, until picks are known."""

Ending = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Context:
    """A place where the target picks a token.

    Attributes:
        position: of that token in the text.
        ending: the last `MAX_CONTEXT_TOKENS` tokens before it, or fewer where a text begins.
    """

    position: int
    ending: Ending


@dataclass(frozen=True, slots=True)
class Proposal:
    """What was proposed for a context.

    Attributes:
        context: where the target picks.
        proposed: tokens and their calibration cells.
    """

    context: Context
    proposed: tuple[tuple[int, CountCell], ...] = ()


class SuffixIndex:
    """What was picked after contexts, by their endings. Bounded: the endings that came longest ago are dropped."""

    def __init__(self, shortest: int) -> None:
        """Make an empty one; contexts that share less than `shortest` tokens are not found."""
        self._shortest = shortest
        self._after: OrderedDict[Ending, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._after)

    def put(self, ending: Ending, pick: int) -> bool:
        """Note what was picked after a context. Returns whether that differs from the last time."""
        if self._after.get(ending, ())[-1:] == (pick,):
            return False
        for length in range(self._shortest, len(ending) + 1):
            last = _last(ending, length)
            self._after[last] = (*self._after.pop(last, ()), pick)[-MAX_PICKS_PER_ENDING:]
        while len(self._after) > MAX_ENDINGS:
            self._after.popitem(last=False)
        return True

    def after(self, ending: Ending) -> Iterator[tuple[int, Ending]]:
        """What was picked after contexts that end alike: pairs of the tokens shared, most first, and the picks."""
        after, found = self._after, list[tuple[int, tuple[int, ...]]]()
        for length in range(self._shortest, len(ending) + 1):
            picks = after.get(_last(ending, length))
            if picks is None:  # and none that shares more
                break
            found.append((length, picks))
        before: tuple[int, ...] = ()
        for length, picks in reversed(found):
            if len(picks) > len(before):  # or they are the same contexts again
                yield length, picks
                before = picks


class CrossBranchCache:
    """One client's cache; holds picks of the current text only.

    Attributes:
        calibrator: from votes to probabilities; kept from text to text.
    """

    def __init__(self) -> None:
        self.calibrator = CountCalibrator(range(MAX_CONTEXT_TOKENS + 1), _prior())
        self._cells = lru_cache(maxsize=MAX_CACHED_VOTES)(self._cells_of)
        self._greedy = SuffixIndex(shortest=1)
        self._at: dict[int, SuffixIndex] = {}
        self._ahead: Counter[int] = Counter()
        self._text: tuple[int, ...] = ()
        self._sampling: Sampling | None = None

    @property
    def picks(self) -> int:
        """How many it holds for positions ahead of the text."""
        return self._ahead.total()

    def follow(self, sequence: tuple[int, ...], sampling: Sampling) -> None:
        """Start a search below this text; forget sampled positions that it has passed, and all if the text is new."""
        is_greedy = self._is_greedy and sampling.temperature == 0  # whatever its seed, as the turns of a chat
        goes_on = (is_greedy or sampling == self._sampling) and sequence[: len(self._text)] == self._text
        if not goes_on:
            self._greedy = SuffixIndex(shortest=1)
        for position in [known for known in self._ahead if not goes_on or known < len(sequence)]:
            del self._ahead[position]
            self._at.pop(position, None)
        self._text, self._sampling = sequence, sampling

    def propose(self, context: Context, temperature: float) -> tuple[Proposal, list[tuple[int, float]]]:
        """The likeliest tokens at a context: what contexts picked that share most tokens with it.

        Returns:
            What to learn from, and the tokens with their probabilities, in sum at most 1.
        """
        index, left = self._index_at(context.position), 1.0
        proposed: dict[int, tuple[CountCell, float]] = {}
        for length, picks in index.after(context.ending) if index is not None else ():
            for token, cell in self._cells(temperature, length, picks):
                if token not in proposed and len(proposed) < MAX_CHILDREN:
                    probability = min(self.calibrator.probability(cell), left)
                    proposed[token], left = (cell, probability), left - probability
            if len(proposed) == MAX_CHILDREN:
                break
        proposal = Proposal(context, tuple((token, cell) for token, (cell, _) in proposed.items()))
        return proposal, [(token, probability) for token, (_, probability) in proposed.items()]

    def learn(self, proposals: Mapping[int | None, Proposal], picks: Picks, others: Picks) -> None:
        """Learn how often votes are right on the text's own path, and keep what was picked everywhere."""
        for node, pick in picks.items():
            for token, cell in proposals[node].proposed if node in proposals else ():
                self.calibrator.learn(cell, hit=token == pick)
        for node, pick in (*picks.items(), *others.items()):
            if node in proposals:
                self._put(proposals[node].context, pick)

    def _cells_of(self, temperature: float, length: int, picks: Ending) -> list[tuple[int, CountCell]]:
        """Tokens that were picked after contexts which share `length` tokens, most frequent first, and their cells."""
        counted = {pick: picks.count(pick) for pick in picks}  # few: quicker than a Counter
        votes, places = sorted(counted.items(), key=lambda vote: (-vote[1], vote[0])), len(picks)
        return [(token, self.calibrator.cell(temperature, length, places, number / places)) for token, number in votes]

    @property
    def _is_greedy(self) -> bool:
        return self._sampling is not None and self._sampling.temperature == 0

    def _index_at(self, position: int) -> SuffixIndex | None:
        return self._greedy if self._is_greedy else self._at.get(position)

    def _put(self, context: Context, pick: int) -> None:
        is_ahead = context.position >= len(self._text)
        if not self._is_greedy:
            if not is_ahead or self.picks >= MAX_PICKS:
                return
            self._at.setdefault(context.position, SuffixIndex(shortest=0))
        index = self._index_at(context.position)
        assert index is not None, "it was made"
        if index.put(context.ending, pick) and is_ahead:
            self._ahead[context.position] += 1


def context_at(tokens: Sequence[int], position: int) -> Context:
    """Where the target picks the token at a position, after some tokens of which only the last ones matter."""
    return Context(position, tuple(tokens[-MAX_CONTEXT_TOKENS:]))


def next_context(context: Context, token: int) -> Context:
    """Where the target picks the next token, if it picks this one at `context`."""
    return Context(context.position + 1, (*context.ending, token)[-MAX_CONTEXT_TOKENS:])


def _last(ending: Ending, length: int) -> Ending:
    return ending[len(ending) - length :]


def _prior() -> NDArray[np.float64]:
    """[temperature range, length, places, share]."""
    lengths = np.array([GREEDY_PRIOR, *[PRIOR] * len(TEMPERATURES)])
    return np.asarray(lengths[:, :, None, None] * np.array(MEAN_SHARES))


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
