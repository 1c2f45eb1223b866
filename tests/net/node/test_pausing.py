"""A node that pauses: its texts go on elsewhere, it takes none meanwhile, and comes back by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.life.autostart.pausing import PauseCause, PauseJudge
from node.life.autostart.state_file import Stage
from node.life.pauses import Pauser
from node.life.serve import Node
from node.model.config import ServeConfig
from swarm.base.errors import HopClosed
from swarm.demo import TARGET
from swarm.directory.node_record import NodeState
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.memory_registry import MemoryRegistry
from tests.net.three_nodes import SPANS, prompt, thread_held, until, until_freed

REASON = "the machine runs on battery"


class Plug:
    """The machine's plug, in the test's hand."""

    def __init__(self) -> None:
        self.is_pulled = False
        self.said: list[str] = []
        causes = [PauseCause(REASON, lambda: self.is_pulled, 0.0, 0.0)]
        self.pauser = Pauser(PauseJudge(causes, lambda: 0.0), self.said.append, look_s=0.01)


@asynccontextmanager
async def laptop(here: InProcessSwarm, plug: Plug, *, frees_memory: bool = False) -> AsyncIterator[Node]:
    """One more node, whose first layers others hold too."""
    config = ServeConfig(
        *(SPANS[0], str(TARGET)), host="127.0.0.1", threads=1, drain=20.0, pause_frees_memory=frees_memory
    )
    async with Node(config, plug.said.append, MemoryRegistry(here.network), plug.pauser) as node:
        yield node


async def until_stage(node: Node, stage: Stage) -> None:
    async def reached() -> bool:
        return node.facts().stage is stage

    await until(reached)


async def state_of(here: InProcessSwarm, node: Node) -> NodeState:
    """As others read it."""
    identity = node.identity
    records = await here.nodes[0].registry.records(identity.fingerprint, identity.num_layers, within_s=0.0)
    return next(record.state for record in records if record.peer == node.peer_id)


def until_state(here: InProcessSwarm, node: Node, state: NodeState) -> Callable[[], object]:
    async def reached() -> bool:
        return await state_of(here, node) is state

    return reached


async def test_sessions_move_away_and_the_node_comes_back_by_itself() -> None:
    plugs = [Plug(), Plug()]
    async with (
        in_process_swarm(TARGET, SPANS[1:]) as here,
        laptop(here, plugs[0]) as one,
        laptop(here, plugs[1]) as other,
        here.client() as swarm,
    ):
        plain = await swarm.generate(prompt(1), max_new_tokens=60)
        stream = swarm.stream(prompt(1), max_new_tokens=60)
        text = (await anext(stream)).text
        node, plug = (one, plugs[0]) if one.facts().sessions else (other, plugs[1])
        async with thread_held(node):  # or the text may be over before the node has looked
            plug.is_pulled = True
            await until(until_state(here, node, NodeState.DRAINING))
        async for piece in stream:
            text += piece.text
            result = piece.result
        assert result is not None
        assert (result.tokens, text) == (plain.tokens, plain.text)
        assert [repair.is_move for repair in result.stats.repairs] == [True]
        await until_freed([node])
        facts = node.facts()
        assert (facts.stage, facts.paused_for, facts.sessions) == (Stage.PAUSED, REASON, 0)
        assert facts.given.sweeps > 0
        assert [one.text for one in node.running.resources.outbox._events][-1] == f"paused: {REASON}"
        asked = SimpleNamespace(open=None, index=0, route=[SimpleNamespace(span=SPANS[0])])
        with pytest.raises(HopClosed, match="is paused by its owner"):
            node.running.host.sessions._reserve(cast("Any", asked), "somebody")
        await swarm.generate(prompt(1), max_new_tokens=2)
        assert node.facts().given.sweeps == facts.given.sweeps, "it takes nothing meanwhile"
        plug.is_pulled = False
        await until(until_state(here, node, NodeState.SERVING))
        again = await swarm.generate(prompt(1), max_new_tokens=3)
        assert again.tokens == plain.tokens[:3]


async def test_the_weights_are_given_back_and_loaded_again() -> None:
    plug = Plug()
    async with in_process_swarm(TARGET, SPANS[1:]) as here, laptop(here, plug, frees_memory=True) as node:
        address = node.address
        async with here.client() as swarm:
            plain = await swarm.generate(prompt(2), max_new_tokens=5)
            plug.is_pulled = True
            await until_stage(node, Stage.PAUSED)

            async def is_free() -> bool:
                return node.running.host._model is None

            await until(is_free)
            assert await state_of(here, node) is NodeState.DRAINING
            plug.is_pulled = False
            await until_stage(node, Stage.SERVING)
            assert node.address == address
            again = await swarm.generate(prompt(2), max_new_tokens=5)
            assert again.tokens == plain.tokens


async def test_a_node_may_be_stopped_while_it_pauses_or_waits() -> None:
    for frees_memory in (False, True):
        plug = Plug()
        async with in_process_swarm(TARGET, SPANS[1:2]) as here:
            async with laptop(here, plug, frees_memory=frees_memory) as node:
                plug.is_pulled = True
                await until_stage(node, Stage.PAUSED)
                await until(until_state(here, node, NodeState.DRAINING))
            identity = here.nodes[0].identity
            records = await here.nodes[0].registry.records(identity.fingerprint, identity.num_layers, within_s=0.0)
            assert [record.peer for record in records] == [here.nodes[0].peer_id], "it is gone from the directory"


async def test_a_node_that_waits_at_its_start_has_loaded_and_listed_nothing() -> None:
    plug = Plug()
    plug.is_pulled = True
    async with in_process_swarm(TARGET, SPANS[1:2]) as here:
        config = ServeConfig(SPANS[0], str(TARGET), host="127.0.0.1", threads=1)
        node = Node(config, plug.said.append, MemoryRegistry(here.network), plug.pauser)

        async def start() -> None:
            async with node:
                pytest.fail("it did not wait")

        async with asyncio.TaskGroup() as group:
            starting = group.create_task(start())
            await until_stage(node, Stage.PAUSED)
            assert plug.said == [f"waits, and loads nothing yet: {REASON}"]
            starting.cancel()
