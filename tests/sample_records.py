"""A valid record of a node, for tests that care about a few of its fields."""

from __future__ import annotations

import time
from typing import Any

from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span
from swarm.directory.node_record import NodeRecord, NodeState

MODEL = ModelIdentity.of("demo", "b2" * 32, "c3" * 32, "d4" * 32, 12)


def sample_record(peer: PeerId, **changes: Any) -> NodeRecord:  # noqa: ANN401
    """The record of a node that serves all of a model, expires in a minute and announces no certificate.

    Args:
        peer: whose it is.
        changes: fields that the test cares about.
    """
    fields: dict[str, Any] = {
        "model": MODEL,
        "span": Span(0, 12),
        "address": "192.0.2.1:5000",
        "state": NodeState.SERVING,
        "numeric_class": "cpu-float32",
        "version": "0.2.0",
        "name": None,
        "sweep_ms": ((1, 8.0),),
        "kv_tokens_free": 1,
        "kv_tokens_total": 2,
        "sequence": 1,
        "expires_at": time.time() + 60,
    }
    return NodeRecord(peer=peer, **(fields | changes))
