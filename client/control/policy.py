"""How many tree nodes the next sweep carries. Pure: the seam between the decode loop and who chooses K."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from client.drafting.search.stopping import NO_LIMIT, StopRule
from client.drafting.search.tree import DraftTree
from swarm.routing.costs import RouteForecast

SWEEPS_IN_FLIGHT = 64
"""Sweeps that a client asks to have unanswered. With 24 these ran out where hops are quick beside the delay."""


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """How many nodes, and why.

    predicted_ms: of the sweep, without its drafting, None where nobody predicts. is_whole: so many are drafted,
    to learn what they promise, whatever that takes. is_trial: and sent, to learn what they cost. chunk: nodes of the
    first sweep, where they travel in several; None: all of them.
    """

    nodes: int
    predicted_ms: float | None
    reason: str
    is_whole: bool = False
    is_trial: bool = False
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class PipelineState:
    """What is on its way. sweeps: unanswered. busy_ms: until another would wait at no hop, as far as predicted.

    reply_ms: until the next reply is due, below 0 where it is late; infinite where nobody can tell. nodes: of them all.
    """

    sweeps: int
    busy_ms: float
    reply_ms: float = math.inf
    nodes: int = 0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What a sweep keeps busy. slot_ms: a hop, or the link behind it. through_ms: all of them, one after another."""

    slot_ms: float = 0.0
    through_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class SweepMeasurement:
    """What a sweep took, in milliseconds, and brought.

    nodes: K. waited, computed: at all `hops` together, with what they compute for messages. promised, brought: tokens
    from its tree, the sum of the nodes' chances and what came of them. alone: whether it met none of its own kind at
    any hop. network: one way over all links, as pings say that it took at best lately; 0 where one is not known.
    sent: when, by any clock; None where what a generation before left was on its way. first: until it left the first
    hop. behind: how many of our sweeps were unanswered when it was sent, the last of them right before. is_prompt:
    whether it carried a part of the prompt, `nodes` + 1 tokens of it. each_waited, each_computed: hop by hop; empty
    where nobody says.
    """

    nodes: int
    total_ms: float
    waited_ms: float
    computed_ms: float
    hops: int = 1
    promised: float = 0.0
    brought: float = 0.0
    alone: bool = True
    network_ms: float = 0.0
    sent_ms: float | None = None
    first_ms: float = 0.0
    behind: int = 0
    is_prompt: bool = False
    each_waited_ms: tuple[float, ...] = ()
    each_computed_ms: tuple[float, ...] = ()

    @property
    def links_ms(self) -> float:
        """All that no hop computed or waited for."""
        return max(self.total_ms - self.waited_ms - self.computed_ms, 0.0)


class SpeculationPolicy(Protocol):
    """Chooses K before each sweep. route: names the chain; what sweeps cost over another one is another matter."""

    @property
    def most(self) -> int:
        """Most nodes of a tree."""
        ...

    def expect(self, route: Hashable, prospect: RouteForecast) -> None:
        """What sweeps should cost on a route, as its machines claim; counts until something is measured."""
        ...

    def plan(self, route: Hashable, temperature: float, room: int) -> SpeculationPlan:
        """How many nodes below the pending token to draft, at most `room`, which is at least 1; 0 is plain decoding."""
        ...

    def worth(self, route: Hashable, temperature: float, planned: SpeculationPlan) -> StopRule:
        """What a node and a round of drafting must bring."""
        ...

    def patience_ms(self, route: Hashable, nodes: int) -> float:
        """For how long a sweep should wait for a tree of so many nodes, or a reply for one that grows."""
        ...

    def cut(
        self, route: Hashable, temperature: float, chances: Sequence[float], planned: SpeculationPlan
    ) -> SpeculationPlan:
        """How many of a tree's nodes to send, given their chances, which fall."""
        ...

    def more(self, route: Hashable, temperature: float, room: int, ahead: PipelineState) -> int:
        """Most further nodes that another sweep may have while some are on their way; 0 to wait for those."""
        ...

    def least(self, route: Hashable, temperature: float) -> float:
        """A node of a lower chance is not worth being in another sweep."""
        ...

    def has_time(self, ahead: PipelineState) -> bool:
        """Whether another round of drafting fits before hops can take another sweep."""
        ...

    def busy(self, route: Hashable, nodes: int) -> Occupancy:
        """For how long so many nodes keep hops busy."""
        ...

    def further(self, route: Hashable, chances: Sequence[float], ahead: PipelineState) -> SpeculationPlan:
        """How many of such nodes, best first, another sweep is to carry; 0 where none is worth the hops' time."""
        ...

    def drafted(self, temperature: float, tree: DraftTree, planned: SpeculationPlan, draft_ms: float) -> None:
        """A tree was drafted."""
        ...

    def spent(self, route: Hashable, spent: SweepMeasurement) -> None:
        """A sweep came back."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """The same K for every sweep, and the same number in flight."""

    most: int
    in_flight: int = 1

    def expect(self, route: Hashable, prospect: RouteForecast) -> None:
        """Nothing is weighed."""

    def plan(self, route: Hashable, temperature: float, room: int) -> SpeculationPlan:
        """`most`, as far as there is room."""
        return SpeculationPlan(min(self.most, room), None, "as asked")

    def worth(self, route: Hashable, temperature: float, planned: SpeculationPlan) -> StopRule:
        """Whatever is drafted is sent."""
        return NO_LIMIT

    def patience_ms(self, route: Hashable, nodes: int) -> float:
        """Whatever is asked for is waited for."""
        return math.inf

    def cut(
        self, route: Hashable, temperature: float, chances: Sequence[float], planned: SpeculationPlan
    ) -> SpeculationPlan:
        """All of it."""
        return SpeculationPlan(len(chances), None, "as asked")

    def more(self, route: Hashable, temperature: float, room: int, ahead: PipelineState) -> int:
        """As many again, until as many sweeps as asked are on their way."""
        return min(self.most, room) if ahead.sweeps < self.in_flight else 0

    def least(self, route: Hashable, temperature: float) -> float:
        """Whatever is drafted is sent."""
        return 0.0

    def has_time(self, ahead: PipelineState) -> bool:
        """Nothing is predicted."""
        return False

    def busy(self, route: Hashable, nodes: int) -> Occupancy:
        """Nothing is predicted."""
        return Occupancy()

    def further(self, route: Hashable, chances: Sequence[float], ahead: PipelineState) -> SpeculationPlan:
        """Whatever there is."""
        return SpeculationPlan(len(chances), None, "as asked")

    def drafted(self, temperature: float, tree: DraftTree, planned: SpeculationPlan, draft_ms: float) -> None:
        """Nothing is learned."""

    def spent(self, route: Hashable, spent: SweepMeasurement) -> None:
        """Nothing is learned."""
