"""A source without a model: whatever knows at once what may follow a text, such as the look-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from client.source import Places, Search, Source
from swarm.messages import Sampling
from swarm.tree import Lesson, Picks, TokenTree

T = TypeVar("T")


class Pupil(Protocol[T]):
    """Learns from what it proposed."""

    def learn(self, seen: dict[int | None, T], picks: Picks, others: Picks) -> None:
        """Take labels: what the target picked after nodes that the text went through, and after others."""
        ...


class Filler(Pupil[T], Protocol):
    """Fills a tree by itself; `swarm.lookup.Lookup` is one."""

    def fill(self, tree: TokenTree, sequence: Sequence[int], sampling: Sampling) -> dict[int | None, T]:
        """Add what it knows below a tree's root, the last token of `sequence`; what it proposed, by node of `tree`."""
        ...


@dataclass(frozen=True, slots=True)
class FillLesson(Generic[T]):
    """What was proposed below the nodes of a settled tree."""

    pupil: Pupil[T]
    seen: dict[int | None, T]

    def learn(self, picks: Picks, others: Picks) -> None:
        """How often it was right."""
        self.pupil.learn(self.seen, picks, others)


class FillSource(Source, Generic[T]):
    """Fills the tree when a search begins, and again when a larger one is wanted."""

    def __init__(self, filler: Filler[T]) -> None:
        self._filler = filler
        self._seen: dict[int | None, T] = {}

    def begin(self, search: Search) -> bool:
        """Everything that it knows, for nothing."""
        self._seen = {}
        self.widen(search)
        return False

    def widen(self, search: Search) -> None:
        """What a larger tree has room for."""
        self._seen |= self._filler.fill(search.tree, search.sequence, search.sampling)

    def lesson(self, places: Places) -> Lesson | None:
        """Whether it was right."""
        seen = {places[node]: proposed for node, proposed in self._seen.items() if node in places}
        return FillLesson(self._filler, seen)
