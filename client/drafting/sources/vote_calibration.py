"""What votes are stop_rule: how often the target picks what places voted for that have an ending in common. Pure.

One cell per length of the ending, number of votes, share of them, and range of temperatures; each learns online from
the target's picks and begins with a guess.
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
SHARES = (0.3, 0.6, 0.99)
MEAN_SHARES = (0.15, 0.45, 0.8, 1.0)
"""Of the candidates up to each share, and of those above the last."""
PRIOR_WEIGHT = 3.0
MEMORY = 100.0
"""Labels that a cell remembers: beyond, old ones fade."""
CARRIED = 16.0
"""Of these, labels that count in another text: what repeats itself in one need not in the next."""

CountCell = tuple[int, int, int, int]


class CountCalibrator:
    """The chance of a candidate by its cell.

    tried, right: [temperature range, length, places, share], numbers of labels.
    """

    def __init__(self, lengths: Sequence[int], prior: NDArray[np.float64]) -> None:
        """lengths: least one of each range, rising. prior: the first guess, of a shape that broadcasts to `tried`'s."""
        shape = (len(TEMPERATURES) + 1, len(lengths), len(PLACES), len(SHARES) + 1)
        self._lengths = tuple(lengths)
        self._prior = np.broadcast_to(prior, shape)
        self.tried = np.zeros(shape)
        self.right = np.zeros(shape)
        self._chances: dict[CountCell, float] = {}  # until a label changes them: every node of a tree asks

    def cell(self, temperature: float, length: int, places: int, share: float) -> CountCell:
        """Where a candidate belongs."""
        return (
            bisect_left(TEMPERATURES, temperature),
            bisect_right(self._lengths, length) - 1,
            bisect_right(PLACES, places) - 1,
            bisect_left(SHARES, share),
        )

    def chance(self, cell: CountCell) -> float:
        """How often the target picks such a candidate."""
        known = self._chances.get(cell)
        if known is None:
            right, tried = self.right[cell] + PRIOR_WEIGHT * self._prior[cell], self.tried[cell] + PRIOR_WEIGHT
            known = self._chances[cell] = float(right / tried)
        return known

    def learn(self, cell: CountCell, *, hit: bool) -> None:
        """A label."""
        if self.tried[cell] >= MEMORY:
            self.tried[cell] *= 1 - 1 / MEMORY
            self.right[cell] *= 1 - 1 / MEMORY
        self.tried[cell] += 1
        self.right[cell] += hit
        self._chances.pop(cell, None)

    def fade(self) -> None:
        """Another text begins."""
        kept = CARRIED / np.maximum(self.tried, CARRIED)
        self.tried *= kept
        self.right *= kept
        self._chances.clear()
