"""The sweeps that one generation has in flight, what they keep busy, and what the drafter learns from them. Pure.

`SweepTracer` keeps what people see of a sweep: its tree, what the target made of it, and where its time went. Only
generations that were asked for it (`trace`) pay for it. Owns no loop and no session.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from client.base.stats import SweepMeasurement, within_total
from client.chain.answers import Answer
from client.decode.policy import Occupancy, PipelineState, SpeculationPlan
from client.draft.search.tree import DraftTree
from swarm.base.ids import TreeNodeId
from swarm.protocol.messages import HopTime, Reply


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


MAX_TRACED_NODES = 256
"""Nodes of a tree that a trace shows: those that the text went through, and the best of the others."""
MAX_TOKEN_CHARS = 64
"""Characters of a node's text that a trace shows."""

SweepTrace = dict[str, Any]
"""One sweep that answered, with these fields; times are in milliseconds.

    number            of the sweep in its generation, from 1
    start             generated tokens that were certain when it left
    emitted           [{token, text}] that became certain by its reply; the texts of all sweeps join to the result's
    root              {token, text, pick}: the certain token below which the tree hangs
    nodes             [{token, text, parent, probability, is_accepted, is_carried, pick}], parents first
    left_out          nodes that it carried and that `nodes` lacks
    depth, reason, rounds, expected_tokens, predicted_ms, is_part
                      as in `SweepMeasurement`
    draft_ms, total_ms, first_link_ms, other_ms
                      as there
    hops              [{name, queue_ms, compute_ms, other_ms, link_ms}] in chain order

A node's `parent` is a place in `nodes`, or null for the root; its `probability` is that of being accepted, as drafted.
A `pick` is the target's own token after a node, {token, text}, or null where this reply has none. A node that is not
carried belongs to an earlier sweep, and is there because the tree goes on below it.
"""


@dataclass(frozen=True, slots=True)
class AnsweredSweep:
    """A sweep of a tree whose reply was accounted for.

    Attributes:
        sweep: as it left.
        reply: to it.
        measured: what it took.
        emitted: tokens that became certain and count, each with the text that it made certain.
        sequence: every certain token, the prompt's and those included.
        prompt_tokens: of the prompt.
    """

    sweep: InFlightSweep
    reply: Reply
    measured: SweepMeasurement
    emitted: Sequence[tuple[int, str]]
    sequence: Sequence[int]
    prompt_tokens: int

    @property
    def start(self) -> int:
        """Where in the sequence the tree's first level stands."""
        return self.prompt_tokens + self.sweep.start

    @property
    def root(self) -> int:
        """The certain token below which the tree hangs."""
        return self.sequence[self.start - 1]


class SweepTracer:
    """Traces the sweeps of one generation; holds those that nobody took yet, of one reply at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._made = 0
        self._traces: list[SweepTrace] = []

    def note(self, answered: AnsweredSweep) -> None:
        """Trace one sweep."""
        self._made += 1
        sweep, measured = answered.sweep, answered.measured
        picks = dict(answered.reply.picks)
        node_ids = {place: node for node, place in sweep.places.items()}
        nodes, left_out = self._nodes(answered, node_ids, picks)
        self._traces.append(
            {
                "number": self._made,
                "start": sweep.start,
                "emitted": [{"token": token, "text": text} for token, text in answered.emitted],
                "root": {**self._token(answered.root), "pick": self._pick(answered.root, node_ids.get(None), picks)},
                "nodes": nodes,
                "left_out": left_out,
                "depth": measured.depth,
                "reason": measured.reason,
                "rounds": measured.rounds,
                "expected_tokens": _rounded(measured.expected_tokens),
                "predicted_ms": _rounded(measured.predicted_ms),
                "is_part": measured.is_part,
                "draft_ms": _rounded(measured.draft_ms),
                "total_ms": _rounded(measured.total_ms),
                "first_link_ms": _rounded(measured.first_link_ms),
                "other_ms": _rounded(measured.other_ms),
                "hops": [_hop(hop) for hop in measured.hops],
            }
        )

    def take(self, names: Sequence[str]) -> tuple[SweepTrace, ...]:
        """The traces since the last call, with the names of the hops; they are forgotten here."""
        taken, self._traces = self._traces, []
        for trace in taken:
            for hop, name in zip(trace["hops"], names, strict=False):  # a repair may have changed their number
                hop["name"] = name
        return tuple(taken)

    def _nodes(
        self, answered: AnsweredSweep, node_ids: Mapping[int | None, TreeNodeId], picks: Mapping[TreeNodeId, int]
    ) -> tuple[list[dict[str, Any]], int]:
        tree, carried = answered.sweep.tree, [place for place in node_ids if place is not None]
        accepted = _accepted(answered)
        chosen = _with_ancestors(tree.parents, carried)
        first = set(sorted(chosen, key=lambda place: (place not in accepted, place))[:MAX_TRACED_NODES])
        shown = [place for place in chosen if place in first]
        index: dict[int | None, int] = {place: at for at, place in enumerate(shown)}
        nodes = []
        for place in shown:
            token, parent = tree.tokens[place], tree.parents[place]
            nodes.append(
                {
                    **self._token(token, answered.root if parent is None else tree.tokens[parent]),
                    "parent": index.get(parent),
                    "probability": _rounded(tree.acceptance_probs[place]),
                    "is_accepted": place in accepted,
                    "is_carried": place in node_ids,
                    "pick": self._pick(token, node_ids.get(place), picks),
                }
            )
        return nodes, len(set(carried) - first)

    def _pick(self, token: int, node: TreeNodeId | None, picks: Mapping[TreeNodeId, int]) -> dict[str, Any] | None:
        pick = None if node is None else picks.get(node)
        return None if pick is None else self._token(pick, token)

    def _token(self, token: int, after: int | None = None) -> dict[str, Any]:
        """A token and what it adds to the text after another one: alone it would lose its leading space."""
        if after is None:
            text = self._decode([token])
        else:
            before, both = self._decode([after]), self._decode([after, token])
            text = both[len(before) :] if both.startswith(before) else self._decode([token])
        return {"token": token, "text": text[:MAX_TOKEN_CHARS]}

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def _accepted(answered: AnsweredSweep) -> set[int]:
    """Places of the nodes that the text went through: it follows them from the root on."""
    tree, text, start = answered.sweep.tree, answered.sequence, answered.start
    accepted: set[int] = set()
    at: int | None = None
    depth = 0
    for place, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):  # parents come first
        if parent == at and start + depth < len(text) and text[start + depth] == token:
            accepted.add(place)
            at, depth = place, depth + 1
    return accepted


def _with_ancestors(parents: Sequence[int | None], places: Sequence[int]) -> list[int]:
    """The places and all above them, parents first."""
    found: set[int] = set()
    for start in places:
        place: int | None = start
        while place is not None and place not in found:
            found.add(place)
            place = parents[place]
    return sorted(found)


def _hop(hop: HopTime) -> dict[str, Any]:
    return {
        "name": "",
        "queue_ms": _rounded(hop.queue_ms),
        "compute_ms": _rounded(hop.compute_ms),
        "other_ms": _rounded(hop.other_ms),
        "link_ms": _rounded(hop.link_ms),
    }


def _rounded(value: float | None) -> float | None:
    """A number that JSON can hold."""
    return None if value is None or not math.isfinite(value) else round(value, 4)
