"""The interface between the decode loop and the controller, which chooses how many nodes a sweep carries. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from client.base.stats import SweepMeasurement
from client.draft.search.tree import NO_LIMIT, DraftTree, StopRule
from swarm.routing.costs import RouteForecast

SWEEPS_IN_FLIGHT = 64
"""Sweeps that a client asks to have unanswered; fewer can run out where hops are fast and links are long."""


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """How many nodes the next sweep carries, and why.

    Attributes:
        nodes: tree nodes below the pending token (K); 0 is plain decoding.
        predicted_ms: what the sweep takes, without its drafting; None where that is not predicted.
        reason: for `--explain`.
        is_whole: whether all of them are drafted whatever that takes, to learn their acceptance probabilities.
        is_trial: whether all of them are sent too, to learn what they cost.
        chunk: nodes of the first sweep, where they travel in several; None for all of them.
    """

    nodes: int
    predicted_ms: float | None
    reason: str
    is_whole: bool = False
    is_trial: bool = False
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class PipelineState:
    """What is in flight.

    Attributes:
        sweeps: sweeps that are unanswered.
        busy_ms: time until another sweep would wait at no hop, as far as predicted.
        reply_ms: time until the next reply is due, below 0 where it is late; infinite where that is not predicted.
        nodes: tree nodes of all these sweeps.
    """

    sweeps: int
    busy_ms: float
    reply_ms: float = math.inf
    nodes: int = 0


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How long a sweep keeps hops and links busy.

    Attributes:
        service_interval_ms: the slowest hop or link; another sweep may follow so soon.
        through_ms: all hops and links, one after another.
    """

    service_interval_ms: float = 0.0
    through_ms: float = 0.0


class SpeculationPolicy(Protocol):
    """Chooses K before each sweep. `route` names the chain: each has a latency model of its own."""

    @property
    def max_tree_nodes(self) -> int:
        """Nodes of the largest tree."""
        ...

    def expect(self, route: Hashable, forecast: RouteForecast) -> None:
        """Take a forecast of a route, as its machines claim; it counts until something is measured."""
        ...

    def plan(self, route: Hashable, temperature: float, room: int) -> SpeculationPlan:
        """How many nodes below the pending token to draft, at most `room`, which is at least 1; 0 is plain decoding."""
        ...

    def stop_rule(self, route: Hashable, temperature: float, planned: SpeculationPlan) -> StopRule:
        """When another round of drafting does not pay, for a tree that was planned."""
        ...

    def patience_ms(self, route: Hashable, nodes: int) -> float:
        """How long a sweep should wait for a tree of so many nodes, or a reply for one that grows."""
        ...

    def trim(
        self, route: Hashable, temperature: float, probabilities: Sequence[float], planned: SpeculationPlan
    ) -> SpeculationPlan:
        """How many of a tree's nodes to send, given their acceptance probabilities, which fall."""
        ...

    def max_nodes(self, route: Hashable, temperature: float, room: int, pipeline: PipelineState) -> int:
        """How many nodes a further sweep may carry while others are in flight; 0 to wait for those."""
        ...

    def min_probability(self, route: Hashable, temperature: float) -> float:
        """A node of a lower acceptance probability is not worth being in a further sweep."""
        ...

    def has_time(self, pipeline: PipelineState) -> bool:
        """Whether another round of drafting fits before hops can take another sweep."""
        ...

    def occupancy(self, route: Hashable, nodes: int) -> Occupancy:
        """How long so many nodes keep hops and links busy."""
        ...

    def extend(self, route: Hashable, probabilities: Sequence[float], pipeline: PipelineState) -> SpeculationPlan:
        """How many of such nodes, best first, a further sweep carries; 0 where none is worth the hops' time."""
        ...

    def observe_draft(self, temperature: float, tree: DraftTree, planned: SpeculationPlan, draft_ms: float) -> None:
        """Learn from a tree that was drafted."""
        ...

    def observe_sweep(self, route: Hashable, sweep: SweepMeasurement) -> None:
        """Learn from a sweep that came back."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """The same K for every sweep, and the same number in flight.

    Attributes:
        max_tree_nodes: K.
        in_flight: sweeps that are in flight at a time.
    """

    max_tree_nodes: int
    in_flight: int = 1

    def expect(self, route: Hashable, forecast: RouteForecast) -> None:
        """Ignore it."""

    def plan(self, route: Hashable, temperature: float, room: int) -> SpeculationPlan:
        """K, as far as there is room."""
        return SpeculationPlan(min(self.max_tree_nodes, room), None, "as asked")

    def stop_rule(self, route: Hashable, temperature: float, planned: SpeculationPlan) -> StopRule:
        """No limit: whatever is drafted is sent."""
        return NO_LIMIT

    def patience_ms(self, route: Hashable, nodes: int) -> float:
        """Forever."""
        return math.inf

    def trim(
        self, route: Hashable, temperature: float, probabilities: Sequence[float], planned: SpeculationPlan
    ) -> SpeculationPlan:
        """All of them."""
        return SpeculationPlan(len(probabilities), None, "as asked")

    def max_nodes(self, route: Hashable, temperature: float, room: int, pipeline: PipelineState) -> int:
        """K again, until so many sweeps as asked for are in flight."""
        return min(self.max_tree_nodes, room) if pipeline.sweeps < self.in_flight else 0

    def min_probability(self, route: Hashable, temperature: float) -> float:
        """0: whatever is drafted is sent."""
        return 0.0

    def has_time(self, pipeline: PipelineState) -> bool:
        """Not predicted."""
        return False

    def occupancy(self, route: Hashable, nodes: int) -> Occupancy:
        """Not predicted."""
        return Occupancy()

    def extend(self, route: Hashable, probabilities: Sequence[float], pipeline: PipelineState) -> SpeculationPlan:
        """All of them."""
        return SpeculationPlan(len(probabilities), None, "as asked")

    def observe_draft(self, temperature: float, tree: DraftTree, planned: SpeculationPlan, draft_ms: float) -> None:
        """Learn nothing."""

    def observe_sweep(self, route: Hashable, sweep: SweepMeasurement) -> None:
        """Learn nothing."""
