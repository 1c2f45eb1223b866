"""Peers that do not read, do not speak or open too much: bounded, ended in time, and nobody else's trouble."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import AsyncExitStack, suppress
from typing import NoReturn

import grpc.aio
import pytest

import node.life.span_host
import node.session.service
from node.life.serve import Node
from node.session.service import RpcContext
from node.session.upstreams import OUTBOX_MESSAGES
from swarm.demo import TARGET
from swarm.link.link import Stream
from swarm.protocol import wire
from swarm.protocol.messages import Close, FaultKind, Ping, Ready, SweepFrame
from swarm.protocol.wire import encode_part
from tests.in_process_swarm import in_process_swarm
from tests.net.healthy_session import (
    WIDTH,
    attacked_link,
    single_part,
    until_sessions,
    valid_attach,
)
from tests.net.raw_client import (
    SweepNumbering,
    attach,
    dial,
    info,
    opening,
    opening_of,
    raw_link,
    raw_replies,
    route_of,
)
from tests.net.three_nodes import SPANS, refusal, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16)]
"""A channel whose node may send 64 KiB that nobody read, and no more."""


@pytest.fixture
def given_up(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when a node ends the stream of a peer that does not read."""
    monkeypatch.setattr(node.session.service, "WRITE_S", 0.3)
    event = asyncio.Event()

    async def give_up(context: RpcContext) -> NoReturn:
        event.set()
        await original(context)

    original = node.session.service._give_up
    monkeypatch.setattr(node.session.service, "_give_up", give_up)
    return event


async def ended(call: Stream) -> grpc.StatusCode:
    """Read what there is, which is little, and how the stream ended: the status comes behind the messages."""
    size = 0
    async with asyncio.timeout(10):
        with suppress(grpc.aio.AioRpcError):
            while isinstance(data := await call.read(), bytes):
                size += len(data)
        assert size < 1 << 20
        return await call.code()


@pytest.mark.usefixtures("other_session")
async def test_unread_replies_end_their_stream_and_hold_no_kv(nodes: tuple[Node, ...], given_up: asyncio.Event) -> None:
    opened = attach(route_of(nodes, SPANS), opening(nodes[0], sweeps=8, nodes=1200), b"deaf")
    async with raw_link(nodes[0], opened) as link:
        await link.until(Ready)
        async with raw_replies(nodes[2], opened.session, NARROW) as replies:
            hop = nodes[2].sessions.find(opened.session)
            assert hop is not None
            kv_cache = weakref.ref(hop._kv_cache)
            said = SweepNumbering()
            for number in range(8):
                await link.send(SweepFrame(said.next(range(150 * number, 150 * (number + 1)), [None] * 150)))
            await given_up.wait()
            assert await ended(replies.call) is grpc.StatusCode.DEADLINE_EXCEEDED
            await link.send(Close("done"))
            await until_sessions(nodes, 1)
            assert hop.is_closed, "this test still holds the session, but not its KV"

            async def freed() -> bool:
                await info(nodes[2])  # what runs on the compute thread ends first
                gc.collect()
                return kv_cache() is None

            await until(freed)


@pytest.mark.usefixtures("other_session")
async def test_unread_answers_end_their_link(nodes: tuple[Node, ...], given_up: asyncio.Event) -> None:
    """Each ping is answered; where nobody reads, the answers pile up to the outbox's size."""
    metadata = opening_of(nodes[0], valid_attach(nodes))
    async with dial(nodes[0], wire.LINK, NARROW, metadata) as call:
        await call.write(single_part(valid_attach(nodes)))
        for number in range(40 * OUTBOX_MESSAGES):
            if given_up.is_set():
                break
            await call.write(single_part(Ping(2**62 + number)))
        await given_up.wait()
        assert await ended(call) is grpc.StatusCode.DEADLINE_EXCEEDED
    await until_sessions(nodes, 1)


@pytest.mark.usefixtures("other_session")
async def test_silence_ends_every_kind_of_stream(nodes: tuple[Node, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.session.service, "FIRST_MESSAGE_S", 0.1)
    async with raw_link(nodes[0]) as link:
        fault = await refusal(link)
        assert (fault.kind, fault.field, fault.peer) == (FaultKind.PROTOCOL, "attach", nodes[0].peer_id)
    async with raw_link(nodes[0]) as link:
        await link.send_bytes(encode_part(400, 0, (b"x" * 100, b"")))
        assert (await refusal(link)).field == "attach", "half a frame is none"
    async with dial(nodes[2], wire.REPLIES) as call:
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.usefixtures("other_session")
async def test_a_frame_that_never_ends_costs_what_its_session_may_send_and_no_more(nodes: tuple[Node, ...]) -> None:
    """Drop by drop: the buffer is bounded by the session's window and nodes, and other sessions go on beside it."""
    async with attacked_link(nodes, 1) as link:
        most = 512 * WIDTH * 4
        await link.send_bytes(encode_part(100, most + 1, (b"x", b"")))
        fault = await refusal(link)
        assert fault.field == "part"
        assert str(most) in fault.reason
    await until_sessions(nodes, 1)
    async with attacked_link(nodes, 1) as link:
        await link.send_bytes(encode_part(100, 0, (b"x", b"")))
        for _ in range(50):
            await link.send_bytes(encode_part(0, 0, (b"x", b"")))
        assert (await info(nodes[1])).sessions == 2
        await link.send_bytes(encode_part(0, 0, (b"x" * 50, b"")))
        assert (await refusal(link)).field == "part", "one byte too many"


async def test_more_streams_than_a_node_takes_are_refused_and_go_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.life.span_host, "MAX_STREAMS", 20)
    monkeypatch.setattr(node.session.service, "FIRST_MESSAGE_S", 3.0)
    async with in_process_swarm(TARGET, SPANS) as here, AsyncExitStack() as stack:
        calls = [await stack.enter_async_context(dial(here.nodes[0], wire.LINK)) for _ in range(40)]
        codes = await asyncio.gather(*map(ended, calls))
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) >= 20
        assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OK}

        async def serves() -> bool:
            return (await info(here.nodes[0])).sessions == 0

        await until(serves)
