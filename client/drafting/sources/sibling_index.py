"""Siblings: what the target picked behind other branches that end alike. A source without a model. Pure.

Most nodes that a sweep verifies lie on branches that the text never takes, and their picks seem lost. But a branch that
died differs from the text in few tokens, and what the target said behind it, it often says behind the right one too.

    sampled   the pick at a position hangs on the noise there (`swarm.inference.gumbel`), so that contexts count at this
    position
              alone: two behind a wrong word the target often says what it would have said behind the right one
    greedy    there is no noise: what was picked after a context is picked after it again wherever it stands, also when
              the text has passed
    chance    the more of their last 1 … `MOST_LENGTH` tokens a node and the contexts share, the surer; learned
              (`client.drafting.sources.vote_calibration`)

So a draft that was wrong gets the target's own word on what follows, which is most worth when many sweeps are verified
per trip. Token Recycling (arXiv 2408.08696, `client.drafting.sources.recycling_table`) uses what died too, by its last
token alone.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from client.drafting.search.temperatures import TEMPERATURES
from client.drafting.search.tree import Picks
from client.drafting.sources.vote_calibration import MEAN_SHARES, CountCalibrator, CountCell
from swarm.protocol.messages import Sampling

MOST_LENGTH = 8
"""Tokens of a context that are compared."""
CHILDREN = 4
"""Most candidates at one place."""
MOST_PICKS = 16_384
"""Of a sampled text that are kept; it soon passes their positions."""
MOST_ENDINGS = 65_536
"""Of greedy contexts that are kept: what came longest ago falls out."""
CELLS_KEPT = 8_192
"""Picks after contexts whose cells are remembered: every node of every tree asks."""
LATE_PICKS = 16
"""So many of the contexts with one ending vote, those that came last."""
PRIOR = (0.08, 0.5, 0.68, 0.78, 0.88, 0.9, 0.9, 0.9, 0.9)
GREEDY_PRIOR = (0.02, 0.3, 0.5, 0.65, 0.78, 0.82, 0.86, 0.88, 0.9)
"""The chance that all contexts which share so many tokens are right, until picks are known: that of the demo pair."""

Ending = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Context:
    """A place where the target picks. ending: the last `MOST_LENGTH` tokens before it, or fewer where a text begins."""

    position: int
    ending: Ending


@dataclass(frozen=True, slots=True)
class Proposal:
    """What was proposed at a spot: tokens, and the cells of their chances."""

    spot: Context
    proposed: tuple[tuple[int, CountCell], ...] = ()


class SuffixIndex:
    """What was picked after contexts, by how they end. Bounded: the endings that came longest ago fall out."""

    def __init__(self, shortest: int) -> None:
        """shortest: tokens that a context must share to say anything; 0 is none."""
        self._shortest = shortest
        self._after: OrderedDict[Ending, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._after)

    def put(self, ending: Ending, pick: int) -> bool:
        """After such a context this was picked; whether that is news."""
        if self._after.get(ending, ())[-1:] == (pick,):
            return False
        for length in range(self._shortest, len(ending) + 1):
            last = _last(ending, length)
            self._after[last] = (*self._after.pop(last, ()), pick)[-LATE_PICKS:]
        while len(self._after) > MOST_ENDINGS:
            self._after.popitem(last=False)
        return True

    def after(self, ending: Ending) -> Iterator[tuple[int, Ending]]:
        """Tokens shared, most first, and what was picked after such contexts."""
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
    """One client's; knows the text at hand only, but keeps what it learned of whom to believe."""

    def __init__(self) -> None:
        self.votes = CountCalibrator(range(MOST_LENGTH + 1), _prior())
        self._cells = lru_cache(maxsize=CELLS_KEPT)(self._cells_of)
        self._greedy = SuffixIndex(shortest=1)
        self._at: dict[int, SuffixIndex] = {}
        self._ahead: Counter[int] = Counter()
        self._text: tuple[int, ...] = ()
        self._sampling: Sampling | None = None

    @property
    def picks(self) -> int:
        """How many it was told of positions ahead of the text."""
        return self._ahead.total()

    def follow(self, sequence: tuple[int, ...], sampling: Sampling) -> None:
        """A search below this text begins: sampled positions that it has passed are forgotten, all in another text."""
        is_greedy = self._is_greedy and sampling.temperature == 0  # whatever its seed, as the turns of a chat
        goes_on = (is_greedy or sampling == self._sampling) and sequence[: len(self._text)] == self._text
        if not goes_on:
            self._greedy = SuffixIndex(shortest=1)
        for position in [known for known in self._ahead if not goes_on or known < len(sequence)]:
            del self._ahead[position]
            self._at.pop(position, None)
        self._text, self._sampling = sequence, sampling

    def propose(self, spot: Context, temperature: float) -> tuple[Proposal, list[tuple[int, float]]]:
        """The likeliest tokens at a spot and their chances, in sum at most 1: what contexts picked that share most."""
        said, left = self._said_at(spot.position), 1.0
        proposed: dict[int, tuple[CountCell, float]] = {}
        for length, picks in said.after(spot.ending) if said is not None else ():
            for token, cell in self._cells(temperature, length, picks):
                if token not in proposed and len(proposed) < CHILDREN:
                    chance = min(self.votes.chance(cell), left)
                    proposed[token], left = (cell, chance), left - chance
            if len(proposed) == CHILDREN:
                break
        told = Proposal(spot, tuple((token, cell) for token, (cell, _) in proposed.items()))
        return told, [(token, chance) for token, (_, chance) in proposed.items()]

    def learn(self, seen: Mapping[int | None, Proposal], picks: Picks, others: Picks) -> None:
        """Take what the target picked: labels where the text went through, and what is picked where everywhere."""
        for node, pick in picks.items():
            for token, cell in seen[node].proposed if node in seen else ():
                self.votes.learn(cell, hit=token == pick)
        for node, pick in (*picks.items(), *others.items()):
            if node in seen:
                self._put(seen[node].spot, pick)

    def _cells_of(self, temperature: float, length: int, picks: Ending) -> list[tuple[int, CountCell]]:
        """Tokens that were picked after contexts which share so many, most often first, and where they belong."""
        counted = {pick: picks.count(pick) for pick in picks}  # few: quicker than a Counter
        votes, places = sorted(counted.items(), key=lambda vote: (-vote[1], vote[0])), len(picks)
        return [(token, self.votes.cell(temperature, length, places, number / places)) for token, number in votes]

    @property
    def _is_greedy(self) -> bool:
        return self._sampling is not None and self._sampling.temperature == 0

    def _said_at(self, position: int) -> SuffixIndex | None:
        return self._greedy if self._is_greedy else self._at.get(position)

    def _put(self, spot: Context, pick: int) -> None:
        is_ahead = spot.position >= len(self._text)
        if not self._is_greedy:
            if not is_ahead or self.picks >= MOST_PICKS:
                return
            self._at.setdefault(spot.position, SuffixIndex(shortest=0))
        said = self._said_at(spot.position)
        assert said is not None, "it was made"
        if said.put(spot.ending, pick) and is_ahead:
            self._ahead[spot.position] += 1


def spot_of(context: Sequence[int], position: int) -> Context:
    """Where the target picks the token at a position, after a context of which only the end matters."""
    return Context(position, tuple(context[-MOST_LENGTH:]))


def spot_after(spot: Context, token: int) -> Context:
    """Where the target picks the next token if it picks this one there."""
    return Context(spot.position + 1, (*spot.ending, token)[-MOST_LENGTH:])


def _last(ending: Ending, length: int) -> Ending:
    return ending[len(ending) - length :]


def _prior() -> NDArray[np.float64]:
    """[temperature range, length, places, share]."""
    lengths = np.array([GREEDY_PRIOR, *[PRIOR] * len(TEMPERATURES)])
    return np.asarray(lengths[:, :, None, None] * np.array(MEAN_SHARES))
