"""Asks the machines of a swarm which files their model's weights are. Believes what its digest proves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Final

import grpc.aio

from swarm.discovery.node_record import NodeRecord, NodeState
from swarm.errors import RemoteProtocolError, SwarmError
from swarm.ids import ModelIdentity
from swarm.protocol import wire
from swarm.protocol.manifest import Manifest
from swarm.transport.dial import Dialer

AT_ONCE: Final = 4
"""Machines that are asked at the same time."""
MAX_ASKED: Final = 8
ANSWER_S: Final = 5.0
"""For connecting, and for a list that has some kilobytes."""


async def swarm_manifest(model: ModelIdentity, records: Sequence[NodeRecord], dialer: Dialer) -> Manifest | None:
    """The manifest of a model's weights, as machines that serve it say and its digest proves.

    Args:
        model: what they serve.
        records: of machines; some of those that serve the model are asked.
        dialer: by which they are called.

    Returns:
        None where nobody says it in time.
    """
    serving = [one for one in records if one.state is NodeState.SERVING and one.model.fingerprint == model.fingerprint]
    asked = random.SystemRandom().sample(serving, min(len(serving), MAX_ASKED))
    for start in range(0, len(asked), AT_ONCE):
        answers = await asyncio.gather(*(_ask(record, dialer) for record in asked[start : start + AT_ONCE]))
        for manifest in answers:
            if manifest is not None and manifest.digest == model.weights_digest:
                return manifest
    return None


async def _ask(record: NodeRecord, dialer: Dialer) -> Manifest | None:
    try:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        call = dialer.channel(record.endpoint).unary_unary(wire.MANIFEST)
        async with asyncio.timeout(ANSWER_S):
            return wire.decode_manifest(await call(b""))
    except (TimeoutError, grpc.aio.AioRpcError, RemoteProtocolError, SwarmError):
        return None
