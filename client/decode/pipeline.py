"""What is on its way for one generation: its sweeps, what they keep busy, and what is to be learned from them. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from client.chain.answers import Answer
from client.control.policy import Occupancy, PipelineState, SpeculationPlan
from client.drafting.search.tree import DraftTree
from client.stats import SweepMeasurement
from swarm.ids import TreeNodeId
from swarm.protocol.messages import Reply


@dataclass(frozen=True, slots=True)
class InFlightSweep:
    """One sweep on its way.

    Attributes:
        tree: what was drafted, of which the sweep carries a part; empty for a part of the prompt.
        places: of its session nodes in the tree, None for the root.
        nodes: how many nodes of the tree it carries; of a part of the prompt, tokens.
        depth: levels of the tree.
        route: names the chain that it goes over.
        plan: why it is as large as it is.
        draft_ms: what drafting took.
        sent_s: when it left, in seconds of the generation's clock.
        is_alone: whether every hop should be done with what was sent before when this one comes.
        behind: how many of this generation's sweeps are unanswered; None where some are of an earlier generation.
        occupancy: what it keeps busy.
    """

    tree: DraftTree
    places: Mapping[TreeNodeId, int | None]
    nodes: int
    depth: int
    route: Hashable
    plan: SpeculationPlan
    draft_ms: float
    sent_s: float
    is_alone: bool
    behind: int | None
    occupancy: Occupancy

    @property
    def has_root(self) -> bool:
        """Whether it carries the pending token itself, whose pick comes in any case."""
        return None in self.places.values()

    @property
    def is_prompt(self) -> bool:
        """Whether it carries a part of the prompt, and no node of a tree."""
        return not self.places

    @property
    def expected_tokens(self) -> float:
        """Tokens that its nodes should bring."""
        return sum(self.tree.acceptance_probs[place] for place in self.places.values() if place is not None)

    def measured(self, answer: Answer, first_link_ms: float, emitted: int) -> SweepMeasurement:
        """What it took and brought. first_link_ms: one way to hop 0, as pings say. emitted: certain tokens."""
        return SweepMeasurement(
            nodes=self.nodes,
            emitted=emitted,
            draft_ms=self.draft_ms,
            total_ms=answer.total_ms,
            first_link_ms=first_link_ms,
            hops=answer.reply.times,
            depth=self.depth,
            predicted_ms=self.plan.predicted_ms,
            reason=self.plan.reason,
            is_part=not self.has_root and not self.is_prompt,
            rounds=self.tree.rounds,
            is_prompt=self.is_prompt,
            expected_tokens=self.expected_tokens,
            is_alone=self.is_alone,
            sent_ms=None if self.behind is None else self.sent_s * 1e3,
            behind=self.behind or 0,
        )


@dataclass(slots=True)
class SendWindow:
    """Sweeps that were sent for one generation and are not learned from yet.

    Attributes:
        sweeps: unanswered, by sequence number.
        lessons: answered sweeps of trees, each with its reply and the nodes that the text went through.
        free_s: from when on another sweep should wait for none of them.
        clear_s: from when on another sweep should meet none of them at any hop.
    """

    sweeps: dict[int, InFlightSweep] = field(default_factory=dict)
    lessons: list[tuple[InFlightSweep, Reply, tuple[TreeNodeId, ...]]] = field(default_factory=list)
    free_s: float = 0.0
    clear_s: float = 0.0

    @property
    def trees_in_flight(self) -> int:
        """How many are unanswered, parts of the prompt not counted."""
        return sum(not sweep.is_prompt for sweep in self.sweeps.values())

    def sent_prompt(
        self, sequence: int, tokens: int, route: Hashable, now_s: float, met: tuple[bool, int | None]
    ) -> None:
        """A part of the prompt is on its way; how long it keeps hops busy nobody says."""
        plan = SpeculationPlan(tokens, None, "a part of the prompt")
        self.sweeps[sequence] = InFlightSweep(
            DraftTree(), {}, tokens, 0, route, plan, 0.0, now_s, *met, occupancy=Occupancy()
        )

    def sent(self, sequence: int, sweep: InFlightSweep) -> None:
        """A sweep is on its way, which keeps hops busy."""
        self.sweeps[sequence] = sweep
        starts_s = max(self.free_s, sweep.sent_s)
        self.free_s = starts_s + sweep.occupancy.service_interval_ms / 1e3
        self.clear_s = max(self.clear_s, starts_s + sweep.occupancy.through_ms / 1e3)

    def answered(self, sequence: int, now_s: float) -> InFlightSweep | None:
        """A sweep is back: hops are done with it, whatever was predicted. What it was, None if it is not one of these.

        Else where sweeps were once believed to take longer than they do, each would leave a remainder, none would seem
        to be alone, and nobody would learn better.
        """
        sweep, left = self.sweeps.pop(sequence, None), [other.occupancy for other in self.sweeps.values()]
        self.free_s = min(self.free_s, now_s + sum(busy.service_interval_ms for busy in left) / 1e3)
        self.clear_s = min(self.clear_s, now_s + sum(busy.through_ms for busy in left) / 1e3)
        return sweep

    def met(self, now_s: float, others: int) -> tuple[bool, int | None]:
        """`is_alone` and `behind` of a sweep that leaves now, with `others` of an earlier generation unanswered."""
        is_alone = now_s >= self.clear_s and others == 0 and len(self.sweeps) == self.trees_in_flight
        return is_alone, None if others else len(self.sweeps)

    def state(self, now_s: float) -> PipelineState:
        """What is on its way."""
        sweeps = [sweep for sweep in self.sweeps.values() if not sweep.is_prompt]
        first = sweeps[0] if sweeps else None
        due_ms = math.inf if first is None or first.plan.predicted_ms is None else first.plan.predicted_ms
        reply_ms = due_ms - (now_s - first.sent_s) * 1e3 if first is not None else due_ms
        nodes = sum(sweep.nodes for sweep in sweeps)
        return PipelineState(len(sweeps), max(self.free_s - now_s, 0.0) * 1e3, reply_ms, nodes)
