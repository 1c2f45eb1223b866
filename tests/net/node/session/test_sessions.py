"""Sessions over real nodes: whose stream is heard, what outlives whom, what several of them do to each other.

Their links are in memory; the other files here have sessions over gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

import node.session.hop_session
import node.session.service
from benchmarks.simulation.virtual_loop import TICK_S
from client.base.options import GenerateOptions
from client.chain import blame
from node.life.serve import Node
from node.session.hop_session import HopSession
from node.session.scheduler import Batch, Schedulable
from node.session.step_cost import StepCost
from node.session.sweep_run import SweepRun
from node.session.table import UNUSED_S
from node.session.upstreams import UpstreamStream
from swarm.base.errors import Busy, ContextFull, GenerationInterrupted, RouteError
from swarm.base.ids import TreeNodeId
from swarm.demo import TARGET
from swarm.link.dial import open_channel
from swarm.protocol import wire
from swarm.protocol.messages import Ack, Attached, Close, FaultKind, Hold, Ready, SweepFrame
from tests.in_process_swarm import in_process_swarm
from tests.memory_links import MemoryLinks
from tests.net.raw_client import (
    SweepNumbering,
    Unary,
    attach,
    counters,
    info,
    introduced,
    key_of,
    opening,
    raw_link,
    raw_replies,
    route_of,
)
from tests.net.three_nodes import (
    SPANS,
    ThreeNodes,
    engine_of,
    grown,
    prompt,
    raw_link_ready,
    refusal,
    thread_held,
    three_nodes,
    until,
    until_freed,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(links: MemoryLinks) -> AsyncIterator[ThreeNodes]:
    async with three_nodes() as three:
        yield three


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def every_session_is_freed(running: ThreeNodes) -> AsyncIterator[None]:
    yield
    await until_freed(running.nodes)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[grpc.aio.Server]:
    """The gRPC servers of the nodes that start in this test."""
    made: list[grpc.aio.Server] = []
    make = grpc.aio.server

    def server(**options: Any) -> grpc.aio.Server:  # noqa: ANN401
        made.append(make(**options))
        return made[-1]

    monkeypatch.setattr(grpc.aio, "server", server)
    return made


# Generations and lost neighbours


async def test_only_the_newest_upstream_is_heard(running: ThreeNodes) -> None:
    first, _, tail = running.nodes
    opened = attach(running.route, opening(first), b"fence")
    said = SweepNumbering()
    one, two = (SweepFrame(said.chain((5,))), SweepFrame(said.chain((6,), commit=(0,))))
    async with raw_link(first, opened) as old, raw_link_ready(old), raw_replies(tail, opened.session) as replies:
        await old.send(one)
        assert (await old.receipt(2)).sequence == 1
        assert (await replies.read()).sequence == 1
        before = await counters([first])
        async with raw_link(first, replace(opened, generation=2)) as new:
            assert await new.until(Attached) == Attached(2, 1, reads_packed=True)
            with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                await old.send(two, Close("says who?"))
                while await old.read() is not None:
                    pass
            assert old.call.done()
            hop = first.sessions.find(opened.session)
            assert hop is not None
            hop.receive(UpstreamStream(), two)  # as if it had been read already when its stream was fenced
            assert hop.log.received.sequence == 1
            assert {answer.sequence for answer in old.heard if isinstance(answer, Ack)} <= {0, 1}
            for generation, kind in ((1, FaultKind.CLOSED), (2, FaultKind.PROTOCOL)):
                async with raw_link(first, replace(opened, generation=generation)) as late:
                    assert (await refusal(late)).kind is kind
            assert grown(before, await counters([first]), "frames_in") == [0], "dropped (R3)"
            await new.send(two)
            assert (await new.receipt(2)).sequence == 2
            assert (await replies.read()).sequence == 2
            await new.send(Close("done"))


async def test_a_vanished_clients_session_goes_away_on_every_hop(
    running: ThreeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.session.hop_session, "ORPHAN_S", 0.2)
    opened = attach(running.route, opening(running.nodes[0]), b"vanished")
    async with raw_link(running.nodes[0], opened) as link:
        await link.until(Ready)
        assert [(await info(node)).sessions for node in running.nodes] == [1, 1, 1]
    await until_freed(running.nodes, timeout_s=0.2 + 2)


async def test_an_orphan_waits_for_its_upstream(running: ThreeNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.session.hop_session, "ORPHAN_S", 1.0)
    detach, detached, loop = HopSession.detach, asyncio.Event(), asyncio.get_running_loop()

    def watched(hop: HopSession, upstream: UpstreamStream) -> None:
        detach(hop, upstream)
        detached.set()

    monkeypatch.setattr(HopSession, "detach", watched)
    first = running.nodes[0]
    opened = attach(running.route, opening(first), b"orphan")
    said = SweepNumbering()
    async with raw_link(first, opened) as link:
        await link.until(Ready)
        await link.send(SweepFrame(said.chain((5,))))
        await link.receipt(2)
    await detached.wait()
    due = loop.time() + 1.1
    async with raw_link(first, replace(opened, generation=1)) as link:
        assert await link.until(Attached) == Attached(1, 1, reads_packed=True), "its state is still there"

        async def past_its_time() -> bool:
            return (await info(first)).sessions == 1 and loop.time() > due

        await until(past_its_time)
        await link.send(SweepFrame(said.chain((6,), commit=(0,))))
        assert (await link.receipt(2)).sequence == 2
        await link.send(Close("done"))
        while await link.read() is not None:
            pass


async def test_an_orphan_outlives_questions_and_ends_when_its_client_releases_it(
    running: ThreeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.session.hop_session, "ORPHAN_S", 600.0)
    key = key_of(b"released")
    opened = attach(running.route, opening(running.nodes[0]), b"released", generation=1)
    async with raw_link(running.nodes[0], opened) as link:
        await link.until(Ready)
    for one in running.nodes:

        async def asked(hold: Hold, of: Node = one) -> bool:
            request = wire.encode_hold(hold)
            async with open_channel(of.endpoint, []) as channel:
                call: Unary = channel.unary_unary(wire.HOLD)
                said = await call(request, metadata=introduced(of, wire.HOLD, key, request))
            return wire.decode_held(said).held

        async def orphaned(of: Node = one) -> bool:
            hop = of.sessions.find(key.session)
            return hop is not None and len(hop._upstreams) == 0

        await until(orphaned)
        assert await asked(Hold(key.session, 1))
        assert await asked(Hold(key.session, 0, is_release=True)), "of a generation that is over"
        assert await asked(Hold(key.session, 1)), "it is still there"
        assert not await asked(Hold(key.session, 1, is_release=True))
    await until_freed(running.nodes, timeout_s=2)


@pytest.mark.parametrize("dead", [0, 1, 2])
async def test_a_dead_hop_that_nobody_replaces_ends_the_generation_with_its_text_so_far(
    dead: int, servers: list[grpc.aio.Server]
) -> None:
    async with in_process_swarm(TARGET, SPANS) as here, here.client(wait=0.0) as swarm:
        plain = await swarm.generate(prompt(4), max_new_tokens=60)
        stream = swarm.stream(prompt(4), max_new_tokens=400)
        pieces = [(await anext(stream)).text]
        await servers[dead].stop(None)

        async def read_on() -> None:
            async for piece in stream:
                pieces.append(piece.text)  # noqa: PERF401 - kept when the stream breaks

        with pytest.raises(GenerationInterrupted) as caught:
            await read_on()
    error = caught.value
    assert error.text
    assert error.text.startswith("".join(pieces))
    assert error.tokens[:60] == plain.tokens[: len(error.tokens)]
    assert isinstance(error.__cause__, RouteError)
    assert error.__cause__.missing == ((4 * dead, 4 * dead + 4),)


async def test_leaving_a_stream_frees_the_session_at_once(running: ThreeNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.session.hop_session, "ORPHAN_S", 600.0)
    async for piece in running.client.stream(prompt(5), max_new_tokens=400, nodes=4):
        assert piece.result is None
        assert [(await info(node)).sessions for node in running.nodes] == [1, 1, 1]
        break
    await until_freed(running.nodes, timeout_s=4)


# Several sessions


async def test_a_full_node_is_busy_until_a_session_ends_or_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blame, "BUSY_S", 0.2)
    monkeypatch.setattr(node.session.service, "UPSTREAM_S", 600.0)  # the raw link does not ping
    async with in_process_swarm(TARGET, SPANS, kv_tokens=120) as here, here.client() as swarm:
        opened = attach(route_of(here.nodes, SPANS), opening(here.nodes[0], window=70, nodes=40), b"full")
        async with raw_link(here.nodes[0], opened) as link:
            await link.until(Ready)
            assert [(await info(node)).kv_tokens_free for node in here.nodes] == [10, 10, 10]
            hoards = [node.sessions.find(opened.session) for node in here.nodes]
            for hoard in hoards:
                assert hoard is not None
                hoard.used_at += 600.0  # as if it had just begun, however slow this machine is
            with pytest.raises(Busy, match=r"needs KV for \d+ tokens, 10 of 120 are free"):
                await swarm.generate(prompt(6), max_new_tokens=8, nodes=0)
            for hoard in hoards:
                assert hoard is not None
                hoard.used_at -= 600.0 + UNUSED_S
            assert len((await swarm.generate(prompt(6), max_new_tokens=8, nodes=0)).tokens) == 8
        await until_freed(here.nodes)
        assert len((await swarm.generate(prompt(6), max_new_tokens=8, nodes=0)).tokens) == 8
        with pytest.raises(ContextFull, match="the model's context"):
            await swarm.generate(prompt(6), max_new_tokens=100_000)
        await until_freed(here.nodes)


async def test_two_sessions_at_once_get_their_own_texts(running: ThreeNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[int, ...], GenerateOptions]] = [
        (prompt(line), {"max_new_tokens": 16, "nodes": 8, "temperature": 1.0, "seed": line}) for line in (7, 8)
    ]
    alone = [await running.client.generate(ids, **options) for ids, options in asked]
    most = 0
    run_batch = Batch.run

    def watched(batch: Batch[Schedulable]) -> dict[SweepRun, Exception]:
        nonlocal most
        most = max(most, len(running.nodes[0].sessions))
        return run_batch(batch)

    monkeypatch.setattr(Batch, "run", watched)
    together = await asyncio.gather(*(running.client.generate(ids, **options) for ids, options in asked))
    assert most >= 2
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    assert together[0].tokens != together[1].tokens


async def test_a_long_prefill_does_not_hold_up_another_session(
    running: ThreeNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the order of the slices: the short session came second and is served between the long one's slices (F3)."""
    first, _, tail = running.nodes
    slices: list[int] = []
    run_batch = Batch.run

    def watched(batch: Batch[Schedulable]) -> dict[SweepRun, Exception]:
        run = batch.members[0].run
        if run.model is first.running.host.model:
            slices.append(len(run.work.frame.sweep.tokens))
        return run_batch(batch)

    monkeypatch.setattr(Batch, "run", watched)
    monkeypatch.setattr(StepCost, "rows_within", lambda *_: 16)
    for quantum_of in (engine_of(first), engine_of(first)._turns):
        monkeypatch.setattr(quantum_of, "_quantum_ms", 1e3 * TICK_S)  # less than a slice: one slice per turn
    route, asks = running.route, opening(first, window=400, nodes=400)
    long, short = (attach(route, asks, name) for name in (b"long", b"short"))
    async with (
        raw_link(first, long) as one,
        raw_link_ready(one),
        raw_link(first, short) as two,
        raw_link_ready(two),
        raw_replies(tail, long.session) as long_replies,
        raw_replies(tail, short.session) as short_replies,
    ):
        async with thread_held(first):
            await one.send(SweepFrame(SweepNumbering().chain(range(320))))
            await one.receipt(2)
            await two.send(SweepFrame(SweepNumbering().chain(range(48))))
            await two.receipt(2)
        assert len((await short_replies.read()).picks) == 48
        assert len((await long_replies.read()).picks) == 320
        await one.send(Close("done"))
        await two.send(Close("done"))
    assert sorted(slices) == [48] * 3 + [320] * 20
    assert slices[0] == 320
    assert 320 in slices[slices.index(48) :]
    last_short = len(slices) - 1 - slices[::-1].index(48)
    assert last_short <= 8, f"the short session waited for the long one: {slices}"


async def test_sweeps_that_wait_at_a_hop_share_a_forward(running: ThreeNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three come while the hop computes: the one that it had taken runs alone, the others together."""
    first, _, tail = running.nodes
    shared: list[int] = []
    run_batch = Batch.run

    def watched(batch: Batch[Schedulable]) -> dict[SweepRun, Exception]:
        if batch.members[0].run.model is first.running.host.model:
            shared.append(len(batch.members))
        return run_batch(batch)

    monkeypatch.setattr(Batch, "run", watched)
    monkeypatch.setattr(engine_of(first), "_cost", StepCost(20.0, 0.01))  # it pays, however fast this machine is
    texts = [prompt(line, tokens=6) for line in (1, 2, 3)]
    picks: list[list[tuple[tuple[TreeNodeId, int], ...]]] = []
    for together in (False, True):
        async with AsyncExitStack() as stack:
            links, replies = [], []
            for place in range(3):
                opened = attach(running.route, opening(first), b"%d of %d" % (place, together))
                links.append(await stack.enter_async_context(raw_link(first, opened)))
                await stack.enter_async_context(raw_link_ready(links[-1]))
                replies.append(await stack.enter_async_context(raw_replies(tail, opened.session)))
            (before,) = await counters([first])
            async with thread_held(first) if together else nullcontext():
                for link, answers, text in zip(links, replies, texts, strict=True):
                    await link.send(SweepFrame(SweepNumbering().chain(text)))
                    await link.receipt(2)
                    if not together:
                        picks.append([(await answers.read()).picks])
            if together:
                assert [[(await answers.read()).picks] for answers in replies] == picks
                (after,) = await counters([first])
                assert after.forwards == before.forwards + 2
            for link in links:
                await link.send(Close("done"))
    assert shared == [1, 1, 1, 1, 2]


async def test_a_client_that_reads_no_replies_blocks_nobody(running: ThreeNodes) -> None:
    first, _, tail = running.nodes
    alone = await running.client.generate(prompt(9), max_new_tokens=8)
    opened = attach(running.route, opening(first, sweeps=8, nodes=1200), b"deaf")
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16)]
    async with (
        raw_link(first, opened) as link,
        raw_link_ready(link),
        raw_replies(tail, opened.session, narrow),
    ):
        said = SweepNumbering()
        for number in range(6):
            await link.send(SweepFrame(said.next(range(150 * number, 150 * (number + 1)), [None] * 150)))
            await link.receipt(number + 2)
        hop = tail.sessions.find(opened.session)
        assert hop is not None

        async def answered() -> bool:
            await info(tail)
            return len(hop.replies._kept) == 6

        await until(answered)
        result = await running.client.generate(prompt(9), max_new_tokens=8)
        assert result.tokens == alone.tokens
        assert hop.replies._sent < 6, "its stream was stuck all the while"
        await link.send(Close("done"))
