"""Sessions that begin with another one's tokens: computed once, exact, also where machines die.

Links are in memory; some of these tests run over gRPC too, in `test_over_grpc.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from client import AsyncSwarm
from client.api.backend import ApiCaller, Finished, TextJob
from client.api.swarm_backend import SwarmBackend
from client.api.swarm_link import SwarmSource
from client.base.options import GenerateOptions, make_options
from client.base.stats import Result
from client.library.session import ForkRefused, Session
from swarm.base.tasks import TaskScope
from swarm.protocol.authority import SessionKey
from tests.net.killable_nodes import CHAIN, KillableNodes
from tests.net.three_nodes import prompt

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

IDS = prompt(4, 120)
OTHER = prompt(5, 20)
SHARED = 100
SAMPLED: GenerateOptions = {"max_new_tokens": 12, "nodes": 8, "temperature": 1.0, "seed": 7}
LONG: GenerateOptions = {**SAMPLED, "max_new_tokens": 40}


async def run(nodes: KillableNodes, session: Session, ids: Sequence[int], **options: object) -> Result:
    """The text of a session."""
    state = nodes.client.factory.make(ids, make_options({**SAMPLED, **options}))  # type: ignore[typeddict-item]
    result = [piece.result async for piece in session.run(state)][-1]
    assert result is not None
    return result


def rows(nodes: KillableNodes) -> dict[str, int]:
    """Rows that went into each node's forwards so far."""
    return {name: nodes[name].sessions.info().counters.rows_in_forwards for name in CHAIN}


@asynccontextmanager
async def answered(nodes: KillableNodes) -> AsyncIterator[Session]:
    """A session that has answered `IDS`, on the chain."""
    async with nodes.client._opener.open(200, 16) as session:
        await run(nodes, session, IDS)
        yield session


async def test_a_fork_computes_only_what_is_its_own_and_says_the_same(nodes: KillableNodes) -> None:
    ids = (*IDS[:SHARED], *OTHER)
    plain = await nodes.undisturbed(ids, **SAMPLED)
    opener = nodes.client._opener
    async with answered(nodes) as parent, opener.fork(parent, ids[:SHARED], 200, 16) as child:
        before = rows(nodes)
        result = await run(nodes, child, ids)
        again = await run(nodes, parent, ids)
    assert result.tokens == again.tokens == plain
    assert result.stats.reused_tokens == SHARED
    for name, count in rows(nodes).items():
        assert count - before[name] < 2 * (len(OTHER) + 12 * 9), "the opening did not travel"


async def test_forks_of_a_session_that_goes_on_meanwhile_are_exact(nodes: KillableNodes) -> None:
    texts = [(*IDS[:SHARED], *OTHER[: 5 + number]) for number in range(4)]
    plain = [await nodes.undisturbed(ids, **SAMPLED) for ids in texts]
    longer = (*IDS, *OTHER)
    expected = await nodes.undisturbed(longer, **LONG)
    async with answered(nodes) as parent, AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        going = group.create_task(run(nodes, parent, longer, max_new_tokens=40))
        fork = nodes.client._opener.fork
        children = [await stack.enter_async_context(fork(parent, ids[:SHARED], 200, 16)) for ids in texts]
        forked = [group.create_task(run(nodes, child, ids)) for child, ids in zip(children, texts, strict=True)]
        assert [(await task).tokens for task in forked] == plain
        assert (await going).tokens == expected
        grandchild = await stack.enter_async_context(fork(children[3], texts[3], 200, 16))
        assert (await run(nodes, grandchild, (*texts[3], 5))).stats.reused_tokens == len(texts[3])


@pytest.mark.parametrize("at", [1, 3], ids=["before its first sweep was run", "later"])
@pytest.mark.parametrize("victim", ["a0", "a1", "a2"])
async def test_a_fork_outlives_a_machine(nodes: KillableNodes, victim: str, at: int) -> None:
    ids = (*IDS[:SHARED], *OTHER)
    plain = await nodes.undisturbed(ids, **SAMPLED)
    async with answered(nodes) as parent, nodes.client._opener.fork(parent, ids[:SHARED], 200, 16) as child:
        arrived = nodes.stall(victim, at)
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(run(nodes, child, ids))
            await arrived.wait()
            await nodes.announce("b0", "b1", "b2")
            await nodes.kill(victim)
        result = telling.result()
    assert result.tokens == plain
    assert len(result.stats.repairs) == 1


async def test_a_machine_may_die_between_fork_and_first_sweep(nodes: KillableNodes) -> None:
    ids = (*IDS[:SHARED], *OTHER)
    plain = await nodes.undisturbed(ids, **SAMPLED)
    async with answered(nodes) as parent, nodes.client._opener.fork(parent, ids[:SHARED], 200, 16) as child:
        await nodes.announce("b1")
        await nodes.kill("a1")
        await nodes.until_missed()
        result = await run(nodes, child, ids)
    assert result.tokens == plain
    assert result.stats.reused_tokens == SHARED


@pytest.mark.parametrize("what", ["other tokens", "a session that ended", "a stranger's signature", "too many"])
async def test_what_cannot_be_forked_is_opened_without(
    nodes: KillableNodes, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: Sequence[int] = IDS[:SHARED]
    if what == "other tokens":
        tokens = (*IDS[: SHARED - 1], 1)
    if what == "too many":
        tokens = (*IDS, *OTHER)
    async with answered(nodes) as parent:
        key = parent.chain._key
        if what == "a session that ended":
            hop = nodes["a1"].sessions.find(key.session)
            assert hop is not None
            hop.dismiss("gone")
        if what == "a stranger's signature":
            forged = replace(SessionKey.fresh().fork(key.session, tokens), session=key.session)
            monkeypatch.setattr(key, "fork", lambda *_: forged)
        with pytest.raises(ForkRefused):
            async with nodes.client._opener.fork(parent, tokens, 200, 16):
                pass


async def test_of_eight_requests_with_one_opening_the_first_computes_it(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("client.api.sessions.FIRST_WINDOW_TOKENS", 160)
    opening = IDS[:SHARED]
    texts = [(*opening, *OTHER[: 4 + number]) for number in range(8)]
    plain = [await nodes.undisturbed(ids, **SAMPLED) for ids in texts]
    before = rows(nodes)

    async def answer(backend: SwarmBackend, ids: Sequence[int]) -> Result:
        found = [event async for event in backend.run(TextJob(ids, SAMPLED), ApiCaller("me"))]
        assert isinstance(found[-1], Finished)
        return found[-1].result

    @asynccontextmanager
    async def connect() -> AsyncIterator[AsyncSwarm]:
        yield nodes.client

    async with TaskScope() as scope:
        backend = SwarmBackend(SwarmSource("demo", connect), scope)
        scope.spawn(backend.link.keep())
        await backend.link.tried.wait()
        results = await asyncio.gather(*(answer(backend, ids) for ids in texts))
        assert backend.link.sessions is not None
        assert backend.link.sessions.forked == 7
        assert [result.tokens for result in results] == plain
        assert sorted(result.stats.reused_tokens for result in results)[:2] == [0, SHARED + 3]
        for name, count in rows(nodes).items():
            assert count - before[name] < 2 * SHARED + 8 * (12 + 12 * 9), "the opening was computed once"
