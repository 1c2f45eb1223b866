"""Nodes that only talk: each has a key of its own, and signs what a real one would say."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm.discovery.identity import Identity
from swarm.layers import Span
from swarm.telemetry.messages import Body, Metrics, Presence, ServedModel, Stamp, Status, part_of, seal_body, topic_of

LAYERS, SPAN = 80, 8


@dataclass(slots=True)
class SimulatedNode:
    """A node that only publishes.

    Attributes:
        started_at: Time of day of this start, in seconds.
        seq: The number of its last message.
    """

    identity: Identity
    span: Span
    fingerprint: str
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    started_at: float = field(default_factory=time.time)
    seq: int = 0

    def sealed(self, body: Body) -> tuple[str, bytes]:
        topic = topic_of("canopy", self.fingerprint, self.identity.peer_id, part_of(body))
        return topic, seal_body(body, topic, self.identity)

    def stamp(self) -> Stamp:
        self.seq += 1
        return Stamp(self.nonce, self.seq, time.time())

    def status(self, state: Presence = Presence.SERVING) -> Status:
        stamp = self.stamp()
        return Status(
            stamp=stamp,
            is_birth=stamp.seq == 1,
            model=ServedModel(f"simulated-{self.fingerprint[-2:]}", self.fingerprint, LAYERS),
            span=self.span,
            state=state,
            device="NVIDIA GeForce RTX 3060",
            numeric_class="cuda-bfloat16",
            version="0.2.0",
            name=f"node {self.span}",
            started_at=self.started_at,
            kv_tokens_total=100_000,
        )

    def metrics(self) -> Metrics:
        up_s = time.time() - self.started_at
        count = int(10 * up_s)
        return Metrics(
            stamp=self.stamp(),
            uptime_s=up_s,
            sweeps=count,
            tree_nodes=60 * count,
            tokens=3 * count,
            layer_tokens=24 * count,
            bytes_in=10_000 * count,
            bytes_out=10_000 * count,
            errors=0,
            busy=0.5,
            queue_ms=0.4,
            compute_ms=21.5,
            kv_tokens_free=100_000 - count % 50_000,
            kv_tokens_total=100_000,
            sessions=count % 7,
            sweep_ms=((1, 8.2), (8, 9.9), (64, 20.0)),
            device_memory_bytes=8_000_000_000,
            device_temperature_c=61.0,
        )


def simulate(keys: Iterable[Identity], prints: list[str]) -> list[SimulatedNode]:
    """A node for every key, spread over the models and their layers."""
    spans = [Span(start, start + SPAN) for start in range(0, LAYERS, SPAN)]
    return [
        SimulatedNode(key, spans[number // len(prints) % len(spans)], prints[number % len(prints)])
        for number, key in enumerate(keys)
    ]
