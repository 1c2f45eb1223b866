"""Plain values about one node, as the page, the metrics and the alerts show them. Pure."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.directory.node_record import Reach
from swarm.status.messages import ServedModel


class Condition(enum.StrEnum):
    """The state of a node, judged from all sources."""

    SERVING = "serving"
    JOINING = "joining"
    DRAINING = "draining"
    STALE = "stale"
    OFFLINE = "offline"


class EvidenceSource(enum.StrEnum):
    """Where what is shown of a node comes from."""

    MQTT = "mqtt"
    DHT = "dht"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class RefutedBy:
    """What another machine says in its record: it computed a node's signed work again, and found it wrong.

    Attributes:
        peer: who says so.
        at: when it found that, in Unix seconds.
        text: where and by how much, as its telemetry said; empty without.
        evidence: SHA-256 of the file that shows it, as its telemetry said; empty without.
    """

    peer: PeerId
    at: float
    text: str = ""
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node of one model as it is now: what its record and telemetry say, by their names, and what is known of it.

    Attributes:
        peer: its id.
        model: the model that it serves.
        span: the layers that it holds.
        condition: its state, judged from all sources.
        source: where that comes from.
        device: its device in words.
        numeric_class: what decides the last bits of its results.
        version: of its program.
        name: the name that its owner gave it.
        started_at: when its run began, in Unix seconds.
        seen_at: when anything last came of it, in Unix seconds.
        busy: part of the time in which it computes, 0 to 1.
        kv_tokens_free: KV tokens that no session has reserved.
        kv_tokens_total: KV tokens for all sessions together.
        sessions: open ones; None where it does not say.
        preferred_sessions: those of them whose owners its operator prefers.
        contributor_sessions: those of them of proven contributors.
        sweeps_per_s: between its last two metrics messages.
        layer_tokens: committed tokens times layers, in this run.
        sweep_ms: (tree nodes, ms per sweep), as it reports them.
        disagrees: broker and DHT differ about it.
        probed_ms: compute per sweep for the whole span, as a probe measured it.
        agrees: whether its work was that of another holder of its layers; None if never compared.
        is_named: whether it was the one of three that differs from two others.
        refuted: what others say of it, newest first.
        is_silent: its telemetry ended without a farewell.
        reach: how others come to it, as its record says; None where there is no record.
        path: how its layers run on its device, as it says; None where it does not.
    """

    peer: PeerId
    model: ServedModel
    span: Span
    condition: Condition
    source: EvidenceSource
    device: str | None
    numeric_class: str
    version: str
    name: str | None
    started_at: float | None
    seen_at: float
    busy: float
    kv_tokens_free: int
    kv_tokens_total: int
    sweeps_per_s: float | None
    layer_tokens: int | None
    sweep_ms: tuple[tuple[int, float], ...]
    disagrees: bool
    probed_ms: float | None
    agrees: bool | None
    is_named: bool = False
    refuted: tuple[RefutedBy, ...] = ()
    is_silent: bool = False
    reach: Reach | None = None
    path: str | None = None
    sessions: int | None = None
    preferred_sessions: int | None = None
    contributor_sessions: int | None = None


@dataclass(frozen=True, slots=True)
class SwarmEvent:
    """Something happened to a node, or to a model.

    Attributes:
        at: Unix seconds.
        fingerprint: of the model.
        peer: the node; None where it is about the model.
        kind: a node's event, or a condition, or a verdict.
        text: one line for people.
    """

    at: float
    fingerprint: str
    peer: PeerId | None
    kind: str
    text: str


def by_condition(nodes: Iterable[NodeView]) -> Mapping[Condition, int]:
    """How many nodes are in each condition."""
    return Counter(node.condition for node in nodes)
