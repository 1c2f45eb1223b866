"""The session protocol over real nodes and gRPC: what travels, what is computed, what is refused, what is freed."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc.aio
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import node.hop
from client import AsyncSwarm
from client.options import GenerateOptions
from node.engine import Engine, StepCost
from node.hop import HopSession
from node.serve import Node
from node.sweep_run import SweepRun
from node.upstream import UpstreamSide
from swarm import wire
from swarm.codec import encode_rows
from swarm.demo import DRAFT, PASSAGES, TARGET
from swarm.errors import Busy, ContextFull, GenerationInterrupted, HopError
from swarm.ids import SessionId, TreeNodeId
from swarm.messages import (
    Ack,
    Attached,
    Close,
    Codec,
    Counters,
    Fault,
    FaultKind,
    Ping,
    Pong,
    Ready,
    RepliesRequest,
    RouteHop,
    Sweep,
    SweepFrame,
)
from tests.net.raw import RawLink, Sweeps, attach, counters, dial, info, opening, raw_link, raw_replies, route_of
from tests.swarm_here import SwarmHere, swarm_here

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPANS = ["0-4", "4-8", "8-12"]


@dataclass(frozen=True, slots=True)
class Running:
    """Three nodes and a warm client."""

    here: SwarmHere
    client: AsyncSwarm

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.here.nodes

    @property
    def route(self) -> tuple[RouteHop, ...]:
        return route_of(self.nodes, SPANS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # more threads would outlive their test
    async with swarm_here(TARGET, SPANS) as here, here.client(draft=DRAFT) as swarm:
        await swarm.generate("It", max_new_tokens=3, nodes=1)  # starts the threads that live as long as the swarm
        yield Running(here, swarm)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def every_session_is_freed(running: Running) -> AsyncIterator[None]:
    yield
    await until_freed(running.nodes)


@pytest.fixture(scope="module")
def hugging_face() -> PreTrainedModel:
    model: PreTrainedModel = cast("Any", AutoModelForCausalLM).from_pretrained(TARGET, dtype=torch.float32)
    return model


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


def prompt(line: int, tokens: int = 12) -> tuple[int, ...]:
    text = json.loads(PASSAGES.read_text().splitlines()[line])["text"]
    return tuple(AutoTokenizer.from_pretrained(TARGET)(text).input_ids[:tokens])


@torch.inference_mode()
def greedy_picks(model: PreTrainedModel, sweeps: Iterable[Sweep]) -> dict[int, int]:
    """Hugging Face's pick after each node of a session that never truncates, each from its own path alone."""
    paths: dict[int | None, list[int]] = {None: []}
    tip: int | None = None
    picks = {}
    for sweep in sweeps:
        tip = tip if sweep.commit_to is None else sweep.commit_to
        for offset, (token, parent) in enumerate(zip(sweep.tokens, sweep.parents, strict=True)):
            path = [*paths[tip if parent is None else parent], token]
            paths[sweep.first_id + offset] = path
            picks[sweep.first_id + offset] = int(cast("Any", model)(torch.tensor([path])).logits[0, -1].argmax())
    return picks


async def until(check: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Ask again and again, over the network, until the answer is yes."""
    async with asyncio.timeout(timeout_s):
        while not await check():
            pass


async def until_freed(nodes: Iterable[Node], timeout_s: float = 5.0) -> None:
    async def freed() -> bool:
        found = [await info(node) for node in nodes]
        return all(one.sessions == 0 and one.kv_tokens_free == one.kv_tokens_total for one in found)

    await until(freed, timeout_s)


async def until_received(node: Node, frames: int) -> None:
    async def received() -> bool:
        return (await info(node)).counters.frames_in >= frames

    await until(received)


def engine_of(node: Node) -> Engine:
    return node.sessions._shop.engine


@asynccontextmanager
async def thread_held(node: Node) -> AsyncIterator[None]:
    """Keep a node's compute thread from working; what arrives meanwhile waits in its queues."""
    gate, began = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        loop.call_soon_threadsafe(began.set)
        assert gate.wait(15)

    async with asyncio.TaskGroup() as group:
        group.create_task(engine_of(node).on_thread(hold))
        await began.wait()
        try:
            yield
        finally:
            gate.set()


def grown(before: list[Counters], after: list[Counters], field: str) -> list[int]:
    return [getattr(b, field) - getattr(a, field) for a, b in zip(before, after, strict=True)]


async def refusal(link: RawLink) -> Fault:
    """The fault that ends a stream."""
    fault = await link.until(Fault)
    assert await link.read() is None
    assert await link.status() is grpc.StatusCode.OK
    return fault


# What travels and what is computed


@pytest.mark.parametrize("nodes", [0, 16])
async def test_each_hop_sees_each_sweep_once_and_only_its_new_nodes(nodes: int, running: Running) -> None:
    before = await counters(running.nodes)
    result = await running.client.generate(prompt(0), max_new_tokens=16, nodes=nodes)
    after = await counters(running.nodes)
    stats = result.stats
    sweeps = stats.prefill_sweeps + len(stats.sweeps)
    sent = stats.prompt_tokens - 1 + sum(1 + sweep.nodes for sweep in stats.sweeps)
    assert sent > 16 + nodes
    for field, expected in {
        "sweeps": sweeps,
        "frames_in": sweeps,
        "frames_out": sweeps,
        "forwards": sweeps,
        "tree_nodes": sent,
        "rows_in_forwards": sent,
        "pruned_nodes": 0,
        "errors": 0,
    }.items():
        assert grown(before, after, field) == [expected] * 3, field
    assert all(len(sweep.hops) == 3 for sweep in stats.sweeps), "every hop reports its time"


async def test_replies_come_from_the_tail_and_from_no_other_hop(
    running: Running, hugging_face: PreTrainedModel
) -> None:
    first, middle, tail = running.nodes
    opened = attach(running.route, opening(first), b"direct")
    async with raw_link(first, opened) as link:
        await link.until(Ready)
        for node in (first, middle):
            async with dial(node, wire.REPLIES) as call:
                await call.write(_request(opened.session))
                assert await call.code() is grpc.StatusCode.NOT_FOUND
        async with raw_replies(tail, opened.session) as replies:
            sweep = Sweeps().chain(prompt(0, 4))
            await link.send(SweepFrame(sweep))
            reply = await replies.read()
        assert dict(reply.picks) == greedy_picks(hugging_face, [sweep])
        assert len(reply.times) == 3
        await link.send(Ping(5), Close("done"))
        while await link.read() is not None:
            pass
        kinds = {type(answer) for answer in link.heard}
        assert kinds <= {Attached, Ready, Ack, Pong}
        assert kinds >= {Attached, Ack, Pong}


async def test_an_unknown_session_has_no_reply_stream(running: Running) -> None:
    async with dial(running.nodes[2], wire.REPLIES) as call:
        await call.write(_request(b"nobody".ljust(16, b"-")))
        assert await call.code() is grpc.StatusCode.NOT_FOUND


def _request(session: bytes) -> bytes:
    return wire.encode_replies_up(RepliesRequest(SessionId(session)))


@pytest.mark.parametrize("held", [0, 1, 2])
async def test_sweeps_sent_ahead_of_replies_and_pruned_in_the_queue(
    held: int, running: Running, hugging_face: PreTrainedModel
) -> None:
    """Parents are in flight; a later commit kills a branch that waits in the held hop's queue (P6, P7)."""
    first, _, tail = running.nodes
    ids = prompt(1, 8)
    said = Sweeps()
    sweeps = [
        said.chain(ids[:3]),  # 0, 1, 2
        said.next(ids[3:7], [2, 2, 3, 4]),  # 3 and 4 under 2, 5 under 3, 6 under 4
        said.next(ids[:3], [5, 4, 6]),  # 7 under 5, 8 under 4, 9 under 6: all in flight
        said.next(ids[:1], [6], commit=[0, 1, 2, 4]),  # kills 3, 5, 7; 10 under 6
    ]
    dead, alive = {3, 5, 7}, {0, 1, 2, 4, 6, 8, 9, 10}
    opened = attach(running.route, opening(first), b"ahead")
    before = await counters(running.nodes)
    async with raw_link(first, opened) as link, raw_link_ready(link), raw_replies(tail, opened.session) as replies:
        async with thread_held(running.nodes[held]):
            for sweep in sweeps:
                await link.send(SweepFrame(sweep))
                await until_received(running.nodes[held], before[held].frames_in + sweep.sequence)
        answers = [await replies.read() for _ in sweeps]
        await link.send(Close("done"))
    after = await counters(running.nodes)
    assert [answer.sequence for answer in answers] == [1, 2, 3, 4]
    picks = dict(pick for answer in answers for pick in answer.picks)
    assert picks.keys() == alive, "no pick for a node that was pruned, one for every other"
    expected = greedy_picks(hugging_face, sweeps)
    assert picks == {node: expected[node] for node in alive}
    assert grown(before, after, "pruned_nodes") == [0] * held + [len(dead)] * (3 - held), "`kept` holds further on"
    assert grown(before, after, "rows_in_forwards") == [11] * held + [len(alive)] * (3 - held)
    assert grown(before, after, "frames_in") == grown(before, after, "frames_out") == [4, 4, 4]


@asynccontextmanager
async def raw_link_ready(link: RawLink) -> AsyncIterator[Ready]:
    yield await link.until(Ready)


# Repetition and refusal


async def test_a_repeated_sweep_is_not_run_again(running: Running) -> None:
    first, _, tail = running.nodes
    opened = attach(running.route, opening(first), b"twice")
    before = await counters(running.nodes)
    async with raw_link(first, opened) as link, raw_link_ready(link), raw_replies(tail, opened.session) as replies:
        said = Sweeps()
        one = SweepFrame(said.chain(prompt(2, 3)))
        await link.send(one, one)
        assert [(await link.until(Ack)).sequence, (await link.until(Ack)).sequence] == [1, 1]
        await link.send(SweepFrame(said.next((7,), (None,), commit=(0, 1, 2))))
        assert [(await replies.read()).sequence, (await replies.read()).sequence] == [1, 2]
        await link.send(Close("done"))
    after = await counters(running.nodes)
    assert grown(before, after, "frames_in") == [3, 2, 2], "hop 0 drops it (P9)"
    assert grown(before, after, "rows_in_forwards") == [4, 4, 4]


async def test_the_tail_sends_its_kept_reply_again(running: Running) -> None:
    tail = running.nodes[2]
    opened = attach(running.route, opening(tail), b"again", index=2)
    rows = encode_rows(torch.randn(3, 192, generator=torch.Generator().manual_seed(1)), Codec.FP32)
    said = Sweeps()
    one = SweepFrame(said.chain(prompt(2, 3)), None, rows)
    before = await counters([tail])
    async with raw_link(tail, opened) as link, raw_link_ready(link), raw_replies(tail, opened.session) as replies:
        await link.send(one)
        reply = await replies.read()
        await link.send(one)
        assert await replies.read() == reply
        acking = said.next((), (), acked=1)
        await link.send(SweepFrame(acking, None, replace(rows, count=0, data=b"")))
        assert (await replies.read()).sequence == 2
        await link.send(one, SweepFrame(said.next((), (), acked=2), None, replace(rows, count=0, data=b"")))
        assert (await replies.read()).sequence == 3, "the client holds reply 1: it is not sent again"
        await link.send(Close("done"))
    assert grown(before, await counters([tail]), "rows_in_forwards") == [3]


async def test_a_refused_sweep_consumes_no_sequence(running: Running, hugging_face: PreTrainedModel) -> None:
    first, _, tail = running.nodes
    opened = attach(running.route, opening(first), b"refused")
    good = Sweeps().chain(prompt(3, 3))
    bad = replace(good, parents=(None, TreeNodeId(0), TreeNodeId(9)))
    later = replace(Sweeps().chain((1,)), sequence=2, first_id=TreeNodeId(3), picks_from=TreeNodeId(3))
    async with raw_link(first, opened) as link, raw_link_ready(link), raw_replies(tail, opened.session) as replies:
        await link.send(SweepFrame(bad), SweepFrame(later))
        assert [(await link.until(Fault)).field, (await link.until(Fault)).field] == ["parents", "sequence"]
        await link.send(SweepFrame(good))
        assert dict((await replies.read()).picks) == greedy_picks(hugging_face, [good])
        await link.send(Close("done"))


@pytest.mark.parametrize(
    ("sizes", "field"),
    [((1, 1, 1), "sequence"), ((5, 6), "tokens")],
    ids=["sweeps", "nodes"],
)
async def test_more_than_the_credits_is_refused(sizes: tuple[int, ...], field: str, running: Running) -> None:
    first = running.nodes[0]
    opened = attach(running.route, opening(first, sweeps=2, nodes=10), b"credits")
    async with raw_link(first, opened) as link:
        ready = await link.until(Ready)
        assert (ready.credits.sweeps, ready.credits.nodes) == (2, 10)
        said = Sweeps()
        for number, size in enumerate(sizes):
            await link.send(SweepFrame(said.chain(range(number, number + size))))
        fault = await link.until(Fault)
        assert (fault.kind, fault.field, fault.peer) == (FaultKind.PROTOCOL, field, first.peer_id)
        assert sum(isinstance(answer, Ack) for answer in link.heard) == len(sizes) - 1
        await link.send(Close("done"))


async def test_a_full_window_is_refused_and_the_session_goes_on(running: Running) -> None:
    first, _, tail = running.nodes
    opened = attach(running.route, opening(first, window=8), b"window")
    async with raw_link(first, opened) as link, raw_link_ready(link), raw_replies(tail, opened.session) as replies:
        await link.send(SweepFrame(Sweeps().chain(range(9))))
        assert (await link.until(Fault)).kind is FaultKind.CONTEXT_FULL
        await link.send(SweepFrame(Sweeps().chain(range(8))))
        assert len((await replies.read()).picks) == 8
        await link.send(Close("done"))


async def test_attaches_that_do_not_fit_are_refused_by_kind(running: Running) -> None:
    first, middle, tail = running.nodes
    fits = attach(running.route, opening(first), b"misfit")
    stranger = replace(running.route[1], peer=running.client._registry.peer_id)
    cases = [
        (replace(fits, open=replace(fits.open, fingerprint="other")), FaultKind.MODEL_MISMATCH, "", first.peer_id),
        (replace(fits, index=1), FaultKind.PROTOCOL, "route", first.peer_id),
        (
            replace(fits, route=route_of((first, middle, tail), ["0-5", "5-8", "8-12"])),
            FaultKind.PROTOCOL,
            "route",
            first.peer_id,
        ),
        (replace(fits, route=fits.route[:2]), FaultKind.PROTOCOL, "route", first.peer_id),
        (replace(fits, open=replace(fits.open, window_tokens=100_000)), FaultKind.CONTEXT_FULL, "", first.peer_id),
        (replace(fits, route=(fits.route[0], stranger, fits.route[2])), FaultKind.UNREACHABLE, "", stranger.peer),
    ]
    for number, (bad, kind, field, about) in enumerate(cases):
        async with raw_link(first, replace(bad, session=attach((), fits.open, b"%d" % number).session)) as link:
            fault = await refusal(link)
            assert (fault.kind, fault.field, fault.peer) == (kind, field, about), number
            assert not any(isinstance(answer, Ready) for answer in link.heard)


# Generations and lost neighbours


async def test_only_the_newest_upstream_is_heard(running: Running) -> None:
    first, _, tail = running.nodes
    opened = attach(running.route, opening(first), b"fence")
    said = Sweeps()
    one, two = (SweepFrame(said.chain((5,))), SweepFrame(said.chain((6,), commit=(0,))))
    async with raw_link(first, opened) as old, raw_link_ready(old), raw_replies(tail, opened.session) as replies:
        await old.send(one)
        assert (await replies.read()).sequence == 1
        before = await counters([first])
        async with raw_link(first, replace(opened, generation=2)) as new:
            assert await new.until(Attached) == Attached(2, 1)
            with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                await old.send(two, Close("says who?"))
                while await old.read() is not None:
                    pass
            assert old.call.done()
            assert [answer.sequence for answer in old.heard if isinstance(answer, Ack)] == [1]
            for generation in (1, 2):
                async with raw_link(first, replace(opened, generation=generation)) as late:
                    assert (await refusal(late)).kind is FaultKind.CLOSED
            assert grown(before, await counters([first]), "frames_in") == [0], "dropped (R3)"
            await new.send(two)
            assert (await new.until(Ack)).sequence == 2
            assert (await replies.read()).sequence == 2
            await new.send(Close("done"))


async def test_a_vanished_clients_session_goes_away_on_every_hop(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.hop, "ORPHAN_S", 0.2)
    opened = attach(running.route, opening(running.nodes[0]), b"vanished")
    async with raw_link(running.nodes[0], opened) as link:
        await link.until(Ready)
        assert [(await info(node)).sessions for node in running.nodes] == [1, 1, 1]
    await until_freed(running.nodes, timeout_s=0.2 + 2)


async def test_an_orphan_waits_for_its_upstream(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.hop, "ORPHAN_S", 1.0)
    detach, detached, loop = HopSession.detach, asyncio.Event(), asyncio.get_running_loop()

    def watched(hop: HopSession, upstream: UpstreamSide) -> None:
        detach(hop, upstream)
        detached.set()

    monkeypatch.setattr(HopSession, "detach", watched)
    first = running.nodes[0]
    opened = attach(running.route, opening(first), b"orphan")
    said = Sweeps()
    async with raw_link(first, opened) as link:
        await link.until(Ready)
        await link.send(SweepFrame(said.chain((5,))))
        await link.until(Ack)
    await detached.wait()
    due = loop.time() + 1.1
    async with raw_link(first, replace(opened, generation=1)) as link:
        assert await link.until(Attached) == Attached(1, 1), "its state is still there"

        async def past_its_time() -> bool:
            return (await info(first)).sessions == 1 and loop.time() > due

        await until(past_its_time)
        await link.send(SweepFrame(said.chain((6,), commit=(0,))))
        assert (await link.until(Ack)).sequence == 2
        await link.send(Close("done"))
        while await link.read() is not None:
            pass


@pytest.mark.parametrize("dead", [0, 1, 2])
async def test_a_dead_hop_ends_the_generation_with_its_text_so_far(dead: int, servers: list[grpc.aio.Server]) -> None:
    async with swarm_here(TARGET, SPANS) as here, here.client() as swarm:
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
    assert isinstance(error.__cause__, HopError)
    assert error.__cause__.peer == here.nodes[dead].peer_id


async def test_leaving_a_stream_frees_the_session_at_once(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.hop, "ORPHAN_S", 600.0)
    async for piece in running.client.stream(prompt(5), max_new_tokens=400, nodes=4):
        assert piece.result is None
        assert [(await info(node)).sessions for node in running.nodes] == [1, 1, 1]
        break
    await until_freed(running.nodes, timeout_s=4)


# Several sessions


async def test_a_full_node_is_busy_until_a_session_ends() -> None:
    async with swarm_here(TARGET, SPANS, kv_tokens=120) as here, here.client() as swarm:
        opened = attach(route_of(here.nodes, SPANS), opening(here.nodes[0], window=40, nodes=40), b"full")
        async with raw_link(here.nodes[0], opened) as link:
            await link.until(Ready)
            assert [(await info(node)).kv_tokens_free for node in here.nodes] == [40, 40, 40]
            with pytest.raises(Busy, match=r"needs KV for \d+ tokens, 40 of 120 are free"):
                await swarm.generate(prompt(6), max_new_tokens=8)
            await link.send(Close("done"))
            await until_freed(here.nodes)
        assert len((await swarm.generate(prompt(6), max_new_tokens=8)).tokens) == 8
        with pytest.raises(ContextFull, match="the model's context"):
            await swarm.generate(prompt(6), max_new_tokens=100_000)
        await until_freed(here.nodes)


async def test_two_sessions_at_once_get_their_own_texts(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[int, ...], GenerateOptions]] = [
        (prompt(line), {"max_new_tokens": 16, "nodes": 8, "temperature": 1.0, "seed": line}) for line in (7, 8)
    ]
    alone = [await running.client.generate(ids, **options) for ids, options in asked]
    most = 0
    advance = SweepRun.advance

    def watched(run: SweepRun, count: int) -> None:
        nonlocal most
        most = max(most, len(running.nodes[0].sessions))
        advance(run, count)

    monkeypatch.setattr(SweepRun, "advance", watched)
    together = await asyncio.gather(*(running.client.generate(ids, **options) for ids, options in asked))
    assert most >= 2
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    assert together[0].tokens != together[1].tokens


async def test_a_long_prefill_does_not_hold_up_another_session(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the order of the slices: the short session came second and is served between the long one's slices (F3)."""
    first, _, tail = running.nodes
    slices: list[int] = []
    advance = SweepRun.advance

    def watched(run: SweepRun, count: int) -> None:
        if run._model is first._model:
            slices.append(len(run.work.frame.sweep.tokens))
        advance(run, count)

    monkeypatch.setattr(SweepRun, "advance", watched)
    monkeypatch.setattr(StepCost, "rows_within", lambda *_: 16)
    monkeypatch.setattr(engine_of(first), "_quantum_ms", 1.0)  # less than a slice: one slice per turn
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
            await one.send(SweepFrame(Sweeps().chain(range(320))))
            await one.until(Ack)
            await two.send(SweepFrame(Sweeps().chain(range(48))))
            await two.until(Ack)
        assert len((await short_replies.read()).picks) == 48
        assert len((await long_replies.read()).picks) == 320
        await one.send(Close("done"))
        await two.send(Close("done"))
    assert sorted(slices) == [48] * 3 + [320] * 20
    assert slices[0] == 320
    assert 320 in slices[slices.index(48) :]
    last_short = len(slices) - 1 - slices[::-1].index(48)
    assert last_short <= 8, f"the short session waited for the long one: {slices}"


async def test_a_client_that_reads_no_replies_blocks_nobody(running: Running) -> None:
    first, _, tail = running.nodes
    alone = await running.client.generate(prompt(9), max_new_tokens=8)
    opened = attach(running.route, opening(first, sweeps=8, nodes=1200), b"deaf")
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16)]
    async with (
        raw_link(first, opened) as link,
        raw_link_ready(link),
        raw_replies(tail, opened.session, narrow),
    ):
        said = Sweeps()
        for number in range(6):
            await link.send(SweepFrame(said.next(range(150 * number, 150 * (number + 1)), [None] * 150)))
            await link.until(Ack)
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
