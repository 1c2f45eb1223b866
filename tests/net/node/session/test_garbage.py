"""A node under garbage: every kind gets a typed answer, and the node's other session never notices."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import grpc.aio
import pytest

from node.life.serve import Node
from node.life.successors import Successors, Tried
from swarm.base.ids import SessionId, TreeNodeId
from swarm.directory.address_proof import HELLO_METHOD
from swarm.link.dial import Connection, open_channel
from swarm.protocol import wire
from swarm.protocol.messages import (
    Close,
    Fault,
    FaultKind,
    Frame,
    Ping,
    Pong,
    Ready,
    Reply,
    Reroute,
    RouteHop,
    Sampling,
    Sweep,
    SweepFrame,
)
from swarm.protocol.wire import PART_BYTES, encode_part
from tests.net.healthy_session import (
    FIRST_SWEEP,
    NEXT_SWEEP,
    VOCAB,
    WORDS,
    attacked_link,
    right_picks,
    single_part,
    until_sessions,
    valid_attach,
)
from tests.net.raw_client import SweepNumbering, Unary, attach, dial, opening, raw_link, raw_replies, route_of
from tests.net.three_nodes import SPANS, refusal, thread_held

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("other_session")]


async def test_who_leaves_before_a_first_message_is_not_refused(
    nodes: tuple[Node, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async with raw_link(nodes[0]) as link:
        await link.call.done_writing()
        assert await link.read() is None
        assert await link.status() == grpc.StatusCode.OK
    assert "refused" not in caplog.text


# Bytes


@pytest.mark.parametrize("size", [0, 1, 7, 100, 70_000])
@pytest.mark.parametrize("attached", [False, True], ids=["first", "later"])
async def test_random_bytes_end_their_stream(size: int, attached: bool, nodes: tuple[Node, ...]) -> None:
    noise = random.Random(size).randbytes(size)
    async with raw_link(nodes[0], *([valid_attach(nodes)] if attached else [])) as link:
        if attached:
            await link.until(Ready)
        await link.send_bytes(noise)
        fault = await refusal(link)
        assert (fault.kind, fault.peer) == (FaultKind.PROTOCOL, nodes[0].peer_id)
        assert fault.field in {"bytes", "part"}


async def test_flipped_bits_never_stop_a_node(nodes: tuple[Node, ...], caplog: pytest.LogCaptureFixture) -> None:
    """Sweeps and attaches with one byte changed: refused, or harmless; the stream never breaks by an accident."""
    rng = random.Random(2)
    codes = []
    for number in range(60):
        attaching = attach(route_of(nodes, SPANS), opening(nodes[0]), b"flip %d" % number)
        parts = [bytearray(single_part(message)) for message in (attaching, SweepFrame(SweepNumbering().chain(WORDS)))]
        part = rng.choice(parts)
        part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
        async with raw_link(nodes[0], opens=attaching) as link:
            with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # a write may meet the stream's end
                for sent in (*parts, single_part(Close("done"))):
                    await link.send_bytes(bytes(sent))
                while await link.read() is not None:
                    pass
            codes.append(await link.status())
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.INTERNAL}, "an accident in a node would say UNKNOWN"
    assert not [record for record in caplog.records if record.exc_info], "or log where it happened"
    assert codes.count(grpc.StatusCode.OK) > 30


@pytest.mark.parametrize(
    "part",
    [
        single_part(Ping(1))[:-1],
        encode_part(5, 0, (b"", b"")),
        encode_part(0, 0, (b"no", b"frame")),
        encode_part(3, 0, (b"12345678", b"")),
        encode_part(5 << 20, 0, (b"x", b"")),
        encode_part(5, 1 << 40, (b"x", b"")),
        encode_part(2 << 20, 0, (b"x" * (PART_BYTES + 64), b"")),
    ],
    ids=["truncated", "empty", "continuation", "surplus", "large head", "large rows", "large part"],
)
async def test_bad_parts_end_their_stream(part: bytes, nodes: tuple[Node, ...]) -> None:
    async with raw_link(nodes[0]) as link:
        await link.send_bytes(part)
        fault = await refusal(link)
        assert (fault.kind, fault.field) == (
            FaultKind.PROTOCOL,
            "bytes" if part == single_part(Ping(1))[:-1] else "part",
        )


async def test_half_a_frame_and_silence(nodes: tuple[Node, ...]) -> None:
    async with attacked_link(nodes) as link:
        await link.send_bytes(encode_part(400, 0, (b"x" * 100, b"")))
        await link.call.done_writing()
        assert await link.read() is None
        assert await link.status() is grpc.StatusCode.OK


async def test_messages_beyond_grpcs_limit(nodes: tuple[Node, ...]) -> None:
    async with dial(nodes[0], wire.LINK, [("grpc.max_send_message_length", -1)]) as call:
        await call.write(b"\x00" * (5 << 20))
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (b"", grpc.StatusCode.INVALID_ARGUMENT),
        (wire.encode_replies_up(Pong(1)), grpc.StatusCode.NOT_FOUND),
    ],
    ids=["bytes", "nothing", "pong"],
)
async def test_garbage_on_a_reply_stream(request_: bytes, code: grpc.StatusCode, nodes: tuple[Node, ...]) -> None:
    async with dial(nodes[2], wire.REPLIES) as call:
        await call.write(request_)
        assert await call.code() is code


async def test_a_bad_nonce_and_an_unknown_method(nodes: tuple[Node, ...]) -> None:
    async with open_channel(nodes[0].endpoint, []) as channel:
        for method, code in ((HELLO_METHOD, "INVALID_ARGUMENT"), (f"/{wire.SERVICE}/Explode", "UNIMPLEMENTED")):
            call: Unary = channel.unary_unary(method)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"short")
            assert caught.value.code().name == code


# Messages out of place


@pytest.mark.parametrize(
    "message", [SweepFrame(SweepNumbering().chain(WORDS)), Ping(1), Close("hello")], ids=["sweep", "ping", "close"]
)
async def test_a_stream_begins_with_attach(message: Frame, nodes: tuple[Node, ...]) -> None:
    async with raw_link(nodes[0], message) as link:
        assert (await refusal(link)).field == "attach"


async def test_a_stream_carries_one_session(nodes: tuple[Node, ...]) -> None:
    async with attacked_link(nodes) as link:
        await link.send(replace(valid_attach(nodes), session=SessionId(b"second session 1")))
        assert (await refusal(link)).field == "attach"


async def test_what_a_node_does_not_understand(nodes: tuple[Node, ...]) -> None:
    elsewhere = route_of((nodes[1], nodes[0], nodes[2]), SPANS)
    unsigned = replace(opening(nodes[0]), session_key=bytes(32))
    for message, field in ((Reply(1, 0, ()), "kind"), (Reroute(1, elsewhere, unsigned, signature=bytes(64)), "route")):
        async with attacked_link(nodes) as link:
            await link.send(message)
            assert (await refusal(link)).field == field
        await until_sessions(nodes, 1)


@pytest.mark.parametrize(
    ("field", "limits"),
    [("window_tokens", (0, 0, 0)), ("window_tokens", (0, 4, 10)), ("sweeps", (10, 0, 10)), ("nodes", (10, 4, 0))],
    ids=str,
)
async def test_sessions_of_no_size_are_refused(
    field: str, limits: tuple[int, int, int], nodes: tuple[Node, ...]
) -> None:
    window, sweeps, live = limits
    asked = attach(route_of(nodes, SPANS), opening(nodes[0], window=window, sweeps=sweeps, nodes=live), b"none")
    async with raw_link(nodes[0], asked) as link:
        assert (await refusal(link)).field == field


async def test_a_sweep_before_ready_is_refused(nodes: tuple[Node, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()
    dial = Successors.dial

    async def gated(
        successors: Successors, hop: RouteHop, records: Iterable[bytes], tried: Tried, stuck: grpc.aio.Channel | None
    ) -> Connection:
        await gate.wait()
        return await dial(successors, hop, records, tried, stuck)

    monkeypatch.setattr(Successors, "dial", gated)
    sweep = SweepFrame(SweepNumbering().chain(WORDS))
    async with raw_link(nodes[0], valid_attach(nodes), sweep) as link:
        assert (await link.until(Fault)).field == "sequence"
        gate.set()
        await link.until(Ready)
        async with raw_replies(nodes[2], valid_attach(nodes).session) as replies:
            await link.send(sweep)
            assert (await replies.read()).sequence == 1
        await link.send(Close("done"))


# Sweeps that break a rule: refused, and the session goes on


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("parents", replace(NEXT_SWEEP, parents=(TreeNodeId(2**62), None))),
        ("tokens", replace(NEXT_SWEEP, tokens=(1, VOCAB))),
        ("commit_to", replace(NEXT_SWEEP, truncate_to=0)),
    ],
)
async def test_bad_sweeps_are_refused_by_field(field: str, bad: Sweep, nodes: tuple[Node, ...]) -> None:
    """Every rule has its own case in `tests/unit/swarm/protocol/test_session.py`."""
    async with attacked_link(nodes) as link, raw_replies(nodes[2], valid_attach(nodes).session) as replies:
        await link.send(SweepFrame(FIRST_SWEEP))
        assert (await replies.read()).sequence == 1
        await link.send(SweepFrame(bad))
        fault = await link.until(Fault)
        assert (fault.kind, fault.field) == (FaultKind.PROTOCOL, field)
        await link.send(SweepFrame(NEXT_SWEEP))
        reply = await replies.read()
        assert [node for node, _ in reply.picks] == [6, 7]
        await link.send(Close("done"))


async def test_a_replayed_sweep_with_other_content_changes_nothing(nodes: tuple[Node, ...]) -> None:
    async with attacked_link(nodes) as link, raw_replies(nodes[2], valid_attach(nodes).session) as replies:
        await link.send(SweepFrame(FIRST_SWEEP), SweepFrame(replace(FIRST_SWEEP, tokens=(9,) * 6)))
        await link.send(SweepFrame(replace(NEXT_SWEEP, acked=0)))
        assert (await link.receipt(4)).sequence == 2
        assert [token for _, token in (await replies.read()).picks] == list(right_picks())
        assert (await replies.read()).sequence == 2
        await link.send(Close("done"))


async def test_replies_that_nobody_can_hold_make_no_room(nodes: tuple[Node, ...]) -> None:
    """Or a client could queue sweeps without end at a hop that computes slowly (F1)."""
    async with attacked_link(nodes) as link:
        async with thread_held(nodes[0]):
            said = SweepNumbering()
            for number in range(1, 10):  # one is at work, twice the credits wait
                await link.send(SweepFrame(said.chain((number,), acked=max(0, number - 4))))
            await link.receipt(10)
            await link.send(SweepFrame(said.chain((10,), acked=9)))
            fault = await link.until(Fault)
            assert (fault.kind, fault.field) == (FaultKind.PROTOCOL, "sequence")
        await link.send(Close("done"))


@pytest.mark.parametrize(
    ("sampling", "field"),
    [(Sampling(temperature=1.0, top_p=0.0), "top_p"), (Sampling(temperature=1e-300), "temperature")],
)
async def test_meaningless_sampling_is_refused(sampling: Sampling, field: str, nodes: tuple[Node, ...]) -> None:
    async with attacked_link(nodes) as link:
        await link.send(SweepFrame(SweepNumbering(sampling).chain(WORDS)))
        fault = await link.until(Fault)
        assert (fault.kind, fault.field) == (FaultKind.PROTOCOL, field)
