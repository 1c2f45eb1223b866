"""What sources without a model learn from: what they proposed, and what the target picked there. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from client.drafting.search.source import Places
from client.drafting.search.tree import Picks

T = TypeVar("T")


class Learner(Protocol[T]):
    """Learns from what it proposed."""

    def learn(self, proposals: dict[int | None, T], picks: Picks, others: Picks) -> None:
        """Learn from the picks after the nodes of one tree, of which None is the root.

        Args:
            proposals: what it proposed below nodes.
            picks: after nodes that the text went through.
            others: after nodes on branches that the text left.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProposalLesson(Generic[T]):
    """What one source proposed below the nodes of a settled tree.

    Attributes:
        learner: learns from it.
        places: as in `client.drafting.search.source`.
        proposed: by node of the search; None where the source was not asked.
    """

    learner: Learner[T]
    places: Places
    proposed: Callable[[int], T | None]

    def learn(self, picks: Picks, others: Picks) -> None:
        """Pass on what was proposed and what was picked."""
        self.learner.learn(self.proposals((*picks, *others)), picks, others)

    def proposals(self, nodes: Iterable[int | None]) -> dict[int | None, T]:
        """What was proposed below some of the settled tree's nodes."""
        found = ((node, self.proposed(self.places[node])) for node in nodes)
        return {node: proposal for node, proposal in found if proposal is not None}
