"""Siblings: what the target picked at the same position behind another branch. A source without a model. Pure.

Most nodes that a sweep verifies lie on branches that the text never takes, and their picks seem lost. But a branch that
died differs from the text in few tokens, and the pick at a position hangs on the same noise whatever came before it
(`swarm.noise`): what the target would have said two positions behind a wrong word it often says behind the right one.

    at[position]   of every context that was verified there: its pick, by the context's last 0 … `MOST_LENGTH` tokens
    chance         the more of these tokens a node shares with the contexts, the surer; learned (`swarm.votes`)

So a draft that was wrong gets the target's own word on what follows, which is most worth when many sweeps are verified
per trip. Greedy text has no noise and gains less. Token Recycling (arXiv 2408.08696, `swarm.recycling`) uses what died
too, by its last token alone and wherever it stood.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.messages import Sampling
from swarm.tree import Picks
from swarm.votes import MEAN_SHARES, Cell, Votes

MOST_LENGTH = 4
"""Tokens of a context that are compared."""
CHILDREN = 4
"""Most candidates at one place."""
MOST_PICKS = 16_384
"""That are kept at a time; the text soon passes their positions."""
PRIOR = (0.08, 0.5, 0.68, 0.78, 0.88)
"""The chance that all contexts which share so many tokens are right, until picks are known: that of the demo pair."""

Ending = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spot:
    """A place where the target picks. ending: the last `MOST_LENGTH` tokens before it, or fewer where a text begins."""

    position: int
    ending: Ending


@dataclass(frozen=True, slots=True)
class Told:
    """What was proposed at a spot: tokens, and the cells of their chances."""

    spot: Spot
    proposed: tuple[tuple[int, Cell], ...] = ()


class Siblings:
    """One client's; knows the text at hand only, but keeps what it learned of whom to believe."""

    def __init__(self) -> None:
        lengths = range(MOST_LENGTH + 1)
        self.votes = Votes(lengths, np.array(PRIOR)[:, None, None] * np.array(MEAN_SHARES))
        self._at: dict[int, dict[Ending, dict[int, int]]] = {}
        self._text: tuple[int, ...] = ()
        self._sampling: Sampling | None = None

    @property
    def picks(self) -> int:
        """How many are kept."""
        return sum(sum(there[()].values()) for there in self._at.values())

    def follow(self, sequence: tuple[int, ...], sampling: Sampling) -> None:
        """A search below this text begins: what it has passed is forgotten, and everything where it is another text."""
        goes_on = sampling == self._sampling and sequence[: len(self._text)] == self._text
        for position in [known for known in self._at if not goes_on or known < len(sequence)]:
            del self._at[position]
        self._text, self._sampling = sequence, sampling

    def propose(self, spot: Spot, temperature: float) -> tuple[Told, list[tuple[int, float]]]:
        """The likeliest tokens at a spot and their chances, in sum at most 1: what contexts picked that share most."""
        there, left = self._at.get(spot.position, {}), 1.0
        proposed: dict[int, tuple[Cell, float]] = {}
        for length in range(len(spot.ending), -1, -1):
            votes = there.get(_last(spot.ending, length), {})
            total = sum(votes.values())
            for token, number in sorted(votes.items(), key=lambda vote: (-vote[1], vote[0]))[:CHILDREN]:
                if token not in proposed and len(proposed) < CHILDREN:
                    cell = self.votes.cell(temperature, length, total, number / total)
                    chance = min(self.votes.chance(cell), left)
                    proposed[token], left = (cell, chance), left - chance
        told = Told(spot, tuple((token, cell) for token, (cell, _) in proposed.items()))
        return told, [(token, chance) for token, (_, chance) in proposed.items()]

    def learn(self, seen: Mapping[int | None, Told], picks: Picks, others: Picks) -> None:
        """Take what the target picked: labels where the text went through, and what is picked where everywhere."""
        for node, pick in picks.items():
            for token, cell in seen[node].proposed if node in seen else ():
                self.votes.learn(cell, hit=token == pick)
        ahead = [(seen[node].spot, pick) for node, pick in (*picks.items(), *others.items()) if node in seen]
        ahead = [(spot, pick) for spot, pick in ahead if spot.position >= len(self._text)]
        for spot, pick in ahead[: max(MOST_PICKS - self.picks, 0)]:
            self._put(spot, pick)

    def _put(self, spot: Spot, pick: int) -> None:
        there = self._at.setdefault(spot.position, {})
        for length in range(len(spot.ending) + 1):
            votes = there.setdefault(_last(spot.ending, length), {})
            votes[pick] = votes.get(pick, 0) + 1


def spot_of(context: Sequence[int], position: int) -> Spot:
    """Where the target picks the token at a position, after a context of which only the end matters."""
    return Spot(position, tuple(context[-MOST_LENGTH:]))


def _last(ending: Ending, length: int) -> Ending:
    return ending[len(ending) - length :]
