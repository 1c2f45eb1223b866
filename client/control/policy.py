"""How many tree nodes the next sweep carries. Pure: the seam between the decode loop and who chooses K."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from client.drafting.search.stopping import NO_LIMIT, StopRule
from client.drafting.search.tree import DraftTree
from client.stats import SweepMeasurement
from swarm.routing.costs import RouteForecast

SWEEPS_IN_FLIGHT = 64
"""Sweeps that a client asks to have unanswered. With 24 these ran out where hops are quick beside the delay."""


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """How many nodes the next sweep carries, and why.

    Attributes:
        nodes: tree nodes below the pending token (K); 0 is plain decoding.
        predicted_ms: of the sweep, without its drafting; None where nobody predicts.
        reason: for `--explain`.
        is_whole: so many are drafted whatever that takes, to learn what they promise.
        is_trial: and all of them are sent, to learn what they cost.
        chunk: nodes of the first sweep, where they travel in several; None: all of them.
    """

    nodes: int
    predicted_ms: float | None
    reason: str
    is_whole: bool = False
    is_trial: bool = False
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class PipelineState:
    """What is on its way.

    Attributes:
        sweeps: sweeps that are unanswered.
        busy_ms: until another sweep would wait at no hop, as far as predicted.
        reply_ms: until the next reply is due, below 0 where it is late; infinite where nobody can tell.
        nodes: tree nodes of all of them.
    """

    sweeps: int
    busy_ms: float
    reply_ms: float = math.inf
    nodes: int = 0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What a sweep keeps busy, in milliseconds.

    Attributes:
        service_interval_ms: one hop, or the link behind it: so soon may another sweep follow.
        through_ms: all hops and links, one after another.
    """

    service_interval_ms: float = 0.0
    through_ms: float = 0.0


class SpeculationPolicy(Protocol):
    """Chooses K before each sweep. route: names the chain; what sweeps cost over another one is another matter."""

    @property
    def most(self) -> int:
        """Most nodes of a tree."""
        ...

    def expect(self, route: Hashable, forecast: RouteForecast) -> None:
        """What sweeps should cost on a route, as its machines claim; counts until something is measured."""
        ...

    def plan(self, route: Hashable, temperature: float, room: int) -> SpeculationPlan:
        """How many nodes below the pending token to draft, at most `room`, which is at least 1; 0 is plain decoding."""
        ...

    def stop_rule(self, route: Hashable, temperature: float, planned: SpeculationPlan) -> StopRule:
        """What a node and a round of drafting must bring."""
        ...

    def patience_ms(self, route: Hashable, nodes: int) -> float:
        """For how long a sweep should wait for a tree of so many nodes, or a reply for one that grows."""
        ...

    def trim(
        self, route: Hashable, temperature: float, probabilities: Sequence[float], planned: SpeculationPlan
    ) -> SpeculationPlan:
        """How many of a tree's nodes to send, given their acceptance probabilities, which fall."""
        ...

    def max_nodes(self, route: Hashable, temperature: float, room: int, ahead: PipelineState) -> int:
        """Most further nodes that another sweep may have while some are on their way; 0 to wait for those."""
        ...

    def min_probability(self, route: Hashable, temperature: float) -> float:
        """A node less likely to be accepted is not worth being in another sweep."""
        ...

    def has_time(self, ahead: PipelineState) -> bool:
        """Whether another round of drafting fits before hops can take another sweep."""
        ...

    def occupancy(self, route: Hashable, nodes: int) -> Occupancy:
        """What so many nodes keep busy."""
        ...

    def extend(self, route: Hashable, probabilities: Sequence[float], ahead: PipelineState) -> SpeculationPlan:
        """How many of such nodes, best first, another sweep is to carry; 0 where none is worth the hops' time."""
        ...

    def observe_draft(self, temperature: float, tree: DraftTree, planned: SpeculationPlan, draft_ms: float) -> None:
        """A tree was drafted."""
        ...

    def observe_sweep(self, route: Hashable, sweep: SweepMeasurement) -> None:
        """A sweep came back."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """The same K for every sweep, and the same number in flight."""

    most: int
    in_flight: int = 1

    def expect(self, route: Hashable, forecast: RouteForecast) -> None:
        """Nothing is weighed."""

    def plan(self, route: Hashable, temperature: float, room: int) -> SpeculationPlan:
        """`most`, as far as there is room."""
        return SpeculationPlan(min(self.most, room), None, "as asked")

    def stop_rule(self, route: Hashable, temperature: float, planned: SpeculationPlan) -> StopRule:
        """Whatever is drafted is sent."""
        return NO_LIMIT

    def patience_ms(self, route: Hashable, nodes: int) -> float:
        """Whatever is asked for is waited for."""
        return math.inf

    def trim(
        self, route: Hashable, temperature: float, probabilities: Sequence[float], planned: SpeculationPlan
    ) -> SpeculationPlan:
        """All of it."""
        return SpeculationPlan(len(probabilities), None, "as asked")

    def max_nodes(self, route: Hashable, temperature: float, room: int, ahead: PipelineState) -> int:
        """As many again, until as many sweeps as asked are on their way."""
        return min(self.most, room) if ahead.sweeps < self.in_flight else 0

    def min_probability(self, route: Hashable, temperature: float) -> float:
        """Whatever is drafted is sent."""
        return 0.0

    def has_time(self, ahead: PipelineState) -> bool:
        """Nothing is predicted."""
        return False

    def occupancy(self, route: Hashable, nodes: int) -> Occupancy:
        """Nothing is predicted."""
        return Occupancy()

    def extend(self, route: Hashable, probabilities: Sequence[float], ahead: PipelineState) -> SpeculationPlan:
        """Whatever there is."""
        return SpeculationPlan(len(probabilities), None, "as asked")

    def observe_draft(self, temperature: float, tree: DraftTree, planned: SpeculationPlan, draft_ms: float) -> None:
        """Nothing is learned."""

    def observe_sweep(self, route: Hashable, sweep: SweepMeasurement) -> None:
        """Nothing is learned."""
