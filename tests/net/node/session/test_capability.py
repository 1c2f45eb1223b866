"""Another's session without its id, and addresses that no signed record holds: neither is to be had."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
import pytest_asyncio

from node.serve import Node
from swarm import wire
from swarm.ids import PeerId, SessionId
from swarm.layers import Span
from swarm.protocol.messages import (
    Attach,
    Attached,
    Close,
    Fault,
    FaultKind,
    Ready,
    RepliesRequest,
    RouteHop,
    SweepFrame,
)
from swarm.wire import encode_part
from tests.net.healthy_session import WORDS, attacked_link, healthy_session, until_sessions, valid_attach, warm_nodes
from tests.net.raw_client import SweepNumbering, attach, dial, opening, raw_link, raw_replies, route_of
from tests.net.three_nodes import SPANS, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes() -> AsyncIterator[tuple[Node, ...]]:
    async with warm_nodes() as three:
        yield three


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def other_session(nodes: tuple[Node, ...], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    async with healthy_session(nodes, monkeypatch):
        yield


def forged(session: SessionId, bit: int) -> SessionId:
    flipped = bytearray(session)
    flipped[bit // 8] ^= 1 << bit % 8
    return SessionId(bytes(flipped))


# Capabilities


@pytest.mark.parametrize("bit", [0, 63, 127])
async def test_an_id_with_one_wrong_bit_opens_no_replies(bit: int, nodes: tuple[Node, ...]) -> None:
    async with attacked_link(nodes) as link, dial(nodes[2], wire.REPLIES) as call:
        await call.write(wire.encode_replies_up(RepliesRequest(forged(valid_attach(nodes).session, bit))))
        assert await call.code() is grpc.StatusCode.NOT_FOUND
        await link.send(Close("done"))


@pytest.mark.parametrize("index", [0, 1])
async def test_only_the_tail_hands_replies_out(index: int, nodes: tuple[Node, ...]) -> None:
    async with attacked_link(nodes) as link, dial(nodes[index], wire.REPLIES) as call:
        await call.write(wire.encode_replies_up(RepliesRequest(valid_attach(nodes).session)))
        assert await call.code() is grpc.StatusCode.NOT_FOUND
        await link.send(Close("done"))


async def test_an_id_with_one_wrong_bit_is_another_session(nodes: tuple[Node, ...]) -> None:
    """A newer generation takes a session over only with its very id: what the guess says does not reach it."""
    mine = valid_attach(nodes)
    async with attacked_link(nodes) as link, raw_replies(nodes[2], mine.session) as replies:
        async with raw_link(nodes[0], replace(mine, session=forged(mine.session, 5), generation=9)) as guess:
            await guess.until(Ready)
            await guess.send(SweepFrame(SweepNumbering().chain((9, 9, 9))), Close("yours too?"))
            while await guess.read() is not None:
                pass
        await until_sessions(nodes, 2)
        await link.send(SweepFrame(SweepNumbering().chain(WORDS)))
        assert (await replies.read()).generation == 0
        await link.send(Close("done"))


async def test_only_a_newer_generation_takes_a_running_session(nodes: tuple[Node, ...]) -> None:
    mine = valid_attach(nodes)
    others = ((mine, FaultKind.CLOSED), (replace(mine, generation=1, index=1), FaultKind.PROTOCOL))
    async with attacked_link(nodes) as link:
        for other, kind in others:
            async with raw_link(nodes[0], other) as thief:
                assert (await refusal(thief)).kind is kind
        async with raw_link(nodes[0], replace(mine, generation=1)) as owner:
            assert await owner.until(Attached) == Attached(1, None)
            await owner.until(Ready)
            await owner.send(Close("done"))
            while await owner.read() is not None:
                pass
        assert await link.read() is None


# Routes


@pytest.mark.parametrize(
    "spans",
    [
        ((0, 4), (3, 8), (8, 12)),
        ((0, 4), (5, 8), (8, 12)),
        ((0, 4), (8, 12), (4, 8)),
        ((0, 4), (4, 8), (8, 11)),
        ((0, 4), (4, 8), (8, 13)),
        ((1, 4), (4, 8), (8, 12)),
        ((0, 4), (0, 4), (4, 12)),
    ],
    ids=["overlap", "gap", "disorder", "short", "long", "late", "twice"],
)
async def test_a_route_covers_the_layers_one_after_another(
    spans: tuple[tuple[int, int], ...], nodes: tuple[Node, ...]
) -> None:
    hops = tuple(RouteHop(node.peer_id, Span(*ends)) for node, ends in zip(nodes, spans, strict=True))
    async with raw_link(nodes[0], replace(valid_attach(nodes), route=hops)) as link:
        fault = await refusal(link)
        assert (fault.kind, fault.field, fault.peer) == (FaultKind.PROTOCOL, "route", nodes[0].peer_id)


@pytest.mark.parametrize("ends", [(8, 4), (4, 4)], ids=["reversed", "empty"])
async def test_a_span_that_is_none_cannot_be_said(ends: tuple[int, int], nodes: tuple[Node, ...]) -> None:
    """No client of ours can build one, so its bytes are forged: the middle hop's 4-8 becomes something else."""
    honest = wire.encode_frame(valid_attach(nodes))
    middle = b"\x08\x04\x10\x08"  # field 1, start: 4; field 2, end: 8
    assert honest.count(middle) == 1
    head = honest.replace(middle, bytes([0x08, ends[0], 0x10, ends[1]]))
    async with raw_link(nodes[0]) as link:
        await link.send_bytes(encode_part(len(head), 0, (head, b"")))
        fault = await refusal(link)
        assert fault.kind is FaultKind.PROTOCOL
        assert "span" in fault.field or "route" in fault.field


async def test_a_node_stands_in_a_route_once(nodes: tuple[Node, ...]) -> None:
    """Its second part would be the same session again."""
    first = nodes[0].peer_id
    hops = (RouteHop(first, Span(0, 2)), RouteHop(first, Span(2, 4)), *valid_attach(nodes).route[1:])
    async with raw_link(nodes[0], replace(valid_attach(nodes), route=hops)) as link:
        fault = await refusal(link)
        assert (fault.kind, fault.field, fault.peer) == (FaultKind.PROTOCOL, "route", first)


# Addresses


@asynccontextmanager
async def trap() -> AsyncIterator[tuple[str, asyncio.Queue[object]]]:
    """A listening address, and who has called there."""
    callers: asyncio.Queue[object] = asyncio.Queue()

    async def called(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.put_nowait(writer.get_extra_info("peername"))
        writer.close()

    async with await asyncio.start_server(called, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}", callers


def with_unknown_field(message: Attach, text: str) -> bytes:
    """The attach with a field that this version does not know, at its end and in its last hop."""
    extra = b"\xfa\x01" + bytes([len(text)]) + text.encode()  # field 31, a string
    return wire.encode_frame(message) + extra


async def test_only_addresses_of_signed_records_are_dialled(nodes: tuple[Node, ...]) -> None:
    async with trap() as (address, callers):
        host, port = address.split(":")
        names = (address, f"ipv4:{address}", f"http://{address}/", f"/ip4/{host}/tcp/{port}/p2p/{nodes[1].peer_id}")
        mine = valid_attach(nodes)
        for name in names:
            hops = (mine.route[0], RouteHop(PeerId(name), Span(4, 8)), mine.route[2])
            async with raw_link(nodes[0], replace(mine, route=hops)) as link:
                fault = await link.until(Fault)
                assert (fault.kind, fault.peer) == (FaultKind.UNREACHABLE, name)
                assert fault.reason == "cannot be reached"
                await link.send(Close("done"))
                while await link.read() is not None:
                    pass
            await until_sessions(nodes, 1)
        head = with_unknown_field(mine, address)
        async with raw_link(nodes[0]) as link:
            await link.send_bytes(encode_part(len(head), 0, (head, b"")))
            assert isinstance(await link.read(), Attached | Fault)
            await link.send(Close("done"))
            while await link.read() is not None:
                pass
        assert callers.empty()
        async with asyncio.timeout(5):
            _, writer = await asyncio.open_connection(host, int(port))
            assert await callers.get() == writer.get_extra_info("sockname"), "the trap works"
            writer.close()


async def test_another_models_record_is_no_record_for_this_chain(nodes: tuple[Node, ...]) -> None:
    """A chain never mixes fingerprints: the hop that lies about its model refuses, and nobody looks its address up."""
    lying = replace(valid_attach(nodes), open=replace(opening(nodes[0]), fingerprint="ab" * 16))
    async with raw_link(nodes[0], lying) as link:
        fault = await link.until(Fault)
        assert (fault.kind, fault.peer) == (FaultKind.MODEL_MISMATCH, nodes[0].peer_id)
        assert "abababababab" in fault.reason
        assert nodes[0].identity.fingerprint[:12] in fault.reason
    assert attach(route_of(nodes, SPANS), opening(nodes[0]), b"victim") == valid_attach(nodes)
