"""The sweeps that one generation has in flight, what they keep busy, and what the drafter learns from them. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from client.chain.answers import Answer
from client.control.policy import Occupancy, PipelineState, SpeculationPlan
from client.drafting.search.tree import DraftTree
from client.stats import SweepMeasurement, within_total
from swarm.ids import TreeNodeId
from swarm.protocol.messages import Reply


@dataclass(frozen=True, slots=True)
class InFlightSweep:
    """One sweep in flight.

    Attributes:
        tree: the drafted tree, of which the sweep carries some nodes; empty for a part of the prompt.
        places: from the session nodes that it carries to their places in the tree, None for its root.
        nodes: tree nodes that it carries; tokens of a part of the prompt.
        depth: levels of the tree.
        route: names the chain that it goes over.
        plan: why it is as large as it is.
        draft_ms: what drafting took.
        sent_s: when it left, by the generation's clock.
        is_alone: whether, as far as predicted, no hop is busy with an earlier sweep when this one comes.
        behind: how many of this generation's sweeps were unanswered when it left; None where sweeps of an earlier
            generation were unanswered too.
        occupancy: how long it keeps hops and links busy.
        start: tokens of the text so far when it left, the prompt's not counted.
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
    start: int = 0

    @property
    def has_root(self) -> bool:
        """Whether it carries the pending token itself, whose pick always becomes certain."""
        return None in self.places.values()

    @property
    def is_prompt(self) -> bool:
        """Whether it carries a part of the prompt, and no node of a tree."""
        return not self.places

    @property
    def expected_tokens(self) -> float:
        """The sum of its nodes' acceptance probabilities."""
        return sum(self.tree.acceptance_probs[place] for place in self.places.values() if place is not None)

    def measured(self, answer: Answer, first_link_ms: float, emitted: int) -> SweepMeasurement:
        """Make the record of the sweep.

        Args:
            answer: its reply and how long that took.
            first_link_ms: one way to hop 0, as pings measure it.
            emitted: tokens that became certain by the reply.
        """
        first_link_ms, hops = within_total(first_link_ms, answer.reply.times, answer.total_ms)
        return SweepMeasurement(
            nodes=self.nodes,
            emitted=emitted,
            draft_ms=self.draft_ms,
            total_ms=answer.total_ms,
            first_link_ms=first_link_ms,
            hops=hops,
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
    """Sweeps that were sent for one generation and that the drafter did not learn from yet.

    Attributes:
        sweeps: unanswered ones, by sequence number.
        lessons: answered sweeps of trees, each with its reply and the nodes that the text went through.
        free_s: from when on another sweep should wait for none of them, by the generation's clock.
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

    def add_prompt(
        self, sequence: int, tokens: int, route: Hashable, now_s: float, contention: tuple[bool, int | None]
    ) -> None:
        """Add a part of the prompt that was sent; how long it keeps hops busy is not predicted."""
        plan = SpeculationPlan(tokens, None, "a part of the prompt")
        self.sweeps[sequence] = InFlightSweep(
            DraftTree(), {}, tokens, 0, route, plan, 0.0, now_s, *contention, occupancy=Occupancy()
        )

    def add(self, sequence: int, sweep: InFlightSweep) -> None:
        """Add a sweep of tree nodes that was sent."""
        self.sweeps[sequence] = sweep
        starts_s = max(self.free_s, sweep.sent_s)
        self.free_s = starts_s + sweep.occupancy.service_interval_ms / 1e3
        self.clear_s = max(self.clear_s, starts_s + sweep.occupancy.through_ms / 1e3)

    def take(self, sequence: int, now_s: float) -> InFlightSweep | None:
        """Take out a sweep whose reply came; None if it is not one of these.

        Hops are done with it, whatever was predicted. Without that, predictions that are too long would add up: no
        sweep would seem to be alone, and only sweeps that are alone correct predictions.
        """
        sweep, left = self.sweeps.pop(sequence, None), [other.occupancy for other in self.sweeps.values()]
        self.free_s = min(self.free_s, now_s + sum(busy.service_interval_ms for busy in left) / 1e3)
        self.clear_s = min(self.clear_s, now_s + sum(busy.through_ms for busy in left) / 1e3)
        return sweep

    def contention(self, now_s: float, foreign: int) -> tuple[bool, int | None]:
        """`is_alone` and `behind` of a sweep that leaves now; `foreign` sweeps are another generation's."""
        is_alone = now_s >= self.clear_s and foreign == 0 and len(self.sweeps) == self.trees_in_flight
        return is_alone, None if foreign else len(self.sweeps)

    def pipeline_state(self, now_s: float) -> PipelineState:
        """What is in flight now, as the controller sees it."""
        sweeps = [sweep for sweep in self.sweeps.values() if not sweep.is_prompt]
        first = sweeps[0] if sweeps else None
        due_ms = math.inf if first is None or first.plan.predicted_ms is None else first.plan.predicted_ms
        reply_ms = due_ms - (now_s - first.sent_s) * 1e3 if first is not None else due_ms
        nodes = sum(sweep.nodes for sweep in sweeps)
        return PipelineState(len(sweeps), max(self.free_s - now_s, 0.0) * 1e3, reply_ms, nodes)
