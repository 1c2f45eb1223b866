"""What sources without a model learn from: what they proposed, and what the target picked there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from client.drafting.search.source import Places
from client.drafting.search.tree import Picks

T = TypeVar("T")


class Learner(Protocol[T]):
    """Learns from what it proposed."""

    def learn(self, seen: dict[int | None, T], picks: Picks, others: Picks) -> None:
        """Take labels: what the target picked after nodes that the text went through, and after others."""
        ...


@dataclass(frozen=True, slots=True)
class ProposalLesson(Generic[T]):
    """What was proposed below the nodes of a settled tree.

    proposed: what was below a node of the search, None where nobody asked.
    """

    pupil: Learner[T]
    places: Places
    proposed: Callable[[int], T | None]

    def learn(self, picks: Picks, others: Picks) -> None:
        """How often it was right."""
        self.pupil.learn(self.seen((*picks, *others)), picks, others)

    def seen(self, nodes: Iterable[int | None]) -> dict[int | None, T]:
        """What was proposed below some of the settled tree's nodes."""
        said = ((node, self.proposed(self.places[node])) for node in nodes)
        return {node: told for node, told in said if told is not None}
