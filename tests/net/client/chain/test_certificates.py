"""Nodes whose certificate is not the one that a client knows, as after a restart, or that have none."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from swarm.discovery.node_record import NodeState, seal
from swarm.discovery.registry import RECORD_TTL_S
from swarm.errors import SwarmError, Unreachable
from swarm.layers import Span
from swarm.protocol.messages import RouteHop
from swarm.transport.certificate import ServerCertificate
from tests.net.killable_nodes import KillableNodes, reset_client
from tests.net.raw_client import info
from tests.net.three_nodes import prompt

IDS = prompt(2, 16)


async def test_a_node_that_started_again_is_found_by_its_new_record(nodes: KillableNodes) -> None:
    """Nobody else has its layers: the text goes on there, once the new record is read."""
    plain = await nodes.client.generate(IDS, max_new_tokens=24, nodes=4)
    known = nodes["a1"].endpoint
    pieces = 0
    async for piece in nodes.client.stream(IDS, max_new_tokens=24, nodes=4):
        pieces += 1
        if pieces == 1:
            await nodes.kill("a1")
            await nodes.revive("a1", ServerCertificate.fresh(nodes["a1"].peer_id))
            await nodes.announce("a1")
        result = piece.result
    assert result is not None
    assert result.tokens == plain.tokens
    assert result.stats.repairs, "it was noticed"
    assert nodes["a1"].endpoint != known


async def test_a_hop_without_a_certificate_is_dialled_by_nobody(nodes: KillableNodes) -> None:
    node = nodes["a1"]
    record = replace(
        node.running.announcer.record(NodeState.SERVING), certificate=b"", expires_at=time.time() + RECORD_TTL_S
    )
    sealed, hop = seal(record, node.registry.identity), RouteHop(node.peer_id, Span(4, 8))
    context = nodes["a0"].sessions._context
    with pytest.raises(SwarmError, match="announces no certificate"):
        await context.dial(node.identity.fingerprint, hop, [sealed])
    reset_client(nodes.client, 0.0)
    await node.registry.announce(record)
    with pytest.raises(Unreachable, match="announces no certificate") as caught:
        await nodes.client.generate(IDS, max_new_tokens=4)
    assert "\n" not in str(caught.value)
    assert (await info(node)).sessions == 0
