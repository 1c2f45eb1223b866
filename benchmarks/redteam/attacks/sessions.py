"""Sessions: filling a node with them, keeping what they hold, and taking part in somebody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import grpc
import grpc.aio

from benchmarks.redteam.attack import Fight, Kind, attack
from benchmarks.redteam.attacks.frames import ENDED
from benchmarks.redteam.byzantine import Insider, insider
from benchmarks.redteam.ground import NodeMark
from benchmarks.redteam.kit import ANSWER_S, RawLink
from swarm.base.ids import PeerId, TreeNodeId
from swarm.compute.row_codec import encode_rows
from swarm.protocol import wire
from swarm.protocol.authority import SessionKey
from swarm.protocol.frames import FrameAssembler
from swarm.protocol.messages import (
    Attach,
    Attached,
    Close,
    Codec,
    Fault,
    Hold,
    Ping,
    Ready,
    RepliesRequest,
    Reply,
    RouteHop,
    SweepFrame,
)

FILL = 1_100
"""More sessions than a node takes."""
JUMP = 1 << 62


async def fill(fight: Fight, count: int, sources: int, window: int, per_s: float) -> None:
    """Open so many sessions on the last node, where no chain has to stand for that, and keep them alive."""
    node = fight.ground.nodes[-1]
    connections = [await fight.kit.connection(node, fight.kit.strangers[number]) for number in range(sources)]
    want = fight.kit.opening(window=window, sweeps=1, nodes=2)
    async for number in fight.pace(per_s, count):
        link = fight.kit.link_over(connections[number % sources])
        with suppress(*ENDED):
            await link.send(fight.kit.attach(fight.kit.own_route, 1, open=want))
            fight.kit.keep_pinging(link, 3.5)
            fight.tally.acts += 1


@attack("session-fill", Kind.SESSIONS, burns=True)
async def session_fill(fight: Fight) -> None:
    """1,100 sessions of two tokens on one node, from one address."""
    await fight.go()
    await fill(fight, FILL, 1, 2, 400.0)
    await fight.stay()


@attack("session-fill-of-many", Kind.SESSIONS, burns=True)
async def session_fill_of_many(fight: Fight) -> None:
    """1,100 sessions of two tokens on one node, from 64 addresses."""
    await fight.go()
    await fill(fight, FILL, 64, 2, 400.0)
    await fight.stay()


@attack("kv-hoard", Kind.SESSIONS)
async def kv_hoard(fight: Fight) -> None:
    """40 sessions that reserve 1,000 tokens each and use none, from one address."""
    await fight.go()
    await fill(fight, 40, 1, 1_000, 100.0)
    await fight.stay()


@attack("kv-hoard-of-many", Kind.SESSIONS)
async def kv_hoard_of_many(fight: Fight) -> None:
    """40 sessions that reserve 1,000 tokens each and use none, from 40 addresses."""
    await fight.go()
    await fill(fight, 40, 40, 1_000, 100.0)
    await fight.stay()


@attack("held-orphans", Kind.SESSIONS)
async def held_orphans(fight: Fight) -> None:
    """300 sessions whose streams are dropped and that are kept by Hold for ever."""
    await fight.go()
    connection = await fight.kit.connection(fight.ground.nodes[-1])
    sessions = []
    async for _ in fight.pace(300.0, 300):
        link = fight.kit.link_over(connection)
        attach = fight.kit.attach(fight.kit.own_route, 1, open=fight.kit.opening(window=128))
        with suppress(*ENDED):
            await link.send(attach)
            await link.read()
            sessions.append(attach.session)
            link.call.cancel()
    async for number in fight.pace(100.0, None if sessions else 0):
        session = sessions[number % len(sessions)]
        with suppress(*ENDED):
            hold = wire.encode_hold(Hold(session, 0, 60.0))
            await fight.kit.unary(connection, wire.HOLD, hold, fight.kit.signer(session))


@attack("reply-waiters", Kind.SESSIONS)
async def reply_waiters(fight: Fight) -> None:
    """1,500 reply streams that wait for sessions, and 30 attaches a second that wake them."""
    await fight.go()
    connections = [await fight.kit.connection(fight.ground.nodes[-1]) for _ in range(2)]

    async def wait(number: int) -> None:
        while True:
            with suppress(*ENDED):
                key = SessionKey.fresh()
                call, _ = await fight.kit.replies(
                    connections[number % 2], RepliesRequest(key.session, may_wait=True), key
                )
                await call.read()
            await asyncio.sleep(1.0)

    for number in range(1_500):
        fight.kit.scope.spawn(wait(number))
    async for number in fight.pace(30.0):
        link = fight.kit.link_over(connections[number % 2])
        with suppress(*ENDED):
            await link.send(fight.kit.attach(fight.kit.own_route, 1), Close("done"))
            fight.kit.scope.spawn(link.listen())


@attack("sweep-flood", Kind.SESSIONS, burns=True)
async def sweep_flood(fight: Fight) -> None:
    """Four sessions that compute 64 nodes all the time: a stranger who uses what honest users use."""
    await fight.go()

    async def one(source: str) -> None:
        want = fight.kit.opening(window=512, sweeps=8, nodes=512)
        attach = fight.kit.attach(open=want)
        link, is_ready = await fight.kit.session(attach, source)
        if not is_ready:
            return
        fight.kit.keep_pinging(link)
        connection = await fight.kit.connection(fight.ground.nodes[-1], source)
        tail, _ = await fight.kit.replies(connection, RepliesRequest(attach.session))
        sequence = 0
        async for _ in fight.pace(10.0):
            sequence += 1
            sweep = fight.kit.sweep(sequence, range(1, 65), acked=max(sequence - 4, 0)).sweep
            first = TreeNodeId(64 * (sequence - 1))
            parents = (None, *(TreeNodeId(first + place) for place in range(63)))
            sweep = replace(sweep, first_id=first, picks_from=first, parents=parents, truncate_to=0)
            await link.send(SweepFrame(sweep))
            await tail.read()

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(_quietly(one(fight.kit.strangers[number])))
    await fight.stay()


async def _quietly(work: Awaitable[None]) -> None:
    with suppress(*ENDED):
        await work


@attack("reroute-flood", Kind.SESSIONS)
async def reroute_flood(fight: Fight) -> None:
    """200 Reroutes a second to machines that nobody knows, each looked up in the node's directory."""
    await fight.go()
    await _reroute(fight, 200.0, lambda number: PeerId(_made_up(number)))


@attack("reroute-jump", Kind.SESSIONS)
async def reroute_jump(fight: Fight) -> None:
    """20 attaches and Reroutes a second of one's own sessions whose generations leap to 2^62."""
    await fight.go()
    connection = await fight.kit.connection(fight.ground.nodes[0])
    async for number in fight.pace(20.0):
        link = fight.kit.link_over(connection)
        with suppress(*ENDED):
            attach = fight.kit.attach(generation=number)
            await link.send(attach, fight.kit.reroute(attach, JUMP + number, fight.kit.route), Close("done"))
            fight.kit.scope.spawn(link.listen())


async def _reroute(fight: Fight, per_s: float, peer: Callable[[int], PeerId]) -> None:
    connection = await fight.kit.connection(fight.ground.nodes[0])
    link: RawLink | None = None
    attach = fight.kit.attach()
    async for number in fight.pace(per_s):
        try:
            if link is None:
                link, attach = fight.kit.link_over(connection), fight.kit.attach()
                await link.send(attach)
                fight.kit.scope.spawn(link.listen())
            route = (fight.kit.route[0], RouteHop(peer(number), fight.ground.nodes[1].span))
            await link.send(fight.kit.reroute(attach, number + 1, route))
            fight.tally.acts += 1
        except ENDED:
            fight.tally.refused += 1
            link = None


def _made_up(number: int) -> str:
    import base58

    return base58.b58encode(b"\x12\x20" + number.to_bytes(32, "big")).decode()


@attack("closing-race", Kind.SESSIONS)
async def closing_race(fight: Fight) -> None:
    """Sessions of one's own that are closed and attached anew at once; one that is taken and dropped is a breach."""
    await fight.go()
    connection = await fight.kit.connection(fight.ground.nodes[0])
    async for number in fight.pace(4.0):
        attach = fight.kit.attach()
        first, second = fight.kit.link_over(connection), fight.kit.link_over(connection)
        with suppress(*ENDED):
            await first.send(attach)
            if not await first.until_ready():
                continue
            await first.send(Close("done"))
            await asyncio.sleep(0.002 * (number % 5))
            await second.send(fight.kit.signed(replace(attach, generation=1)))
            async with asyncio.timeout(ANSWER_S):
                took = False
                while not isinstance(answer := await second.read(), Ready | Fault | None):
                    took = took or isinstance(answer, Attached)
            if took and answer is None:
                fight.breach("a session that was closing took a newer attach and dropped it")


# In somebody else's session: whoever was on its way knows its id.


@attack("session-hijack", Kind.SESSIONS)
async def session_hijack(fight: Fight) -> None:
    """A former hop attaches at the tail as the hop before, with a higher generation and rows of its own."""

    import torch

    async def strike(hop: Insider, attach: Attach, tail: NodeMark) -> None:
        link = await fight.kit.link(tail, signer=hop.node.registry.identity)
        generation = attach.generation + 1
        async for _ in fight.pace(100.0, 1_000):
            if len(hop.frames.get(attach.session, ())) > 3:
                break
        await link.send(replace(attach, generation=generation, index=len(attach.route) - 1))
        received = 0
        while not received and (answer := await link.read()) is not None:
            received = (answer.received or 0) if isinstance(answer, Attached) else 0
        sweeps = {frame.sweep.sequence: frame.sweep for frame in hop.frames.get(attach.session, ())}
        if received not in sweeps:
            fight.tally.refused += 1
            return
        last = sweeps[received]
        fight.kit.scope.spawn(link.listen())
        for number in range(3):
            first = TreeNodeId(last.first_id + len(last.tokens) + 3 * number)
            sweep = fight.kit.sweep(last.sequence + 1 + number).sweep
            parents = (None, TreeNodeId(first), TreeNodeId(first + 1))
            sweep = replace(sweep, first_id=first, picks_from=first, parents=parents, generation=generation)
            sweep = replace(sweep, committed=last.committed, acked=last.acked)
            rows = encode_rows(torch.randn(3, fight.ground.hidden_size), Codec.FP32)
            await link.send(SweepFrame(sweep, None, rows))
        fight.kit.keep_pinging(link, 0.5)

    await strike_sessions(fight, strike)


@attack("generation-leap", Kind.SESSIONS)
async def generation_leap(fight: Fight) -> None:
    """A former hop attaches with generation 2^62 at every hop of a session, and keeps the streams."""

    async def strike(hop: Insider, attach: Attach, tail: NodeMark) -> None:
        for node in fight.ground.nodes:
            index = next((at for at, hop in enumerate(attach.route) if hop.peer == node.peer), None)
            if index is not None:
                link = await fight.kit.link(node, signer=hop.node.registry.identity)
                await link.send(replace(attach, generation=JUMP, index=index))
                fight.kit.keep_pinging(link, 0.5)

    await strike_sessions(fight, strike)


@attack("generation-leap-dropped", Kind.SESSIONS)
async def generation_leap_dropped(fight: Fight) -> None:
    """The same, but the streams are dropped at once."""

    async def strike(hop: Insider, attach: Attach, tail: NodeMark) -> None:
        link = await fight.kit.link(tail, signer=hop.node.registry.identity)
        await link.send(replace(attach, generation=JUMP, index=len(attach.route) - 1))
        await link.read()
        link.call.cancel()

    await strike_sessions(fight, strike)


@attack("reply-theft", Kind.SESSIONS)
async def reply_theft(fight: Fight) -> None:
    """A former hop opens a session's reply stream, and reads the user's picks."""

    async def strike(hop: Insider, attach: Attach, tail: NodeMark) -> None:
        request = RepliesRequest(attach.session, attach.generation)
        call, _ = await fight.kit.replies(await fight.kit.connection(tail), request, hop.node.registry.identity)
        assembler = FrameAssembler()
        while isinstance(part := await call.read(), bytes):
            if isinstance(assembler.feed(part), Reply):
                fight.breach("a stranger reads somebody's picks")

    await strike_sessions(fight, strike)


@attack("forged-hold", Kind.SESSIONS)
async def forged_hold(fight: Fight) -> None:
    """A former hop holds and closes sessions of others, as if it spoke for them."""

    async def strike(hop: Insider, attach: Attach, tail: NodeMark) -> None:
        me, connection = hop.node.registry.identity, await fight.kit.connection(tail)
        with suppress(*ENDED):
            hold = wire.encode_hold(Hold(attach.session, JUMP, 3_600.0))
            await fight.kit.unary(connection, wire.HOLD, hold, me)
        link = fight.kit.link_over(connection, me)
        await link.send(replace(attach, index=len(attach.route) - 1), Close("done"), Ping(1))
        await link.read()

    await strike_sessions(fight, strike)


@attack("session-replay", Kind.SESSIONS)
async def session_replay(fight: Fight) -> None:
    """A former hop plays whole recorded sessions again, at the tail that they went to, while they still run."""

    async def strike(hop: Insider, attach: Attach, tail: NodeMark) -> None:
        link = await fight.kit.link(tail, signer=hop.node.registry.identity)
        frames = hop.frames.get(attach.session, [])
        await link.send(replace(attach, index=len(attach.route) - 1))
        for frame in list(frames)[:200]:
            await link.send(frame)
        await link.listen()

    await strike_sessions(fight, strike)


Strike = Callable[[Insider, Attach, NodeMark], Awaitable[None]]


async def strike_sessions(fight: Fight, strike: Strike) -> None:
    """Take part in sessions as a well-behaved hop, and strike once in each, a moment after it began."""
    hop = await insider(fight, "0-8")
    await fight.go()
    await hop.announce()
    seen: set[bytes] = set()

    async def once(attach: Attach, tail: NodeMark) -> None:
        with suppress(*ENDED, grpc.RpcError):
            await strike(hop, attach, tail)

    try:
        async for _ in fight.pace(50.0):
            for attach in hop.sessions():
                tail = next((node for node in fight.ground.nodes if node.peer == attach.route[-1].peer), None)
                if attach.session not in seen and tail is not None:
                    seen.add(attach.session)
                    fight.kit.scope.spawn(once(attach, tail))
    finally:
        hop.report(fight)
