"""A node that leaves: its sessions move to other machines while it still serves, and no text notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from client import AsyncSwarm
from client.base.options import GenerateOptions
from node.life.serve import Node
from node.model.config import ServeConfig
from swarm.demo import TARGET
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.memory_registry import MemoryRegistry
from tests.net.raw_client import counters, info
from tests.net.three_nodes import SPANS, prompt, until, until_freed

DOUBLE = [*SPANS, *SPANS]


@asynccontextmanager
async def another(here: InProcessSwarm, layers: str, drain: float) -> AsyncIterator[Node]:
    """One more node of the swarm."""
    config = ServeConfig(layers=layers, model=str(TARGET), host="127.0.0.1", threads=1, drain=drain)
    async with Node(config, lambda _: None, MemoryRegistry(here.network)) as node:
        yield node


def holders(here: InProcessSwarm, peers: set[str]) -> list[Node]:
    return [node for node in here.nodes if node.peer_id in peers]


async def test_sessions_move_while_the_node_still_serves() -> None:
    async with in_process_swarm(TARGET, DOUBLE) as here, here.client() as swarm:
        for place, temperature in enumerate((0.0, 1.0, 0.0)):
            leaving = await moved_away(here, swarm, place, temperature)
            leaving.sessions.draining = False  # it stays after all


async def moved_away(here: InProcessSwarm, swarm: AsyncSwarm, place: int, temperature: float) -> Node:
    """The node that a text used at a place of its chain, and that left meanwhile."""
    options: GenerateOptions = {"max_new_tokens": 80, "temperature": temperature, "seed": 3}
    plain = await swarm.generate(prompt(1), **options)
    stream = swarm.stream(prompt(1), **options)
    text = (await anext(stream)).text
    busy = [node for node in here.nodes if (await info(node)).sessions]
    leaving = next(node for node in busy if str(node.running.host.model.span) == SPANS[place])
    before = await counters(here.nodes)
    async with asyncio.TaskGroup() as group:
        drained = group.create_task(leaving.sessions.drain(20))
        async for piece in stream:
            text += piece.text
            result = piece.result
    assert drained.result(), "every session has left"
    assert result is not None
    assert (result.tokens, text) == (plain.tokens, plain.text)
    (repair,) = result.stats.repairs
    assert (repair.is_move, repair.replaced) == (True, (leaving.peer_id,))
    after = await counters(here.nodes)
    restored = [node for node, a, b in zip(here.nodes, before, after, strict=True) if b.restores > a.restores]
    assert [str(node.running.host.model.span) for node in restored] == [SPANS[place]]
    assert leaving not in restored
    await until_freed(here.nodes)
    return leaving


async def test_a_node_that_leaves_takes_no_new_session_and_waits_for_a_place_to_move_to() -> None:
    async with in_process_swarm(TARGET, SPANS) as here, here.client() as swarm:
        plain = await swarm.generate(prompt(2), max_new_tokens=150)
        leaving = here.nodes[1]
        stream = swarm.stream(prompt(2), max_new_tokens=150)
        text = (await anext(stream)).text
        async with asyncio.TaskGroup() as group:
            drained = group.create_task(leaving.sessions.drain(30))
            text += (await anext(stream)).text
            assert not drained.done(), "nobody else has its layers"
            async with another(here, SPANS[1], drain=0.0):
                async for piece in stream:
                    text += piece.text
                    result = piece.result
        assert drained.result()
        assert text == plain.text
        assert result is not None
        assert all(repair.is_move for repair in result.stats.repairs)

        async def freed() -> bool:
            return (await info(leaving)).sessions == 0

        await until(freed)
