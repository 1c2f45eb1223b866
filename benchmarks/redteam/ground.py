"""What an attacker knows of a swarm, and what it costs him. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span


@dataclass(frozen=True, slots=True)
class NodeMark:
    """A node under attack.

    Attributes:
        address: `host:port` of its gRPC service.
        peer: Its peer id.
        certificate: DER of its server's certificate, in hex; empty where the swarm has none.
        log: The file that its output goes to.
    """

    address: str
    peer: PeerId
    span: Span
    certificate: str
    log: str


@dataclass(frozen=True, slots=True)
class Ground:
    """What an attacker knows: what the directory tells everybody, and where the range keeps its files.

    Attributes:
        nodes: The honest nodes, in the order of their layers.
        page: `host:port` of the health page; empty without one.
        broker: `host:port` of its broker; empty without one.
        folder: Where an attack may write files.
    """

    join: str
    nodes: tuple[NodeMark, ...]
    model: ModelIdentity
    hidden_size: int
    vocab_size: int
    numeric_class: str
    page: str
    broker: str
    folder: str

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Ground:
        nodes = tuple(NodeMark(**{**one, "span": Span(**one["span"])}) for one in raw["nodes"])
        return cls(**{**raw, "nodes": nodes, "model": ModelIdentity(**raw["model"])})


@dataclass(slots=True)
class Tally:
    """What an attack cost, and what it found beside what users feel.

    Attributes:
        acts: What it did, counted: frames, records, calls.
        refused: How often the swarm refused it.
        breaches: What must not happen, and did.
        notes: What else is worth a line.
    """

    sent_bytes: int = 0
    connections: int = 0
    identities: int = 0
    acts: int = 0
    refused: int = 0
    breaches: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
