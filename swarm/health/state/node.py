"""What is known of one node, as it is shown: plain values. Pure."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarm.ids import PeerId
from swarm.layers import Span


class Condition(enum.StrEnum):
    """How a node is, all in all."""

    SERVING = "serving"
    JOINING = "joining"
    DRAINING = "draining"
    STALE = "stale"
    OFFLINE = "offline"


class EvidenceSource(enum.StrEnum):
    """Who says so."""

    MQTT = "mqtt"
    DHT = "dht"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class ReportedModel:
    """A model as its nodes name it."""

    name: str
    fingerprint: str
    num_layers: int


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node of one model as it is now; times are Unix seconds. disagrees: broker and DHT say different things of it.

    probed_ms: what a probe measured of its compute per sweep. agrees: whether its answers were another holder's.
    is_silent: its telemetry ended without a farewell.
    """

    peer: PeerId
    model: ReportedModel
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
    kv_free: int
    kv_total: int
    sweeps_per_s: float | None
    layer_tokens: int | None
    claimed_ms: tuple[tuple[int, float], ...]
    disagrees: bool
    probed_ms: float | None
    agrees: bool | None
    is_silent: bool = False


@dataclass(frozen=True, slots=True)
class SwarmEvent:
    """Something happened to a node, or to a model (then `peer` is None)."""

    at: float
    fingerprint: str
    peer: PeerId | None
    kind: str
    text: str


def by_condition(nodes: Iterable[NodeView]) -> Mapping[Condition, int]:
    """How many nodes are how."""
    return Counter(node.condition for node in nodes)
