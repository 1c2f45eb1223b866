"""Sessions that begin with what machines hold of their texts: computed once, exact, also where machines die.

Links are in memory; some of these tests run over gRPC too, in `test_over_grpc.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from unittest.mock import AsyncMock

import pytest

from client import AsyncSwarm
from client.api.backend import ApiCaller, Finished, TextJob
from client.api.swarm_backend import SwarmBackend
from client.api.swarm_link import SwarmSource
from client.base.options import GenerateOptions, make_options
from client.base.stats import Result
from client.library.session import Beginning, Session
from node.session.hop_session import HopSession
from swarm.base.tasks import TaskScope
from swarm.compute.kv_pool import NamedText
from swarm.protocol.limits import BLOCK_TOKENS
from swarm.protocol.messages import Codec
from tests.net.killable_nodes import CHAIN, KillableNodes
from tests.net.three_nodes import prompt, until_freed

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(90)]

IDS = prompt(4, 120)
OTHER = prompt(5, 20)
SHARED = 100
HELD = SHARED // BLOCK_TOKENS * BLOCK_TOKENS
SECRET, OTHERS = b"s" * 32, b"o" * 32
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


def only(nodes: KillableNodes, name: str) -> HopSession:
    """The one session of a node."""
    (found,) = nodes[name].sessions._open.values()
    return found


def opened(nodes: KillableNodes, ids: Sequence[int], secret: bytes = SECRET) -> AbstractAsyncContextManager[Session]:
    """A session whose text begins with these tokens."""
    return nodes.client._opener.open(200, 16, Beginning(ids, 20, secret))


async def hold(nodes: KillableNodes, ids: Sequence[int] = IDS, secret: bytes = SECRET) -> None:
    """Let the chain compute these tokens, and end the session."""
    async with opened(nodes, ids, secret) as session:
        await run(nodes, session, ids)
    await until_freed([nodes[name] for name in CHAIN])


async def test_a_session_computes_only_what_no_machine_holds_and_says_the_same(nodes: KillableNodes) -> None:
    ids = (*IDS[:SHARED], *OTHER)
    plain = await nodes.undisturbed(ids, **SAMPLED)
    await hold(nodes)
    before = rows(nodes)
    async with opened(nodes, ids) as session:
        result = await run(nodes, session, ids)
    assert result.tokens == plain
    assert result.stats.reused_tokens == HELD
    for name, count in rows(nodes).items():
        assert count - before[name] < SHARED - HELD + 2 * len(OTHER) + 12 * 9, "the opening did not travel"


async def test_the_minimum_over_the_machines_counts(nodes: KillableNodes) -> None:
    ids = (*IDS, *IDS, *OTHER)
    plain = await nodes.undisturbed(ids, **SAMPLED)
    async with nodes.client._opener.open(400, 16, Beginning(ids, 20, SECRET)) as session:
        await run(nodes, session, ids)
    await until_freed([nodes[name] for name in CHAIN])
    for held, name in [(2, "a0"), (1, "a1"), (3, "a2")]:
        pool = nodes[name].sessions.pool
        pool.shrink(pool.tokens * held // len(pool))
        assert len(pool) == held
    async with nodes.client._opener.open(400, 16, Beginning(ids, 20, SECRET)) as session:
        assert session.held == tuple(ids[:BLOCK_TOKENS])
        result = await run(nodes, session, ids)
    assert result.tokens == plain
    assert result.stats.reused_tokens == BLOCK_TOKENS


@pytest.mark.parametrize("what", ["another secret", "another first token", "another codec"])
async def test_nothing_is_held_of(nodes: KillableNodes, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = (*IDS[:SHARED], *OTHER)
    if what == "another first token":
        ids = (ids[0] + 1, *ids[1:])
    if what == "another codec":
        monkeypatch.setattr("client.library.session._codec", lambda *_: Codec.INT8)
    await hold(nodes) if what != "another codec" else None
    monkeypatch.undo()
    async with opened(nodes, ids, OTHERS if what == "another secret" else SECRET) as session:
        assert session.held == ()
        assert (await run(nodes, session, ids)).tokens == await nodes.undisturbed(ids, **SAMPLED)


async def test_what_another_session_computes_is_held_before_that_ends(nodes: KillableNodes) -> None:
    texts = [(*IDS[:SHARED], *OTHER[: 5 + number]) for number in range(3)]
    plain = [await nodes.undisturbed(ids, **SAMPLED) for ids in texts]
    longer = (*IDS, *OTHER)
    expected = await nodes.undisturbed(longer, **LONG)
    async with opened(nodes, IDS) as parent, AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        await run(nodes, parent, IDS)
        going = group.create_task(run(nodes, parent, longer, max_new_tokens=40))
        sessions = [await stack.enter_async_context(opened(nodes, ids)) for ids in texts]
        assert [len(session.held) for session in sessions] == [HELD] * 3
        found = [group.create_task(run(nodes, session, ids)) for session, ids in zip(sessions, texts, strict=True)]
        assert [(await task).tokens for task in found] == plain
        assert (await going).tokens == expected


@pytest.mark.parametrize("at", [1, 3], ids=["before its first sweep was run", "later"])
@pytest.mark.parametrize("victim", ["a0", "a1", "a2"])
async def test_it_outlives_a_machine(nodes: KillableNodes, victim: str, at: int) -> None:
    ids = (*IDS[:SHARED], *OTHER)
    plain = await nodes.undisturbed(ids, **SAMPLED)
    await hold(nodes)
    async with opened(nodes, ids) as session:
        assert len(session.held) == HELD
        arrived = nodes.stall(victim, at)
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(run(nodes, session, ids))
            await arrived.wait()
            await nodes.announce("b0", "b1", "b2")
            await nodes.kill(victim)
        result = telling.result()
    assert result.tokens == plain
    assert len(result.stats.repairs) == 1


@pytest.mark.parametrize("victim", ["a0", "a1", "a2"])
async def test_a_machine_may_die_between_opening_and_first_sweep(nodes: KillableNodes, victim: str) -> None:
    ids = (*IDS[:SHARED], *OTHER)
    plain = await nodes.undisturbed(ids, **SAMPLED)
    await hold(nodes)
    async with opened(nodes, ids) as session:
        await nodes.announce(victim.replace("a", "b"))
        await nodes.kill(victim)
        await nodes.until_missed()
        result = await run(nodes, session, ids)
    assert result.tokens == plain
    assert result.stats.reused_tokens == HELD


async def test_a_machine_that_came_later_holds_what_it_was_replayed(nodes: KillableNodes) -> None:
    ids = (*IDS[:SHARED], *OTHER)
    plain = await nodes.undisturbed(ids, **SAMPLED)
    async with opened(nodes, IDS) as session:
        await run(nodes, session, IDS)
        await nodes.announce("b1")
        await nodes.kill("a1")
        await run(nodes, session, (*IDS, *OTHER))
    await nodes.unlist("a1")
    async with opened(nodes, ids) as again:
        assert nodes.route() == ["a0", "b1", "a2"]
        assert len(again.held) == HELD
        assert (await run(nodes, again, ids)).tokens == plain


async def test_a_machine_that_copies_a_beginning_is_at_work(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = (*IDS[:SHARED], *OTHER)
    plain = await nodes.undisturbed(ids, **SAMPLED)
    await hold(nodes)
    begin, seen = HopSession._take_beginning, list[int]()

    async def slowly(hop: HopSession) -> None:
        if hop.span.start == 4:
            await asyncio.sleep(12.0)
            seen.append(hop.standing().working)
        await begin(hop)

    monkeypatch.setattr(HopSession, "_take_beginning", slowly)
    await nodes.announce("b0", "b1", "b2")
    async with opened(nodes, ids) as session:
        assert nodes.route() == list(CHAIN), "it is waited for"
        assert (await run(nodes, session, ids)).tokens == plain
    assert seen == [1]


async def test_a_text_goes_where_its_beginning_is(nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    opener = nodes.client._opener
    await hold(nodes)
    await nodes.announce("b0", "b1", "b2")
    others = await opener.route(avoid=frozenset(nodes[name].peer_id for name in CHAIN))
    monkeypatch.setattr(type(opener), "route", AsyncMock(return_value=others))
    async with opened(nodes, (*IDS[:SHARED], *OTHER)) as session:
        assert nodes.route() == list(CHAIN)
        assert len(session.held) == HELD
    async with opened(nodes, OTHER):
        assert nodes.route() == ["b0", "b1", "b2"]
    fast = replace(others, return_ms=others.return_ms - others.sweep_ms + 1e-3)
    monkeypatch.setattr(type(opener), "route", AsyncMock(return_value=fast))
    async with opened(nodes, (*IDS[:SHARED], *OTHER)) as session:
        assert nodes.route() == ["b0", "b1", "b2"], "the other chain is more than twice as fast"
        assert session.held == ()


async def test_a_text_that_was_cut_back_leaves_what_it_became(nodes: KillableNodes) -> None:
    other = (*IDS[:30], *IDS)
    plain = await nodes.undisturbed((*other, *OTHER), **SAMPLED)
    async with opened(nodes, IDS) as session:
        await run(nodes, session, IDS)
        await run(nodes, session, other)
    async with opened(nodes, (*other, *OTHER)) as session:
        assert len(session.held) == len(other) // BLOCK_TOKENS * BLOCK_TOKENS
        assert (await run(nodes, session, (*other, *OTHER))).tokens == plain


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
        assert backend.link.sessions.begun == 7
        assert [result.tokens for result in results] == plain
        assert sorted(result.stats.reused_tokens for result in results)[:2] == [0, HELD]
        for name, count in rows(nodes).items():
            assert count - before[name] < 2 * SHARED + 8 * (SHARED - HELD + 12 + 12 * 9), (
                "the opening was computed once"
            )


async def test_a_machine_files_no_old_rows_under_the_names_of_a_snapshot(nodes: KillableNodes) -> None:
    new = (b"1" * 16, b"2" * 16)
    async with opened(nodes, (*IDS, *OTHER)) as session:
        await run(nodes, session, (*IDS, *OTHER))
        before, tail = only(nodes, "a1"), only(nodes, "a2")
        arrived = nodes.stall_replay("a2")
        snapshot = before.journal.snapshot()
        (upstream,) = tail._upstreams._by_sender.values()
        tail.restore(upstream, replace(snapshot, tokens=snapshot.tokens[::-1], names=new))
        await arrived.wait()
        assert tail.names == [*new]
        await tail.file()
        nodes["a2"].sessions.pool.check_integrity()
        scope = tail.scope
        assert scope is not None
        assert len(nodes["a2"].sessions.pool.lacks(NamedText(scope, new))) == 2


async def test_a_machine_that_holds_nothing_makes_all_begin_at_the_first_token(nodes: KillableNodes) -> None:
    """As one of an older release does, which does not say what it holds."""
    ids = (*IDS[:SHARED], *OTHER)
    plain = await nodes.undisturbed(ids, **SAMPLED)
    await hold(nodes)
    nodes["a1"].sessions.pool.clear()
    async with opened(nodes, ids) as session:
        assert [len(only(nodes, name).log.executed.committed) for name in CHAIN] == [HELD, 0, HELD]
        assert session.held == ()
        result = await run(nodes, session, ids)
    assert result.tokens == plain
    assert result.stats.reused_tokens == 0


async def test_who_begin_at_once_while_another_ends_are_right(nodes: KillableNodes) -> None:
    texts = [(*IDS[:SHARED], *OTHER[: 5 + number]) for number in range(3)]
    plain = [await nodes.undisturbed(ids, **SAMPLED) for ids in texts]

    async def told(ids: Sequence[int]) -> tuple[int, ...]:
        async with opened(nodes, ids) as session:
            return (await run(nodes, session, ids)).tokens

    async with asyncio.TaskGroup() as group, opened(nodes, IDS) as first:
        await run(nodes, first, IDS)
        found = [group.create_task(told(ids)) for ids in texts]
    assert [task.result() for task in found] == plain
    await until_freed([nodes[name] for name in CHAIN])
    for name in CHAIN:
        nodes[name].sessions.pool.check_integrity()


@pytest.mark.parametrize("victim", ["a0", "a1", "a2"])
async def test_rows_of_further_layers_are_kept_too(
    nodes: KillableNodes, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = (*IDS[:SHARED], *OTHER)
    plain = await nodes.undisturbed(ids, **SAMPLED)
    await hold(nodes)
    monkeypatch.setattr(nodes.client, "_opener", replace(nodes.client._opener, aux_layers=(2, 6, 9)))
    async with opened(nodes, ids) as session:
        assert session.held == (), "what is held has narrower rows"
    await hold(nodes)
    async with opened(nodes, ids) as session:
        assert len(session.held) == HELD
        arrived = nodes.stall(victim, 2)
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(run(nodes, session, ids))
            await arrived.wait()
            await nodes.announce("b0", "b1", "b2")
            await nodes.kill(victim)
        result = telling.result()
    assert result.tokens == plain
    assert len(result.stats.repairs) == 1


async def test_a_hedged_session_neither_asks_nor_leaves_anything(
    nodes: KillableNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = (*IDS[:SHARED], *OTHER)
    plain = await nodes.undisturbed(ids, **SAMPLED)
    await hold(nodes)
    before = {name: len(nodes[name].sessions.pool) for name in CHAIN}
    await nodes.announce("b0", "b1", "b2")
    monkeypatch.setattr(nodes.client, "_opener", replace(nodes.client._opener, hedge=True))
    async with opened(nodes, ids) as session:
        assert session.held == ()
        assert (await run(nodes, session, ids)).tokens == plain
    await until_freed(nodes.nodes.values())
    assert {name: len(nodes[name].sessions.pool) for name in CHAIN} == before
    assert not any(len(nodes[name].sessions.pool) for name in ("b0", "b1", "b2"))
