"""Lends drafters: one per running generation, since a drafter's KV, look-up and cache are those of one text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from client.drafting.drafter import Drafter, NoDrafter

MAX_DRAFTERS = 4
"""Each has KV of its own; further generations decode plainly meanwhile."""


class Drafters:
    """A client's drafters, which share models and calibrations; made as they are needed.

    Attributes:
        first: the one that was loaded.
        all: those that were made so far.
    """

    def __init__(self, first: Drafter, make_another: Callable[[], Drafter] | None = None) -> None:
        """Start with one drafter; `make_another` makes more like it, without it all generations share the first."""
        self.first = first
        self.all = [first]
        self._make_another = make_another
        self._lent: set[int] = set()

    @contextmanager
    def lend(self) -> Iterator[Drafter]:
        """Lend one while a generation runs: the oldest that is free, or none when all are lent."""
        if self._make_another is None:
            yield self.first
            return
        place = next(number for number in range(MAX_DRAFTERS + 1) if number not in self._lent)
        if place == MAX_DRAFTERS:
            yield NoDrafter()
            return
        self._lent.add(place)
        try:
            if place == len(self.all):
                self.all.append(self._make_another())
            yield self.all[place]
        finally:
            self._lent.discard(place)
