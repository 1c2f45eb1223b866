"""Look-up: a text often goes on as it did the last time it stood here. A source of candidates without a model. Pure.

The longest endings of the text so far that stood in it before vote on what follows, one vote per place. How far such a
vote is to be believed depends on how long the ending is and how often it stood: that is learned online from the
target's picks, one cell per length, places, share of the votes, and range of temperatures.

Source: prompt look-up decoding (https://github.com/apoorvumang/prompt-lookup-decoding), here over a suffix automaton
(as SAM decoding, arXiv 2411.10666) and with learned chances, so that it merges with a draft model's candidates.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client.drafting.search.temperatures import TEMPERATURES
from client.drafting.search.tree import Picks, TokenTree
from client.drafting.sources.suffix_automaton import SuffixAutomaton
from client.drafting.sources.vote_calibration import MEAN_SHARES, PLACES, CountCalibrator, CountCell
from swarm.protocol.messages import Sampling

MOST_TOKENS = 65_536
"""Of a longer text the automaton holds the last half of that and what comes after."""
CHILDREN = 4
"""Most candidates at one place."""
ENDINGS = 3
"""Where the longest ending leaves room, shorter ones that stood elsewhere too propose as well."""
LEAST_CHANCE = 0.02
"""Of a path: what is less likely is not proposed."""
LENGTHS = (1, 2, 3, 4, 6, 9, 16, 32, 64)
"""Of endings that vote alike: at least so many tokens."""

Seen = dict[int | None, tuple[tuple[int, CountCell], ...]]
"""What was proposed after nodes of a tree (None: its root): tokens and the cells of their chances."""


@dataclass(frozen=True, slots=True)
class SuffixMatch:
    """An ending of a text: a state of the automaton, and how many tokens of it matched."""

    state: int
    length: int


class Lookup:
    """One client's look-up; follows the text that it is asked about."""

    def __init__(self) -> None:
        self.votes = CountCalibrator(LENGTHS, _prior())
        self._automaton = SuffixAutomaton()
        self._text: tuple[int, ...] = ()
        self._start = 0
        self._voted: dict[tuple[int, int, float], list[tuple[int, CountCell]]] = {}  # as long as the text is the same

    def fill(self, tree: TokenTree, sequence: Sequence[int], sampling: Sampling) -> LookupState:
        """Add what it knows below a tree's root, which is the last token of `sequence`."""
        filling = LookupState(self, tree, self._follow(tuple(sequence)), sampling.temperature)
        filling.below(TokenTree.ROOT)
        return filling

    def learn(self, seen: Seen, picks: Picks, others: Picks) -> None:
        """Take labels: what the target picked after nodes that the text went through."""
        for node, pick in picks.items():
            for token, cell in seen.get(node, ()):
                self.votes.learn(cell, hit=token == pick)

    def candidates(self, place: SuffixMatch, temperature: float) -> Iterator[tuple[int, CountCell, float]]:
        """Tokens that followed, the most frequent first, with their cells and chances; in sum at most 1."""
        state, length, left = place.state, place.length, 1.0
        proposed: set[int] = set()
        for _ in range(ENDINGS):
            if length == 0:
                return
            for token, cell in self._votes(state, length, temperature):
                if token not in proposed and len(proposed) < CHILDREN:
                    chance = min(self.votes.chance(cell), left)
                    left -= chance
                    proposed.add(token)
                    yield token, cell, chance
            state = max(self._automaton.link[state], SuffixAutomaton.ROOT)
            length = self._automaton.length[state]

    def step(self, place: SuffixMatch, token: int) -> SuffixMatch:
        """The longest ending that stood before, one token on."""
        return SuffixMatch(*self._automaton.step(place.state, place.length, token))

    def _votes(self, state: int, length: int, temperature: float) -> list[tuple[int, CountCell]]:
        """What followed endings of such a length, in a state: tokens, the most frequent first, and their cells."""
        key = state, length, temperature
        known = self._voted.get(key)
        if known is None:
            count, following = self._automaton.count, self._automaton.next[state]
            votes = heapq.nlargest(CHILDREN, [(count[after], token) for token, after in following.items()])
            total, cell = sum([count[after] for after in following.values()]), self.votes.cell
            known = [(token, cell(temperature, length, total, number / total)) for number, token in votes if number]
            self._voted[key] = known
        return known

    def _follow(self, sequence: tuple[int, ...]) -> SuffixMatch:
        """Index what is new of the text; the longest ending that stood before."""
        end = self._start + len(self._text)
        goes_on = len(sequence) >= end and sequence[self._start : end] == self._text
        if not goes_on or len(sequence) > end:
            self._voted = {}
        if not goes_on:
            self.votes.fade()
        if not goes_on or len(sequence) - self._start > MOST_TOKENS:
            self._automaton, self._text = SuffixAutomaton(), ()
            self._start = end = max(len(sequence) - MOST_TOKENS // 2, 0)
        self._automaton.extend(sequence[end:])
        self._text = sequence[self._start :]
        state = self._automaton.ending
        return SuffixMatch(state, self._automaton.length[state])


class LookupState:
    """What a look-up says of one tree.

    seen: what it proposed, by node, to be learned from.
    """

    def __init__(self, lookup: Lookup, tree: TokenTree, root: SuffixMatch, temperature: float) -> None:
        self.seen: Seen = {}
        self._lookup = lookup
        self._tree = tree
        self._temperature = temperature
        self._unsaid: dict[int, list[tuple[int, float]]] = {}
        self._places = {TokenTree.ROOT: root}

    def below(self, node: int) -> None:
        """Add what followed before where this node stands, whoever proposed it; best first, within the tree's size.

        How far depends on the node's chance by now: others may know better than the look-up that it is on its way.
        """
        tree = self._tree
        waiting, most = [(-tree.chances[node], node)], len(tree.tokens) + 2 * tree.nodes
        while waiting and len(tree.tokens) < most:
            negative, node = heapq.heappop(waiting)
            if tree.depths[node] >= tree.levels:
                continue
            unsaid = self._unsaid.pop(node, None) if node in self.seen else self._ask(node)
            able = [(token, chance) for token, chance in unsaid or () if -negative * chance >= LEAST_CHANCE]
            if unsaid and len(able) < len(unsaid):
                self._unsaid[node] = unsaid[len(able) :]
            tree.add_children(node, able)
            for token, chance in able:
                heapq.heappush(waiting, (negative * chance, tree.child(node, token)))

    def _ask(self, node: int) -> list[tuple[int, float]]:
        candidates = list(self._lookup.candidates(self._place(node), self._temperature))
        self.seen[node] = tuple([(token, cell) for token, cell, _ in candidates])
        return sorted([(token, chance) for token, _, chance in candidates], key=lambda said: -said[1])

    def _place(self, node: int) -> SuffixMatch:
        path = []
        while node not in self._places:
            path.append(node)
            parent = self._tree.parents[node]
            assert parent is not None, "the root has its place"
            node = parent
        place = self._places[node]
        for node in reversed(path):
            place = self._places[node] = self._lookup.step(place, self._tree.tokens[node])
        return place


def _prior() -> NDArray[np.float64]:
    """[temperature range, length, places, share]: the colder the text, the more surely it repeats itself.

    As texts of the demo target do at 0, 0.3, 0.7 and 1.
    """
    lengths = np.array(LENGTHS, dtype=np.float64)[:, None, None]
    places, shares = np.array(PLACES, dtype=np.float64)[:, None], np.array(MEAN_SHARES)
    prior = np.empty((len(TEMPERATURES) + 1, len(LENGTHS), len(PLACES), len(MEAN_SHARES)))
    prior[:] = 0.9 * lengths / (lengths + 2) * (places + 1) / (places + 2) * shares
    prior[1] = 0.85 * lengths / (lengths + 1) * shares
    prior[0] = 0.98 * lengths**2 / (lengths**2 + 4) * shares
    return prior
