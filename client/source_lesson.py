"""What sources without a model learn from: what they proposed, and what the target picked there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from swarm.tree import Picks

T = TypeVar("T")


class Pupil(Protocol[T]):
    """Learns from what it proposed."""

    def learn(self, seen: dict[int | None, T], picks: Picks, others: Picks) -> None:
        """Take labels: what the target picked after nodes that the text went through, and after others."""
        ...


@dataclass(frozen=True, slots=True)
class ProposalLesson(Generic[T]):
    """What was proposed below the nodes of a settled tree."""

    pupil: Pupil[T]
    seen: dict[int | None, T]

    def learn(self, picks: Picks, others: Picks) -> None:
        """How often it was right."""
        self.pupil.learn(self.seen, picks, others)
