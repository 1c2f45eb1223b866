"""What is on its way for one generation: its sweeps, what they keep busy, and what is to be learned from them. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from client.chain.answers import Answer
from client.control.policy import Occupancy, PipelineState, SpeculationPlan, SweepMeasurement
from client.drafting.search.tree import DraftTree
from swarm.ids import TreeNodeId
from swarm.protocol.messages import Reply


@dataclass(frozen=True, slots=True)
class InFlightSweep:
    """One sweep on its way.

    tree: what was drafted, of which the sweep carries a part. places: of its session nodes in the tree, None for the
    root. nodes: of the tree, or tokens of a prompt's part. route: over which it goes. choice: why it is as large as it
    is. draft_ms: what drafting took. sent_s: when. alone: whether every hop should have done with what was sent before
    when this one comes. behind: how many of ours are unanswered, None where some are of a generation before. busy: what
    it keeps busy.
    """

    tree: DraftTree
    places: Mapping[TreeNodeId, int | None]
    nodes: int
    depth: int
    route: Hashable
    choice: SpeculationPlan
    draft_ms: float
    sent_s: float
    alone: bool
    behind: int | None
    busy: Occupancy

    @property
    def is_first(self) -> bool:
        """Whether it carries the root itself, whose pick comes in any case."""
        return None in self.places.values()

    @property
    def is_prompt(self) -> bool:
        """Whether it carries a part of the prompt, and no node of a tree."""
        return not self.places

    @property
    def rows(self) -> int:
        """What every hop computes."""
        return self.nodes + self.is_first

    @property
    def promised(self) -> float:
        """Tokens that its nodes should bring."""
        return sum(self.tree.chances[place] for place in self.places.values() if place is not None)

    def spent(self, answer: Answer, first_link_ms: float, emitted: int) -> SweepMeasurement:
        """What it took, by its reply and by pings to hop 0, and the tokens that came of it."""
        times = answer.reply.times
        links_ms = [first_link_ms, *(hop.link_ms for hop in times)]
        waited_ms = tuple(hop.queue_ms for hop in times)
        computed_ms = tuple(hop.compute_ms + hop.other_ms for hop in times)
        first_ms = [first_link_ms, *waited_ms[:1], *computed_ms[:1]]
        return SweepMeasurement(
            self.rows - 1,
            answer.total_ms,
            waited_ms=sum(waited_ms),
            computed_ms=sum(computed_ms),
            hops=len(times),
            promised=self.promised,
            brought=max(emitted - self.is_first, 0),
            alone=self.alone,
            network_ms=sum(links_ms) if all(links_ms) else 0.0,
            sent_ms=None if self.behind is None else self.sent_s * 1e3,
            first_ms=sum(first_ms),
            behind=self.behind or 0,
            is_prompt=self.is_prompt,
            each_waited_ms=waited_ms,
            each_computed_ms=computed_ms,
        )


@dataclass(slots=True)
class SendWindow:
    """Sweeps that were sent for one generation and are not learned from yet.

    flights: unanswered, by sequence. lessons: each with the nodes that the text went through. free_s: from when on
    another sweep should wait for none of them. clear_s: from when on it should meet none of them at any hop.
    """

    flights: dict[int, InFlightSweep] = field(default_factory=dict)
    lessons: list[tuple[InFlightSweep, Reply, tuple[TreeNodeId, ...]]] = field(default_factory=list)
    free_s: float = 0.0
    clear_s: float = 0.0

    @property
    def sweeps(self) -> int:
        """How many are unanswered, a prompt's parts not counted."""
        return sum(not flight.is_prompt for flight in self.flights.values())

    def sent_prompt(
        self, sequence: int, tokens: int, route: Hashable, now_s: float, met: tuple[bool, int | None]
    ) -> None:
        """A part of the prompt is on its way; how long it keeps hops busy nobody says."""
        choice = SpeculationPlan(tokens, None, "a part of the prompt")
        self.flights[sequence] = InFlightSweep(DraftTree(), {}, tokens, 0, route, choice, 0.0, now_s, *met, Occupancy())

    def sent(self, sequence: int, flight: InFlightSweep) -> None:
        """A sweep is on its way, which keeps hops busy."""
        self.flights[sequence] = flight
        starts_s = max(self.free_s, flight.sent_s)
        self.free_s = starts_s + flight.busy.slot_ms / 1e3
        self.clear_s = max(self.clear_s, starts_s + flight.busy.through_ms / 1e3)

    def answered(self, sequence: int, now_s: float) -> InFlightSweep | None:
        """A sweep is back: hops have done with it, whatever was predicted. What it was, None if it is not one of these.

        Else where sweeps were once believed to take longer than they do, each would leave a remainder, none would seem
        to be alone, and nobody would learn better.
        """
        flight, left = self.flights.pop(sequence, None), [other.busy for other in self.flights.values()]
        self.free_s = min(self.free_s, now_s + sum(busy.slot_ms for busy in left) / 1e3)
        self.clear_s = min(self.clear_s, now_s + sum(busy.through_ms for busy in left) / 1e3)
        return flight

    def met(self, now_s: float, others: int) -> tuple[bool, int | None]:
        """Of a sweep that leaves now, while `others`, of a generation before, are unanswered: `alone`, `behind`."""
        is_alone = now_s >= self.clear_s and others == 0 and len(self.flights) == self.sweeps
        return is_alone, None if others else len(self.flights)

    def ahead(self, now_s: float) -> PipelineState:
        """What is on its way."""
        flights = [flight for flight in self.flights.values() if not flight.is_prompt]
        first = flights[0] if flights else None
        due_ms = math.inf if first is None or first.choice.predicted_ms is None else first.choice.predicted_ms
        reply_ms = due_ms - (now_s - first.sent_s) * 1e3 if first is not None else due_ms
        nodes = sum(flight.nodes for flight in flights)
        return PipelineState(len(flights), max(self.free_s - now_s, 0.0) * 1e3, reply_ms, nodes)
