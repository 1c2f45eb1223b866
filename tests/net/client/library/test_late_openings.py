"""A machine that takes sessions and is never ready keeps nobody from a text, and is met once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from client import AsyncSwarm
from client.chain import chain, progress
from swarm.base.layers import Span
from swarm.directory.identity import Identity
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.link import successor
from tests.memory_registry import MemoryRegistry
from tests.net.hello_server import answering
from tests.net.three_nodes import three_nodes

FOR_EVER_S = 1_000.0


async def test_a_machine_that_is_never_ready_is_left_for_another_route(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((successor, "ATTACH_S"), (chain, "OPEN_S"), (progress, "ATTACH_S")):
        monkeypatch.setattr(module, name, FOR_EVER_S)  # nothing else may find it
    who, asked = Identity.ephemeral(), 0

    async def take(_requests: AsyncIterator[bytes], _context: object) -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(FOR_EVER_S)

    async def text(client: AsyncSwarm) -> str:
        return (await client.generate("It was", max_new_tokens=8, nodes=4, seed=3, temperature=0.7)).text

    async with three_nodes() as running, answering(who, link=take) as endpoint:
        right, model, network = await text(running.client), running.client.identity, running.swarm.network
        node = MemoryRegistry(network, who)
        about = (
            node.peer_id,
            model,
            Span(0, model.num_layers),
            endpoint.address,
            NodeState.SERVING,
            "cpu-float32",
            "0",
        )
        record = NodeRecord(*about, None, ((1, 0.01),), 10**6, 10**6, 1, time.time() + 60)
        await node.announce(replace(record, certificate=endpoint.certificate))
        async with running.swarm.client() as newcomer:
            route = await newcomer.route()
            assert [hop.peer for hop in route.hops] == [who.peer_id], "it seems the quickest"
            assert await text(newcomer) == right
            assert asked == 1
            assert await text(newcomer) == right
            assert asked == 1, "it was met once"
