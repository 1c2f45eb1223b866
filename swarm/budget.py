"""How many tree nodes the next sweep carries. Pure: the seam between the decode loop and who chooses K."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Choice:
    """How many nodes, and why.

    predicted_ms: of the sweep, without its drafting, None where nobody predicts. is_trial: to learn from it.
    """

    nodes: int
    predicted_ms: float | None
    reason: str
    is_trial: bool = False


@dataclass(frozen=True, slots=True)
class Worth:
    """When drafting on is not worth it, in tokens.

    least: a node of a lower chance will not be sent. per_round: what another round of drafting costs.
    """

    least: float = 0.0
    per_round: float = 0.0


EVERYTHING = Worth()


@dataclass(frozen=True, slots=True)
class Spent:
    """What a sweep took, in milliseconds, and brought.

    nodes: K. waited, computed: at all `hops` together. promised, brought: tokens from its tree, the sum of the nodes'
    chances and what came of them.
    """

    nodes: int
    total_ms: float
    waited_ms: float
    computed_ms: float
    hops: int = 1
    promised: float = 0.0
    brought: float = 0.0


class Budget(Protocol):
    """Chooses K before each sweep. route: names the chain; what sweeps cost over another one is another matter."""

    @property
    def most(self) -> int:
        """Most nodes of a tree."""
        ...

    def expect(self, route: Hashable, row_ms: float) -> None:
        """What one more node should cost on a route, as its machines claim; counts until something is measured."""
        ...

    def plan(self, route: Hashable, temperature: float, room: int) -> Choice:
        """How many nodes below the pending token to draft, at most `room`, which is at least 1; 0 is plain decoding."""
        ...

    def worth(self, route: Hashable, temperature: float, planned: Choice) -> Worth:
        """What a node and a round of drafting must bring."""
        ...

    def cut(self, route: Hashable, temperature: float, chances: Sequence[float], planned: Choice) -> Choice:
        """How many of a tree's nodes to send, given their chances, which fall."""
        ...

    def more(self, route: Hashable, temperature: float, room: int, left_ms: float) -> Choice:
        """How many further nodes to draft for another sweep while some are on their way; 0 to wait for those.

        left_ms: until the next answer should come.
        """
        ...

    def pays(self, route: Hashable, chances: Sequence[float]) -> bool:
        """Whether another sweep with such nodes is worth the hops' time."""
        ...

    def drafted(self, temperature: float, tree: DraftTree, planned: Choice, draft_ms: float) -> None:
        """A tree was drafted."""
        ...

    def spent(self, route: Hashable, spent: Spent) -> None:
        """A sweep came back."""
        ...


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """The same K for every sweep."""

    most: int

    def expect(self, route: Hashable, row_ms: float) -> None:
        """Nothing is weighed."""

    def plan(self, route: Hashable, temperature: float, room: int) -> Choice:
        """`most`, as far as there is room."""
        return Choice(min(self.most, room), None, "as asked")

    def worth(self, route: Hashable, temperature: float, planned: Choice) -> Worth:
        """Whatever is drafted is sent."""
        return EVERYTHING

    def cut(self, route: Hashable, temperature: float, chances: Sequence[float], planned: Choice) -> Choice:
        """All of it."""
        return Choice(len(chances), None, "as asked")

    def more(self, route: Hashable, temperature: float, room: int, left_ms: float) -> Choice:
        """One sweep at a time."""
        return Choice(0, None, "as asked")

    def pays(self, route: Hashable, chances: Sequence[float]) -> bool:
        """One sweep at a time."""
        return False

    def drafted(self, temperature: float, tree: DraftTree, planned: Choice, draft_ms: float) -> None:
        """Nothing is learned."""

    def spent(self, route: Hashable, spent: Spent) -> None:
        """Nothing is learned."""
