"""Who drafts for whom: one drafter for each generation that runs, for what a drafter remembers is of one text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from client.drafting.drafter import Drafter, NoDrafter

MOST_DRAFTERS = 4
"""Each has KV of its own; further generations run without a draft meanwhile."""


class Drafters:
    """A client's drafters, which share models and what was learned of whom to believe; made as they are needed."""

    def __init__(self, first: Drafter, another: Callable[[], Drafter] | None = None) -> None:
        """another: makes one like the first; by default there is one for everybody."""
        self.first = first
        self.all = [first]
        self._another = another
        self._lent: set[int] = set()

    @contextmanager
    def lend(self) -> Iterator[Drafter]:
        """One for a generation that runs now: the oldest that is free, for it knows most."""
        if self._another is None:
            yield self.first
            return
        place = next(number for number in range(MOST_DRAFTERS + 1) if number not in self._lent)
        if place == MOST_DRAFTERS:
            yield NoDrafter()
            return
        self._lent.add(place)
        try:
            if place == len(self.all):
                self.all.append(self._another())
            yield self.all[place]
        finally:
            self._lent.discard(place)
