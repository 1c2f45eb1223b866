"""Another's session without its key, and addresses that no signed record holds: neither is to be had."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count

import grpc
import pytest

from node.life.serve import Node
from node.session import service
from node.session.upstreams import UpstreamStream
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.directory.identity import Identity
from swarm.link.link import Metadata, Signer, introduce
from swarm.protocol import wire
from swarm.protocol.authority import SessionKey
from swarm.protocol.limits import MAX_HOLD_S
from swarm.protocol.messages import (
    Ack,
    Attach,
    Attached,
    Close,
    Fault,
    FaultKind,
    Hold,
    Ready,
    RepliesRequest,
    Reroute,
    RouteHop,
    Settle,
    Show,
)
from swarm.protocol.wire import encode_part
from tests.net.healthy_session import (
    attacked_link,
    single_part,
    until_sessions,
    valid_attach,
)
from tests.net.raw_client import RawLink, attach, dial, introduced, key_of, opening, raw_link, route_of, signed
from tests.net.three_nodes import SPANS, refusal

_numbers = count(1)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True)
def own_address(other_session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"10.0.0.{next(_numbers)}"  # or what one test did wrong would be refused to the next one
    monkeypatch.setattr(service, "address_key", lambda _: address)


async def refused(node: Node, first: Attach, metadata: Metadata) -> str:
    """The field for which a link is refused that begins with just this."""
    async with dial(node, wire.LINK, metadata=metadata) as call:
        link = RawLink(call)
        await link.send_bytes(single_part(first))
        fault = await refusal(link)
        assert fault.kind is FaultKind.PROTOCOL
        return fault.field


async def denied(node: Node, method: str, request: bytes, metadata: Metadata) -> str:
    """Why a call is not answered."""
    async with dial(node, method, metadata=metadata) as call:
        await call.write(request)
        assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
        return str(await call.details())


def as_client(first: Attach, node: Node, signer: Signer, clock: Callable[[], float] = time.time) -> Metadata:
    return introduce(signer, node.endpoint, wire.LINK, first.signature, clock)


# Who commands a session. The other session runs meanwhile, and its picks stay right.


async def test_a_stranger_who_knows_everything_but_the_key_is_nobodys_upstream(nodes: tuple[Node, ...]) -> None:
    """Neither as the client, nor as the hop before the tail; whatever he signs with keys of his own."""
    first, middle, tail = nodes
    stranger, identity = SessionKey.fresh(), Identity.ephemeral()
    known = attach(route_of(nodes, SPANS), opening(first), b"other")
    through_him = (known.route[0], RouteHop(identity.peer_id, Span(4, 8)), known.route[2])
    newer = replace(known, generation=1)
    at_tail = replace(newer, index=2)
    for node, made, signer, field in (
        (first, newer, stranger, "attach"),
        (first, newer, key_of(b"other"), "signature"),
        (first, replace(stranger.command(newer), session=known.session), stranger, "attach"),
        (first, replace(stranger.command(newer), session=known.session), key_of(b"other"), "session_key"),
        (first, replace(newer, generation=2**62), stranger, "attach"),
        (tail, at_tail, identity, "attach"),
        (tail, at_tail, stranger, "attach"),
        (tail, at_tail, key_of(b"other"), "attach"),
        (tail, at_tail, first.registry.identity, "attach"),
        (tail, at_tail, middle.registry.identity, "signature"),
        (tail, replace(at_tail, route=through_him), identity, "signature"),
        (tail, replace(at_tail, route=through_him, open=stranger.command(newer).open), identity, "session_key"),
        (tail, replace(at_tail, generation=2**62, route=through_him), identity, "signature"),
    ):
        assert await refused(node, made, as_client(made, node, signer)) == field
    for node in nodes:
        hop = node.sessions.find(known.session)
        assert hop is not None
        assert hop._upstreams.heard == 0


async def test_only_its_client_raises_a_generation_and_not_without_end(nodes: tuple[Node, ...]) -> None:
    """What a former hop holds is a route of its own generation: it is not newer any more."""
    mine = valid_attach(nodes)
    async with attacked_link(nodes) as link:
        for far in (1_025, 2**62):
            async with raw_link(nodes[0], replace(mine, generation=far)) as thief:
                assert (await refusal(thief)).field == "generation"
        async with raw_link(nodes[2], replace(mine, index=2)) as former:
            again = await refusal(former)
            assert (again.kind, again.field) == (FaultKind.PROTOCOL, "generation")  # the link's fault, not the tail's
        async with raw_link(nodes[0], replace(mine, generation=1_024)) as owner:
            await owner.until(Ready)
            await owner.send(Close("done"))
            while await owner.read() is not None:
                pass
        while await link.read() is not None:
            pass


async def test_a_route_that_the_client_did_not_sign_goes_nowhere(nodes: tuple[Node, ...]) -> None:
    """The hop before may pass a route on; it cannot make one, or change one."""
    mine = valid_attach(nodes)
    far = key_of(b"victim").command(replace(mine, generation=2**62))
    newer = key_of(b"victim").command(replace(mine, generation=1))
    elsewhere = (mine.route[0], RouteHop(Identity.ephemeral().peer_id, Span(4, 8)), mine.route[2])
    reroute = Reroute(1, mine.route, newer.open, signature=newer.signature)
    for bad, field in (
        (replace(reroute, signature=mine.signature), "signature"),
        (replace(reroute, generation=2), "signature"),
        (replace(reroute, route=elsewhere), "signature"),
        (replace(reroute, open=replace(newer.open, session_key=SessionKey.fresh().public_key)), "session_key"),
        (replace(reroute, generation=2**62, signature=far.signature), "generation"),
    ):
        async with attacked_link(nodes) as link:
            await link.send(bad)
            assert (await refusal(link)).field == field
        await until_sessions(nodes, 1)
    async with attacked_link(nodes) as link:
        await link.send(reroute)
        assert (await link.until(Ready)).generation == 1
        await link.send(reroute)  # again: it is no news
        assert (await link.until(Ready)).generation == 1
        await link.send(Close("done"))


async def test_only_its_client_reads_a_sessions_replies_and_holds_it(nodes: tuple[Node, ...]) -> None:
    """A second reply stream would take the first one's place, and a Hold keep KV from others."""
    tail, session, stranger = nodes[2], key_of(b"other").session, SessionKey.fresh()
    asked = wire.encode_replies_up(RepliesRequest(session))
    hold = wire.encode_hold(Hold(session, 0, MAX_HOLD_S))
    settle, show = wire.encode_settle(Settle(session)), wire.encode_show(Show(session, sent=True))
    calls = ((tail, wire.REPLIES, asked), *((nodes[0], *one) for one in ((wire.HOLD, hold), (wire.SETTLE, settle))))
    for node, method, request in (*calls, (nodes[0], wire.SHOW, show)):
        of_another = introduced(
            node, method, key_of(b"other"), wire.encode_replies_up(RepliesRequest(session, acked=5))
        )
        shown_elsewhere = introduced(nodes[1], method, key_of(b"other"), request)
        for metadata, reason in (
            ((), "does not say who it is"),
            (introduced(node, method, stranger, request), "only the session's client"),
            (introduced(node, method, Identity.ephemeral(), request), "only the session's client"),
            (introduced(node, wire.LINK, key_of(b"other"), request), "not for this call to this machine"),
            (of_another, "not for this call to this machine"),
            (shown_elsewhere, "not for this call to this machine"),
        ):
            assert reason in await denied(node, method, request, metadata)


async def test_what_was_recorded_cannot_be_played_again(nodes: tuple[Node, ...]) -> None:
    """Whole calls, byte for byte, while their session runs and after it; nor introductions of another time."""
    first, _, tail = nodes
    mine, key = valid_attach(nodes), key_of(b"victim")
    recorded = as_client(mine, first, key)
    request = wire.encode_replies_up(RepliesRequest(mine.session))
    of_replies = introduced(tail, wire.REPLIES, key, request)
    async with dial(first, wire.LINK, metadata=recorded) as call, dial(tail, wire.REPLIES, metadata=of_replies) as read:
        link = RawLink(call)
        await link.send_bytes(single_part(mine))
        await link.until(Ready)
        await read.write(request)
        assert await read.read()
        assert await refused(first, mine, recorded) == "introduction"
        assert "used before" in await denied(tail, wire.REPLIES, request, of_replies)
        assert not read.done(), "the client's stream is not taken from it"
        await link.send(Close("done"))
        while await link.read() is not None:
            pass
    await until_sessions(nodes, 1)
    assert await refused(first, mine, recorded) == "introduction"
    for seconds in (-61, 61):
        late = as_client(mine, first, key, lambda away=seconds: time.time() + away)  # type: ignore[misc]
        assert await refused(first, mine, late) == "introduction"


@pytest.mark.parametrize("index", [0, 1])
async def test_only_the_tail_hands_replies_out(index: int, nodes: tuple[Node, ...]) -> None:
    request = wire.encode_replies_up(RepliesRequest(valid_attach(nodes).session))
    metadata = introduced(nodes[index], wire.REPLIES, key_of(b"victim"), request)
    async with attacked_link(nodes) as link, dial(nodes[index], wire.REPLIES, metadata=metadata) as call:
        await call.write(request)
        assert await call.code() is grpc.StatusCode.NOT_FOUND
        await link.send(Close("done"))


async def test_a_session_that_ends_does_not_take_a_newer_upstream_with_it(nodes: tuple[Node, ...]) -> None:
    """Its client tries again at once, and a closing hop counts as none."""
    mine = valid_attach(nodes)
    async with attacked_link(nodes) as link:
        hop = nodes[0].sessions.find(mine.session)
        assert hop is not None
        hop.close("of itself")  # it is still listed: what it holds is freed a little later
        newer, upstream = signed(replace(mine, generation=1)), UpstreamStream()
        other = nodes[0].sessions.attach(newer, mine.session, upstream, "ip4:127.0.0.1")
        assert other is not hop
        assert nodes[0].sessions.find(mine.session) is other
        while await link.read() is not None:
            pass
        assert not other.is_closed
        other.close("done")
    await until_sessions(nodes, 1)


async def test_only_a_newer_generation_takes_a_running_session(nodes: tuple[Node, ...]) -> None:
    mine = valid_attach(nodes)
    others = ((mine, FaultKind.PROTOCOL), (replace(mine, generation=1, index=1), FaultKind.PROTOCOL))
    async with attacked_link(nodes) as link:
        for other, kind in others:
            async with raw_link(nodes[0], other) as thief:
                assert (await refusal(thief)).kind is kind
        async with raw_link(nodes[0], replace(mine, generation=1)) as owner:
            assert await owner.until(Attached) == Attached(1, None, reads_packed=True)
            await owner.until(Ready)
            await owner.send(Close("done"))
            while await owner.read() is not None:
                pass
        while (last := await link.read()) is not None:
            assert isinstance(last, Ack), "the older stream ends; what was received before may be acknowledged on it"


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
                assert (fault.kind, fault.peer) == (FaultKind.UNREACHABLE, nodes[0].peer_id), "that is no name"
                assert fault.reason == "cannot be reached"
                await link.send(Close("done"))
                while await link.read() is not None:
                    pass
            await until_sessions(nodes, 1)
        head = with_unknown_field(mine, address)
        async with raw_link(nodes[0], opens=mine) as link:
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
