"""Look-up: a text often goes on as it did the last time it stood here. Needs no model.

The longest endings of the text so far that stood in it before vote on what follows, one vote per place. How often such
a vote is right depends on the length of the ending and on how often it stood: that is learned online from the target's
picks.

The source fills the tree at once, then adds what followed before below nodes of other sources.

Source: prompt look-up decoding (https://github.com/apoorvumang/prompt-lookup-decoding), here over a suffix automaton
(as SAM decoding, arXiv 2411.10666) and with learned probabilities, so that it merges with a draft model's candidates.

Places of a text that share an ending vote for what followed them. One cell per length of the ending, number of places,
share of the votes and range of temperatures counts how often such a candidate is picked; it begins with a prior.

`SuffixAutomaton` says what followed the longest endings of a text where they stood before:

    state     all substrings that end at the same places; `length` is that of the longest of them
    link      the state of the longest ending that stands in more places
    count     at how many places the state's strings end

Appending a token takes constant time on average, so that a text is indexed while it is written. Counts are kept up to
date along the links, at most `COUNTED` of them per token: in "a a a a …" a token has as many endings as the text has
tokens. Source: Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from client.draft.search.calibration import TEMPERATURES
from client.draft.search.source import Places, Search, Source
from client.draft.search.tree import Lesson, Picks, TokenTree
from swarm.protocol.messages import Sampling

T = TypeVar("T")


class Learner(Protocol[T]):
    """Learns from what it proposed."""

    def learn(self, proposals: dict[int | None, T], picks: Picks, others: Picks) -> None:
        """Learn from the picks after the nodes of one tree, of which None is the root.

        Args:
            proposals: what it proposed below nodes.
            picks: after nodes that the text went through.
            others: after nodes on branches that the text left.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProposalLesson(Generic[T]):
    """What one source proposed below the nodes of a settled tree.

    Attributes:
        learner: learns from it.
        places: as in `client.draft.search.source`.
        proposed: by node of the search; None where the source was not asked.
    """

    learner: Learner[T]
    places: Places
    proposed: Callable[[int], T | None]

    def learn(self, picks: Picks, others: Picks) -> None:
        """Pass on what was proposed and what was picked."""
        self.learner.learn(self.proposals((*picks, *others)), picks, others)

    def proposals(self, nodes: Iterable[int | None]) -> dict[int | None, T]:
        """What was proposed below some of the settled tree's nodes."""
        found = ((node, self.proposed(self.places[node])) for node in nodes)
        return {node: proposal for node, proposal in found if proposal is not None}


PLACES = (1, 2, 4)
"""Lower ends of the ranges of places that vote."""
SHARES = (0.3, 0.6, 0.99)
"""Upper ends of the ranges of shares; the last range has none."""
MEAN_SHARES = (0.15, 0.45, 0.8, 1.0)
"""A typical share of each range, for priors."""
PRIOR_WEIGHT = 3.0
"""Labels that the prior counts for."""
MEMORY = 100.0
"""Labels that a cell remembers: beyond, old ones fade."""
CARRIED = 16.0
"""Of these, labels that count in another text: what repeats itself in one need not in the next."""

CountCell = tuple[int, int, int, int]
"""A cell's indices: temperature range, length, places, share."""


class CountCalibrator:
    """The probability that the target picks a candidate, by the candidate's cell.

    Attributes:
        tried: [temperature range, length, places, share], labels per cell, fading.
        right: of the same shape, those whose candidate was picked.
    """

    def __init__(self, lengths: Sequence[int], prior: NDArray[np.float64]) -> None:
        """Make one.

        Args:
            lengths: lower ends of the ranges of an ending's length, rising.
            prior: the first probabilities, of a shape that broadcasts to that of `tried`.
        """
        shape = (len(TEMPERATURES) + 1, len(lengths), len(PLACES), len(SHARES) + 1)
        self._lengths = tuple(lengths)
        self._prior = np.broadcast_to(prior, shape)
        self.tried = np.zeros(shape)
        self.right = np.zeros(shape)
        self._cached: dict[CountCell, float] = {}  # until a label changes them: every node of a tree asks

    def cell(self, temperature: float, length: int, places: int, share: float) -> CountCell:
        """The cell of a candidate.

        Args:
            temperature: of the target's picks.
            length: tokens of the shared ending.
            places: how many vote.
            share: of the votes that the candidate has.
        """
        return (
            bisect_left(TEMPERATURES, temperature),
            bisect_right(self._lengths, length) - 1,
            bisect_right(PLACES, places) - 1,
            bisect_left(SHARES, share),
        )

    def probability(self, cell: CountCell) -> float:
        """How often the target picks such a candidate."""
        known = self._cached.get(cell)
        if known is None:
            right, tried = self.right[cell] + PRIOR_WEIGHT * self._prior[cell], self.tried[cell] + PRIOR_WEIGHT
            known = self._cached[cell] = float(right / tried)
        return known

    def learn(self, cell: CountCell, *, hit: bool) -> None:
        """Count a label: whether the target picked such a candidate."""
        if self.tried[cell] >= MEMORY:
            self.tried[cell] *= 1 - 1 / MEMORY
            self.right[cell] *= 1 - 1 / MEMORY
        self.tried[cell] += 1
        self.right[cell] += hit
        self._cached.pop(cell, None)

    def fade(self) -> None:
        """Another text begins: reduce every cell to at most `CARRIED` labels."""
        kept = CARRIED / np.maximum(self.tried, CARRIED)
        self.tried *= kept
        self.right *= kept
        self._cached.clear()


COUNTED = 64
"""Links along which one token updates counts, at most."""


class SuffixAutomaton:
    """All substrings of a growing text of token ids.

    Attributes:
        next: per state, the state that each token leads to.
        link: per state, see the module; −1 for the root.
        length: per state, in tokens.
        count: per state, places.
    """

    ROOT = 0

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]
        self._last = self.ROOT

    def append(self, token: int) -> None:
        """Add the text's next token."""
        last, added = self._last, self._state({}, self.length[self._last] + 1)
        while last >= 0 and token not in self.next[last]:
            self.next[last][token] = added
            last = self.link[last]
        if last < 0:
            self.link[added] = self.ROOT
        else:
            after = self.next[last][token]
            self.link[added] = after if self.length[after] == self.length[last] + 1 else self._split(last, token)
        self._last = added
        self._count(added)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add the text's next tokens."""
        for token in tokens:
            self.append(token)

    @property
    def ending(self) -> int:
        """The state of the longest ending that stood somewhere before; the root where the last token is new."""
        return max(self.link[self._last], self.ROOT)

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Where an ending of `length` tokens in `state` leads when `token` follows: a state and the new length."""
        while state != self.ROOT and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        following = self.next[state].get(token)
        return (self.ROOT, 0) if following is None else (following, length + 1)

    def _state(self, following: dict[int, int], length: int) -> int:
        self.next.append(following)
        self.link.append(-1)
        self.length.append(length)
        self.count.append(0)
        return len(self.length) - 1

    def _split(self, last: int, token: int) -> int:
        """Split the state that `token` leads to: its shorter strings now end in one place more than the longer ones."""
        after = self.next[last][token]
        part = self._state(dict(self.next[after]), self.length[last] + 1)
        self.link[part], self.count[part] = self.link[after], self.count[after]
        self.link[after] = part
        while last >= 0 and self.next[last].get(token) == after:
            self.next[last][token] = part
            last = self.link[last]
        return part

    def _count(self, state: int) -> None:
        for _ in range(COUNTED):
            if state <= self.ROOT:
                return
            self.count[state] += 1
            state = self.link[state]


MAX_TOKENS = 65_536
"""Of a longer text the automaton holds the last half of that, and what comes after."""
MAX_CHILDREN = 4
"""Candidates after one node, at most."""
MAX_ENDING_STATES = 3
"""States of the automaton that propose after one node: the longest ending's, then those of shorter ones."""
MIN_PATH_PROBABILITY = 0.02
"""A candidate whose path is less likely is not proposed."""
LENGTHS = (1, 2, 3, 4, 6, 9, 16, 32, 64)
"""Lower ends of the ranges of an ending's length in tokens that share a cell."""

LookupProposals = dict[int | None, tuple[tuple[int, CountCell], ...]]
"""What was proposed after nodes of a tree (None: its root): tokens and their calibration cells."""


@dataclass(frozen=True, slots=True)
class SuffixMatch:
    """An ending of a text that stood in it before.

    Attributes:
        state: of the automaton.
        length: tokens that matched.
    """

    state: int
    length: int


class Lookup:
    """One client's look-up; follows the text that it is asked about.

    Attributes:
        calibrator: from votes to probabilities.
    """

    def __init__(self) -> None:
        self.calibrator = CountCalibrator(LENGTHS, _prior())
        self._automaton = SuffixAutomaton()
        self._text: tuple[int, ...] = ()
        self._start = 0
        self._cached: dict[tuple[int, int, float], list[tuple[int, CountCell]]] = {}  # as long as the text is the same

    def fill(self, tree: TokenTree, sequence: Sequence[int], sampling: Sampling) -> LookupState:
        """Add candidates below a tree's root, which is the last token of `sequence`, and below these."""
        state = LookupState(self, tree, self._follow(tuple(sequence)), sampling.temperature)
        state.add_below(TokenTree.ROOT)
        return state

    def learn(self, proposals: LookupProposals, picks: Picks, others: Picks) -> None:
        """Learn from the picks after nodes that the text went through; other picks teach nothing here."""
        for node, pick in picks.items():
            for token, cell in proposals.get(node, ()):
                self.calibrator.learn(cell, hit=token == pick)

    def candidates(self, match: SuffixMatch, temperature: float) -> Iterator[tuple[int, CountCell, float]]:
        """Tokens that followed, the most frequent first, with their cells and probabilities; in sum at most 1."""
        state, length, left = match.state, match.length, 1.0
        proposed: set[int] = set()
        for _ in range(MAX_ENDING_STATES):
            if length == 0:
                return
            for token, cell in self._votes(state, length, temperature):
                if token not in proposed and len(proposed) < MAX_CHILDREN:
                    probability = min(self.calibrator.probability(cell), left)
                    left -= probability
                    proposed.add(token)
                    yield token, cell, probability
            state = max(self._automaton.link[state], SuffixAutomaton.ROOT)
            length = self._automaton.length[state]

    def step(self, match: SuffixMatch, token: int) -> SuffixMatch:
        """The longest ending that stood before, one token on."""
        return SuffixMatch(*self._automaton.step(match.state, match.length, token))

    def _votes(self, state: int, length: int, temperature: float) -> list[tuple[int, CountCell]]:
        """What followed endings of `length` tokens in a state: tokens, the most frequent first, and their cells."""
        key = state, length, temperature
        known = self._cached.get(key)
        if known is None:
            count, following = self._automaton.count, self._automaton.next[state]
            votes = heapq.nlargest(MAX_CHILDREN, [(count[after], token) for token, after in following.items()])
            total, cell = sum([count[after] for after in following.values()]), self.calibrator.cell
            known = [(token, cell(temperature, length, total, number / total)) for number, token in votes if number]
            self._cached[key] = known
        return known

    def _follow(self, sequence: tuple[int, ...]) -> SuffixMatch:
        """Index what is new of the text. Returns its longest ending that stood before."""
        end = self._start + len(self._text)
        goes_on = len(sequence) >= end and sequence[self._start : end] == self._text
        if not goes_on or len(sequence) > end:
            self._cached = {}
        if not goes_on:
            self.calibrator.fade()
        if not goes_on or len(sequence) - self._start > MAX_TOKENS:
            self._automaton, self._text = SuffixAutomaton(), ()
            self._start = end = max(len(sequence) - MAX_TOKENS // 2, 0)
        self._automaton.extend(sequence[end:])
        self._text = sequence[self._start :]
        state = self._automaton.ending
        return SuffixMatch(state, self._automaton.length[state])


class LookupState:
    """What a look-up proposes for one tree.

    Attributes:
        proposals: by node, to be learned from.
    """

    def __init__(self, lookup: Lookup, tree: TokenTree, root: SuffixMatch, temperature: float) -> None:
        self.proposals: LookupProposals = {}
        self._lookup = lookup
        self._tree = tree
        self._temperature = temperature
        self._held_back: dict[int, list[tuple[int, float]]] = {}  # by node, candidates whose path was too unlikely
        self._matches = {TokenTree.ROOT: root}

    def add_below(self, node: int) -> None:
        """Add what followed before below a node, whichever source added it; best first, within the tree's size.

        How far depends on the node's acceptance probability by now, which other sources may raise.
        """
        tree = self._tree
        waiting, max_tokens = [(-tree.acceptance_probs[node], node)], len(tree.tokens) + 2 * tree.max_nodes
        while waiting and len(tree.tokens) < max_tokens:
            negative, node = heapq.heappop(waiting)
            if tree.depths[node] >= tree.levels:
                continue
            left = self._held_back.pop(node, None) if node in self.proposals else self._propose(node)
            able = [(token, prob) for token, prob in left or () if -negative * prob >= MIN_PATH_PROBABILITY]
            if left and len(able) < len(left):
                self._held_back[node] = left[len(able) :]
            tree.add_children(node, able)
            for token, probability in able:
                heapq.heappush(waiting, (negative * probability, tree.child(node, token)))

    def _propose(self, node: int) -> list[tuple[int, float]]:
        candidates = list(self._lookup.candidates(self._match(node), self._temperature))
        self.proposals[node] = tuple([(token, cell) for token, cell, _ in candidates])
        return sorted([(token, prob) for token, _, prob in candidates], key=lambda candidate: -candidate[1])

    def _match(self, node: int) -> SuffixMatch:
        path = []
        while node not in self._matches:
            path.append(node)
            parent = self._tree.parents[node]
            assert parent is not None, "the root has its match"
            node = parent
        match = self._matches[node]
        for node in reversed(path):
            match = self._matches[node] = self._lookup.step(match, self._tree.tokens[node])
        return match


class LookupSource(Source):
    """Proposes what followed before in the text itself."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._state: LookupState | None = None

    def begin(self, search: Search) -> bool:
        """Fill the tree from the text."""
        self._state = self._lookup.fill(search.tree, search.sequence, search.sampling)
        return False

    def expand(self, search: Search, nodes: Sequence[int]) -> bool:
        """Add candidates below nodes that other sources proposed, or gave a higher probability than it did."""
        assert self._state is not None, "a search begins first"
        for node in nodes:
            self._state.add_below(node)
        return False

    def lesson(self, places: Places) -> Lesson | None:
        """The pick after a node tells whether what was proposed there was right."""
        return None if self._state is None else ProposalLesson(self._lookup, places, self._state.proposals.get)


def _prior() -> NDArray[np.float64]:
    """[temperature range, length, places, share]: the colder the text, the more surely it repeats itself.

    Shaped after texts of the demo target at temperatures 0, 0.3, 0.7 and 1.
    """
    lengths = np.array(LENGTHS, dtype=np.float64)[:, None, None]
    places, shares = np.array(PLACES, dtype=np.float64)[:, None], np.array(MEAN_SHARES)
    prior = np.empty((len(TEMPERATURES) + 1, len(LENGTHS), len(PLACES), len(MEAN_SHARES)))
    prior[:] = 0.9 * lengths / (lengths + 2) * (places + 1) / (places + 2) * shares
    prior[1] = 0.85 * lengths / (lengths + 1) * shares
    prior[0] = 0.98 * lengths**2 / (lengths**2 + 4) * shares
    return prior
