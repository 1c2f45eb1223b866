"""Bodies of the MQTT messages that nodes publish, with plausible values, and identities that are made once."""

from __future__ import annotations

from functools import cache
from typing import Any

from swarm.base.ids import fingerprint_of
from swarm.base.layers import Span
from swarm.directory.identity import Identity
from swarm.status.messages import (
    Body,
    Event,
    EventKind,
    Metrics,
    Presence,
    ServedModel,
    Stamp,
    Status,
    Will,
    part_of,
    topic_of,
)

NOW = 1_800_000_000.0
FINGERPRINT = fingerprint_of("b2" * 32, "c3" * 32, "d4" * 32, 12)
FIRST_NONCE, SECOND_NONCE = "0" * 32, "1" * 32
"""Of a node's first start, and of a later one."""


@cache
def identity(number: int) -> Identity:
    return Identity.ephemeral()


def status(at: float = NOW, seq: int = 1, nonce: str = FIRST_NONCE, **other: Any) -> Status:  # noqa: ANN401
    defaults: dict[str, Any] = {
        "is_birth": seq == 1,
        "model": ServedModel("demo-target", FINGERPRINT, 12),
        "span": Span(0, 4),
        "state": Presence.SERVING,
        "device": "cpu",
        "numeric_class": "cpu-float32",
        "version": "0.2.0",
        "name": None,
        "started_at": NOW - 100,
        "kv_tokens_total": 4_096,
    }
    return Status(Stamp(nonce, seq, at), **{**defaults, **other})


def metrics(at: float = NOW, seq: int = 2, nonce: str = FIRST_NONCE, **other: Any) -> Metrics:  # noqa: ANN401
    defaults: dict[str, Any] = {
        "uptime_s": 100.5,
        "sweeps": 7,
        "tree_nodes": 300,
        "tokens": 21,
        "layer_tokens": 84,
        "bytes_in": 10_000,
        "bytes_out": 20_000,
        "errors": 0,
        "busy": 0.25,
        "queue_ms": 0.1,
        "compute_ms": 8.0,
        "kv_tokens_free": 1_000,
        "kv_tokens_total": 4_096,
        "sessions": 2,
        "sweep_ms": ((1, 8.2), (64, 20.0)),
    }
    return Metrics(Stamp(nonce, seq, at), **{**defaults, **other})


def event(at: float = NOW, seq: int = 3, nonce: str = FIRST_NONCE, text: str = "serves layers 0…3 of 12") -> Event:
    return Event(Stamp(nonce, seq, at), EventKind.JOINED, text)


def will(nonce: str = FIRST_NONCE, at: float = NOW) -> Will:
    return Will(Stamp(nonce, 0, at))


def topic(body: Body, who: int = 0, prefix: str = "canopy", fingerprint: str = FINGERPRINT) -> str:
    return topic_of(prefix, fingerprint, identity(who).peer_id, part_of(body))
