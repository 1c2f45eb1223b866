"""What people see of a sweep: its tree, what the target made of it, and where its time went; plain values for JSON.

Only generations that were asked for it (`trace`) pay for it. Owns no loop and no session.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from client.decode.pipeline import InFlightSweep
from client.stats import SweepMeasurement
from swarm.ids import TreeNodeId
from swarm.protocol.messages import HopTime, Reply

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
