"""How often votes are right: the target's pick against what earlier places with the same ending voted for. Pure.

Places of a text that share an ending vote for what followed them. One cell per length of the ending, number of places,
share of the votes and range of temperatures counts how often such a candidate is picked; it begins with a prior.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import numpy as np

from client.drafting.search.temperatures import TEMPERATURES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

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
