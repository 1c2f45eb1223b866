"""Look-up: a text often goes on as it did the last time it stood here. Needs no model.

The longest endings of the text so far that stood in it before vote on what follows, one vote per place. How often such
a vote is right depends on the length of the ending and on how often it stood: that is learned online from the target's
picks (`client.drafting.sources.vote_calibration`).

The source fills the tree at once, then adds what followed before below nodes of other sources.

Source: prompt look-up decoding (https://github.com/apoorvumang/prompt-lookup-decoding), here over a suffix automaton
(as SAM decoding, arXiv 2411.10666) and with learned probabilities, so that it merges with a draft model's candidates.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client.drafting.search.source import Places, Search, Source
from client.drafting.search.temperatures import TEMPERATURES
from client.drafting.search.tree import Lesson, Picks, TokenTree
from client.drafting.sources.lesson import ProposalLesson
from client.drafting.sources.suffix_automaton import SuffixAutomaton
from client.drafting.sources.vote_calibration import MEAN_SHARES, PLACES, CountCalibrator, CountCell
from swarm.protocol.messages import Sampling

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
