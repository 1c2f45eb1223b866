"""A crowd at nodes that have room for few: who finds them full waits for its turn, and nobody is refused for good."""

from __future__ import annotations

import asyncio
import logging

import pytest

from client.chain import blame
from swarm.base.errors import Busy
from swarm.demo import TARGET
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.net.three_nodes import SPANS, prompt, until_freed

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("links")]

CROWD = 10
KV_TOKENS = 50
"""Room for three of these sessions."""


async def told_by_all(here: InProcessSwarm, *, outage: bool = False) -> list[tuple[int, ...]]:
    """What a crowd writes that comes at once; every session of every node ends in the middle of an outage."""
    most = 0

    async def watch() -> None:
        nonlocal most
        for _ in range(200):
            most = max(most, *(len(node.sessions) for node in here.nodes))
            if outage and most == 3 and len(here.nodes[0].sessions) == 3:
                for node in here.nodes:
                    node.sessions.close_all("an outage")
                return
            await asyncio.sleep(0.01)

    async with here.client() as swarm, asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        texts = [
            group.create_task(swarm.generate(prompt(line % 4, 6), max_new_tokens=6, nodes=0, seed=line % 4))
            for line in range(CROWD)
        ]
        told = [tuple((await text).tokens) for text in texts]
        watching.cancel()
    assert 1 < most < CROWD, "some had to wait"
    return told


@pytest.mark.parametrize("outage", [False, True])
async def test_a_crowd_is_served_in_turn(outage: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with in_process_swarm(TARGET, SPANS, kv_tokens=KV_TOKENS) as here:
        with caplog.at_level(logging.WARNING):
            told = await told_by_all(here, outage=outage)
        await until_freed(here.nodes)
        assert "of those that wait for room" in caplog.text
    async with in_process_swarm(TARGET, SPANS) as roomy, roomy.client() as swarm:
        alone = [
            tuple((await swarm.generate(prompt(line, 6), max_new_tokens=6, nodes=0, seed=line)).tokens)
            for line in range(4)
        ]
    assert told == [alone[line % 4] for line in range(CROWD)]


async def test_who_gives_no_time_is_told_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blame, "QUEUED_S", 0.2)
    async with (
        in_process_swarm(TARGET, SPANS, kv_tokens=300) as here,
        here.client() as swarm,
        asyncio.TaskGroup() as group,
    ):
        first = group.create_task(swarm.generate(prompt(1, 6), max_new_tokens=200, nodes=0))
        await asyncio.sleep(0.2)
        with pytest.raises(Busy) as caught:
            await swarm.generate(prompt(2, 6), max_new_tokens=200, nodes=0)
        first.cancel()
    assert caught.value.position == 1
    assert caught.value.retry_after_s
    assert caught.value.expected_s
