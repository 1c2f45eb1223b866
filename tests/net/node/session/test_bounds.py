"""What one address may cost a live node: streams, sessions, heads, garbage; an honest session goes on beside it all."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count

import grpc.aio
import pytest

import node.session.service
import node.session.table
from node.life.serve import Node
from node.session.admission import REROUTED, SESSIONS, WAITING, Admission
from node.session.hop_session import HopSession
from node.session.table import UNUSED_S, SessionTable
from swarm.base.ids import SessionId, TreeNodeId
from swarm.base.quota import HoldingLimit
from swarm.link.dial import open_channel
from swarm.link.link import Stream
from swarm.protocol import wire
from swarm.protocol.messages import (
    Attach,
    Attached,
    Close,
    Fault,
    FaultKind,
    Ready,
    Reroute,
    Sampling,
    Snapshot,
    SweepFrame,
)
from swarm.protocol.v1 import node_pb2 as pb
from swarm.protocol.wire import encode_part
from tests.net.healthy_session import attacked_link, until_sessions, valid_attach
from tests.net.raw_client import (
    RawLink,
    SweepNumbering,
    Unary,
    attach,
    dial,
    info,
    key_of,
    opening,
    raw_link,
    route_of,
)
from tests.net.three_nodes import SPANS, refusal, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("other_session")]

_numbers = count(1)


@pytest.fixture
def stranger(other_session: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """A public address that nobody had before; all calls come from there now, those of hops too."""
    address = f"9.9.9.{next(_numbers)}"
    monkeypatch.setattr(node.session.service, "address_key", lambda _: address)
    return address


def session_of(chain: tuple[Node, ...], name: str, **limits: int) -> Attach:
    return attach(route_of(chain, SPANS), opening(chain[0], **limits), name.encode())


async def test_silent_streams_of_one_address_leave_room_for_others_and_end_soon(
    nodes: tuple[Node, ...], stranger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_message_s = 60.0
    monkeypatch.setattr(node.session.service, "FIRST_MESSAGE_S", first_message_s)
    quota = nodes[0].sessions.admission.quota
    async with open_channel(nodes[0].endpoint, []) as channel:
        calls: list[Stream] = [channel.stream_stream(wire.LINK)() for _ in range(64)]

        async def all_wait() -> bool:
            await asyncio.sleep(0)
            return quota.held(WAITING, stranger) == 64

        await until(all_wait)
        for method in (wire.LINK, wire.REPLIES):
            async with dial(nodes[0], method) as call:
                assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert await call.details() == f"too many {WAITING} at once"
        assert (await info(nodes[0])).sessions == 1, "calls are not streams"
        with monkeypatch.context() as patch:
            patch.setattr(node.session.service, "address_key", lambda _: "8.8.8.8")
            async with raw_link(nodes[0], valid_attach(nodes)) as link:
                await link.until(Ready)
                assert quota.held(WAITING, "8.8.8.8") == 0, "it has a session"
                await link.send(Close("done"))
        for call in calls:
            call.cancel()

        async def none_waits() -> bool:
            await asyncio.sleep(0)
            return quota.held(WAITING, stranger) == 0

        await until(none_waits)


async def test_a_table_that_one_address_fills_has_room_for_another(
    nodes: tuple[Node, ...], stranger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = nodes[0].sessions
    monkeypatch.setattr(node.session.table, "MAX_SESSIONS", 6)
    monkeypatch.setitem(sessions.admission.quota._holdings, SESSIONS, HoldingLimit(per_key=16, total=6))
    async with AsyncExitStack() as stack:
        for number in range(5):
            link = await stack.enter_async_context(raw_link(nodes[0], session_of(nodes, f"full{number}")))
            await link.until(Ready)
        assert len(sessions) == 6, "the healthy session is one of them"
        monkeypatch.setattr(node.session.service, "address_key", lambda _: "8.8.4.4")
        async with raw_link(nodes[0], session_of(nodes, "newcomer")) as link:
            await link.until(Ready)
            assert (len(sessions), sessions.admission.quota.held(SESSIONS, stranger)) == (6, 4)
            await link.send(Close("done"))


async def test_one_address_has_a_few_sessions_and_its_idle_ones_give_way(
    nodes: tuple[Node, ...], stranger: str, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = nodes[0].sessions
    async with AsyncExitStack() as stack:
        links: list[RawLink] = []
        for number in range(16):
            links.append(await stack.enter_async_context(raw_link(nodes[0], session_of(nodes, f"s{number}"))))
            await links[-1].until(Ready)
            opened = sessions.find(session_of(nodes, f"s{number}").session)
            assert opened is not None
            opened.used_at += 600.0  # as if it had just begun, however slow this machine is
        for _ in range(3):
            async with raw_link(nodes[0], session_of(nodes, "one more")) as link:
                fault = await refusal(link)
                assert (fault.kind, fault.peer) == (FaultKind.BUSY, nodes[0].peer_id)
                assert fault.reason == "has 16 sessions of this address already; try again in 3 s, or in 30 s"
        assert len([line for line in caplog.messages if stranger in line]) == 1, "a line a minute"
        idle = sessions.find(session_of(nodes, "s5").session)
        assert idle is not None
        idle.used_at -= 600.0 + UNUSED_S
        async with raw_link(nodes[0], session_of(nodes, "one more")) as link:
            await link.until(Ready)
            fault = await links[5].until(Fault)
            assert (fault.kind, fault.peer) == (FaultKind.BUSY, nodes[0].peer_id)
            assert sessions.admission.quota.held(SESSIONS, stranger) == 16
            assert sessions.find(session_of(nodes, "s5").session) is None
            await link.send(Close("done"))
        for link in links:
            if link is not links[5]:
                await link.send(Close("done"))
        await until_sessions(nodes, 1)
        assert sessions.admission.quota.held(SESSIONS, stranger) == 0


async def test_an_empty_node_is_used_whole_until_another_address_asks(
    nodes: tuple[Node, ...], stranger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = nodes[0].sessions
    free = table.kv_tokens_free
    window = 300
    own = session_of(nodes, "greedy", window=window, nodes=8)
    monkeypatch.setattr(table, "kv_tokens", table.kv_tokens - free + 3 * (window + 8))
    async with AsyncExitStack() as stack:
        links: list[RawLink] = []
        for number in range(3):
            asked = session_of(nodes, f"greedy {number}", window=window, nodes=8)
            links.append(await stack.enter_async_context(raw_link(nodes[0], asked)))
            await links[-1].until(Ready)
        assert table.kv_tokens_free == 0
        async with raw_link(nodes[0], own) as link:
            assert (await refusal(link)).kind is FaultKind.BUSY
        monkeypatch.setattr(node.session.service, "address_key", lambda _: "8.8.8.8")
        async with raw_link(nodes[0], own) as link:
            await link.until(Ready)
            assert (await links[0].until(Fault)).kind is FaultKind.BUSY
            await link.send(Close("done"))
        for link in links[1:]:
            await link.send(Close("done"))
        await until_sessions(nodes, 1)


async def test_three_refused_frames_end_the_stream_and_its_session_and_garbage_refuses_the_address(
    nodes: tuple[Node, ...], stranger: str
) -> None:
    bad = SweepFrame(replace(SweepNumbering().chain((1,)), sequence=7))
    for number in range(4):
        async with raw_link(nodes[0], session_of(nodes, f"bad {number}")) as link:
            await link.until(Ready)
            await link.send(bad, bad, bad)
            faults = [await link.until(Fault) for _ in range(4)]
            assert [fault.kind for fault in faults] == [FaultKind.PROTOCOL] * 3 + [FaultKind.CLOSED]
            assert await link.status() is grpc.StatusCode.OK
            assert nodes[0].sessions.find(session_of(nodes, f"bad {number}").session) is None
    async with raw_link(nodes[0], session_of(nodes, "later")) as link:
        assert await link.status() is grpc.StatusCode.RESOURCE_EXHAUSTED
    admission: Admission = nodes[0].sessions.admission
    assert admission.quota.refused_s(stranger) > 0
    account = admission.quota._account(stranger)  # a stream that is ending may still hold something
    assert account is not None
    account.refused_until = 0.0  # or this test could not wait for its sessions' end
    await until_sessions(nodes, 1)


def heavy(window: int, live: int) -> Snapshot:
    """A snapshot with the largest head that a session may send, and nonsense in it: its tokens are not rising ids."""
    many = window + live
    ids = (TreeNodeId(2**62),) * many
    return Snapshot(window, 1, 0, TreeNodeId(0), Sampling(), ids, (1,) * many, (2**62,) * many, ids, ())


async def test_large_heads_are_decoded_beside_the_event_loop_and_larger_ones_not_at_all(
    nodes: tuple[Node, ...], stranger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[tuple[int, bool]] = []
    decode = wire._snapshot
    loop_thread = threading.get_ident()

    def watched(snapshot: pb.Snapshot) -> Snapshot:
        decoded.append((len(snapshot.ids), threading.get_ident() == loop_thread))
        return decode(snapshot)

    monkeypatch.setattr(wire, "_snapshot", watched)
    opened = session_of(nodes, "heavy", window=2_000, nodes=2_000)
    async with raw_link(nodes[0], opened) as link:
        await link.until(Ready)
        await link.send(heavy(2_000, 2_000))
        await link.send(SweepFrame(replace(SweepNumbering().chain((1,)), sequence=7)))
        refused = [(await link.until(Fault)).field for _ in range(2)]
        assert refused == ["snapshot", "sequence"], "in the order in which they came"
        assert decoded == [(4_000, False)]
        await link.send(heavy(2_000, 2_001))
        assert (await refusal(link)).field == "ids"
        assert len(decoded) == 1
    async with raw_link(nodes[0], replace(opened, generation=1)) as link:
        await link.send_bytes(encode_part(2 << 20, 0, (b"x", b"")))
        assert (await refusal(link)).field == "part"
    async with raw_link(nodes[0]) as link:
        await link.send_bytes(encode_part((64 << 10) + 1, 0, (b"x", b"")))
        assert (await refusal(link)).field == "part", "before its attach"
    assert len(decoded) == 1
    assert nodes[0].sessions.admission.quota.refused_s(stranger) == 0, "three wrongs are borne"


async def test_what_goes_wrong_here_is_nobody_elses_business(
    nodes: tuple[Node, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("a secret path")

    with monkeypatch.context() as patch:
        patch.setattr(SessionTable, "attach", fail)
        patch.setattr(SessionTable, "info", fail)
        patch.setattr(SessionTable, "find_tail", fail)
        async with raw_link(nodes[0], valid_attach(nodes)) as link:
            fault = await refusal(link)
            assert (fault.kind, fault.reason) == (FaultKind.INTERNAL, "internal error (ValueError)")
        async with open_channel(nodes[0].endpoint, []) as channel:
            call: Unary = channel.unary_unary(wire.INFO)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"")
            assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    assert caplog.text.count("a secret path") >= 2, "the log has it"


async def test_a_session_that_is_closing_is_absent(nodes: tuple[Node, ...]) -> None:
    """Else a newer attach was taken, and dropped a moment later with the old session."""
    mine = valid_attach(nodes)
    async with attacked_link(nodes) as old:
        hop = nodes[0].sessions.find(mine.session)
        assert hop is not None
        hop.dismiss("closing")
        assert nodes[0].sessions.find(mine.session) is None
        async with raw_link(nodes[0], replace(mine, generation=3)) as new:
            assert await new.until(Attached) == Attached(3, None, reads_packed=True)
            await new.until(Ready)
            assert nodes[0].sessions.find(mine.session) not in {None, hop}
            await new.send(Close("done"))
        del old
    await until_sessions(nodes, 1)


async def test_a_session_changes_its_route_no_faster_than_chains_break(nodes: tuple[Node, ...], stranger: str) -> None:
    """Each new route is checked and passed on, and each that leads nowhere is answered with a signature."""
    first, quota = session_of(nodes, "restless"), nodes[0].sessions.admission.quota

    async def go_on(link: RawLink, generation: int) -> Ready | Fault:
        new = key_of(b"restless").command(replace(first, generation=generation))
        await link.send(Reroute(generation, new.route, new.open, signature=new.signature))
        while not isinstance(answer := await link.read(), Ready | Fault):
            assert answer is not None
        return answer

    async with raw_link(nodes[0], first) as link:
        await link.until(Ready)
        for generation in count(1):
            if generation > 8:
                while quota.spend(REROUTED, stranger):
                    pass
            answer = await go_on(link, generation)
            if isinstance(answer, Fault):
                assert "too many new routes" in answer.reason
                break
            assert answer.generation == generation < 64, "a slow machine gives some time to get one more"
    assert generation > 8, "some repairs in a row are borne"
    await until_sessions(nodes, 1)


async def test_reply_streams_wait_for_their_own_session_only(
    nodes: tuple[Node, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = nodes[0].sessions
    looked: list[SessionId] = []
    find = SessionTable.find

    def counted(sessions: SessionTable, session: SessionId) -> HopSession | None:
        looked.append(session)
        return find(sessions, session)

    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(table.find_tail(SessionId(b"%016d" % number), 0.2)) for number in range(50)]
        await asyncio.sleep(0)
        monkeypatch.setattr(SessionTable, "find", counted)
        assert len(table._awaited) == 50
        async with attacked_link(nodes) as link:
            assert set(looked) == {valid_attach(nodes).session}
            await link.send(Close("done"))
    assert {task.result() for task in waiting} == {None}
    assert table._awaited == {}
