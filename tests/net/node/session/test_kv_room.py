"""KV is taken as texts need it: a window is a limit, idle sessions make room, and what grows too far goes elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from client import AsyncSwarm
from client.base.options import GenerateOptions, make_options
from client.base.stats import Result
from client.library.session import Beginning, Session
from node.session.table import REST_S
from swarm.demo import TARGET
from swarm.protocol.messages import Open
from tests.in_process_swarm import InProcessSwarm, in_process_swarm
from tests.memory_links import MemoryLinks
from tests.net.three_nodes import prompt, until_freed

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("links")]

KV_TOKENS = 1_536
SPANS = ["0-6", "6-12"]
OPTIONS: GenerateOptions = {"max_new_tokens": 12, "nodes": 8, "temperature": 1.0, "seed": 7}


async def run(swarm: AsyncSwarm, session: Session, ids: Sequence[int]) -> Result:
    state = swarm._factory.make(ids, make_options(OPTIONS))
    result = [piece.result async for piece in session.run(state)][-1]
    assert result is not None
    return result


def free(here: InProcessSwarm) -> list[int]:
    return [node.sessions.kv_tokens_free for node in here.nodes]


async def test_a_window_is_a_limit_and_no_reservation(links: MemoryLinks) -> None:
    async with in_process_swarm(TARGET, SPANS, kv_tokens=KV_TOKENS) as here, here.client() as swarm:
        texts = [prompt(line, 100) for line in range(4)]
        alone = [(await swarm.generate(ids, **OPTIONS)).tokens for ids in texts]
        async with AsyncExitStack() as stack:
            sessions = [
                await stack.enter_async_context(swarm._opener.open(1_024, 8, Beginning(ids, 12))) for ids in texts
            ]
            assert min(free(here)) > KV_TOKENS - 4 * 256
            found = await asyncio.gather(*(run(swarm, *pair) for pair in zip(sessions, texts, strict=True)))
            assert [result.tokens for result in found] == alone
        await until_freed(here.nodes)
        assert free(here) == [KV_TOKENS] * 2


@pytest.mark.parametrize(("kv_tokens", "left"), [(1_000, 1), (1_300, 1), (1_700, 2)])
async def test_what_grows_takes_the_room_of_those_that_rest_and_all_texts_are_right(kv_tokens: int, left: int) -> None:
    async with in_process_swarm(TARGET, SPANS, kv_tokens=kv_tokens) as here, here.client() as swarm:
        long, short = (prompt(1, 150) * 5)[:700], (prompt(2, 150) * 5)[:600]
        expected = [(await swarm.generate(ids, **OPTIONS)).tokens for ids in (long, short, (*short, *short[:30]))]
        for node in here.nodes:
            await until_freed([node])
            node.sessions.pool.clear()
        opener = swarm._opener
        async with opener.open(1_024, 8, Beginning(short, 12)) as first:
            assert (await run(swarm, first, short)).tokens == expected[1]
            for node in here.nodes:
                for hop in node.sessions._open.values():
                    hop.used_at -= REST_S
            async with opener.open(1_024, 8, Beginning(long[:8], 12)) as second:
                assert (await run(swarm, second, long)).tokens == expected[0]
                assert [len(node.sessions) for node in here.nodes] == [left] * 2
                assert max(node.sessions.pool.tokens for node in here.nodes) <= kv_tokens - 700
            again = await run(swarm, first, (*short, *short[:30]))
            assert again.tokens == expected[2]
        await until_freed(here.nodes)
        for node in here.nodes:
            node.sessions.pool.check_integrity()
            assert 0 < node.sessions.pool.tokens <= kv_tokens


async def test_beside_a_device_blocks_take_host_memory_and_no_kv() -> None:
    async with in_process_swarm(TARGET, SPANS, kv_tokens=800) as here, here.client() as swarm:
        for node in here.nodes:
            node.sessions._host_tokens = 10_000
        for line in (1, 2, 3):
            text = (prompt(line, 150) * 5)[:600]
            for reused in (0, 576):
                result = await swarm.generate(text, **OPTIONS)
                assert result.stats.reused_tokens == reused
                await until_freed(here.nodes)
        for node in here.nodes:
            assert node.sessions.pool.tokens >= 3 * 576
            node.sessions.pool.check_integrity()


async def test_who_begins_with_blocks_reserves_them_whatever_it_says(
    links: MemoryLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = (prompt(1, 150) * 5)[:700]
    async with in_process_swarm(TARGET, SPANS, kv_tokens=KV_TOKENS) as here, here.client() as swarm:
        opener = swarm._opener
        async with opener.open(1_024, 8, Beginning(ids, 12)) as first:
            expected = (await run(swarm, first, ids)).tokens
        await until_freed(here.nodes)
        monkeypatch.setattr("client.library.session.Open", lambda **asked: Open(**{**asked, "expected_tokens": 1}))
        async with opener.open(1_024, 8, Beginning(ids, 12)) as second:
            assert len(second.held) == 640
            assert max(free(here)) <= KV_TOKENS - 640
            assert (await run(swarm, second, ids)).tokens == expected
        await until_freed(here.nodes)
        assert free(here) == [KV_TOKENS] * 2
