"""A client that has its ends computed by machines of its choice: no death of others makes it go elsewhere."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest

from swarm.base.errors import SwarmError
from swarm.routing.own_layers import OwnLayers
from tests.net.killable_nodes import KillableNodes
from tests.net.three_nodes import prompt

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

IDS = prompt(4, 24)


def keep_ends(nodes: KillableNodes, wait_s: float) -> None:
    """Trust a0 and a2 alone with the first three layers and the last four."""
    own = OwnLayers(frozenset({nodes["a0"].peer_id, nodes["a2"].peer_id}), 3, 4)
    nodes.client._opener = replace(nodes.client._opener, own=own, wait_s=wait_s)


async def test_a_stranger_is_replaced_by_strangers_in_the_middle(nodes: KillableNodes) -> None:
    plain = await nodes.undisturbed(IDS, max_new_tokens=24, nodes=8)
    keep_ends(nodes, 20.0)
    arrived = nodes.stall("a1", 5)
    async with asyncio.timeout(15), asyncio.TaskGroup() as group:
        telling = group.create_task(nodes.client.generate(IDS, max_new_tokens=24, nodes=8))
        await arrived.wait()
        await nodes.announce("wide", "rest")
        await nodes.kill("a1")
    assert telling.result().tokens == plain
    first, *_, last = nodes.chains[-1].route.hops
    assert (first.peer, last.peer) == (nodes["a0"].peer_id, nodes["a2"].peer_id)
    assert len(first.span) >= 3
    assert len(last.span) >= 4
    assert len(telling.result().stats.repairs) == 1


async def test_no_stranger_takes_the_place_of_an_end(nodes: KillableNodes) -> None:
    """`wide` and `rest` have all layers, and could go on with the text."""
    keep_ends(nodes, 0.5)
    arrived = nodes.stall("a2", 5)
    error: BaseException | None = None
    try:
        async with asyncio.timeout(15), asyncio.TaskGroup() as group:
            group.create_task(nodes.client.generate(IDS, max_new_tokens=24, nodes=8))
            await arrived.wait()
            await nodes.announce("wide", "rest", "b2")
            await nodes.kill("a2")
    except ExceptionGroup as caught:
        (error,) = caught.exceptions
    assert isinstance(error, SwarmError)
    assert re.search(r"layers 8…11.*machines that you trust", str(error))
