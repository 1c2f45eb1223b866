"""Frames that are dear to read, that are refused over and over, or that nobody expects."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio

from benchmarks.redteam.attack import Fight, Kind, attack
from benchmarks.redteam.kit import RawLink
from swarm.base.ids import PeerId, TreeNodeId
from swarm.base.layers import Span
from swarm.protocol import wire
from swarm.protocol.frames import split
from swarm.protocol.limits import MAX_HEADERS
from swarm.protocol.messages import Close, RouteHop, Sampling, Snapshot, Sweep, SweepFrame
from swarm.protocol.pick_rules import DraftDistribution

ENDED = (grpc.aio.AioRpcError, OSError, asyncio.InvalidStateError, TimeoutError)


def fat_head() -> Snapshot:
    """A message without rows whose head has nearly 4 MiB: 4,096 headers with draft distributions."""
    count = 4
    guess = [DraftDistribution(place, tuple(range(32)), (0.5,) * 32, ()) for place in range(count)]
    none: tuple[None, ...] = (None,) * count
    header = Sweep(1, 0, TreeNodeId(0), (1,) * count, none, TreeNodeId(0), guesses=tuple(guess))
    headers = tuple(replace(header, sequence=number + 1) for number in range(MAX_HEADERS))
    return Snapshot(0, 0, 0, TreeNodeId(0), Sampling(), (), (), (), (), headers)


class LogTail:
    """What a node writes into its log from now on."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._begins = self._path.stat().st_size

    def read(self) -> bytes:
        """All of it so far."""
        return self._path.read_bytes()[self._begins :]


async def repeat(fight: Fight, parts: list[bytes], per_s: float, compression: grpc.Compression | None = None) -> None:
    """Attach and send the same parts at a rate; attach anew whenever the stream was ended."""
    connection = await fight.kit.connection(fight.ground.nodes[0])
    link: RawLink | None = None
    async for _ in fight.pace(per_s):
        try:
            if link is None:
                link = fight.kit.link_over(connection, None, compression)
                await link.send(fight.kit.attach())
                fight.kit.scope.spawn(link.listen())
            async with asyncio.timeout(5.0):
                for part in parts:
                    await link.send_bytes(part)
            fight.tally.acts += 1
        except ENDED:
            fight.tally.refused += 1
            link = None


@attack("fat-heads", Kind.FRAMES)
async def fat_heads(fight: Fight) -> None:
    """Heads of 4 MiB, one each second, which takes 32 Mbit/s."""
    parts = list(split(await asyncio.to_thread(fat_head)))
    await fight.go()
    await repeat(fight, parts, 1.0)


@attack("gzip-heads", Kind.FRAMES)
async def gzip_heads(fight: Fight) -> None:
    """The same heads in gzip, two each second, which takes some ten kbit/s."""
    parts = list(split(await asyncio.to_thread(fat_head)))
    await fight.go()
    await repeat(fight, parts, 2.0, grpc.Compression.Gzip)


@attack("fat-first-heads", Kind.FRAMES)
async def fat_first_heads(fight: Fight) -> None:
    """Heads of 4 MiB on streams without a session, one each second."""
    parts = list(split(await asyncio.to_thread(fat_head)))
    await fight.go()
    connection = await fight.kit.connection(fight.ground.nodes[0])
    async for _ in fight.pace(1.0):
        link = fight.kit.link_over(connection)
        with suppress(*ENDED):
            async with asyncio.timeout(5.0):
                for part in parts:
                    await link.send_bytes(part)
        fight.tally.acts += 1


@attack("wide-heads", Kind.FRAMES)
async def wide_heads(fight: Fight) -> None:
    """Sweeps of 60,000 nodes where 16 were granted, ten a second."""
    count = 60_000
    wide = fight.kit.sweep(1, range(1))
    sweep = replace(wide.sweep, tokens=(1,) * count, parents=(None,) * count)
    parts = list(split(replace(wide, sweep=sweep)))
    await fight.go()
    await repeat(fight, parts, 10.0)


@attack("refused-sweeps", Kind.FRAMES)
async def refused_sweeps(fight: Fight) -> None:
    """500 sweeps a second that a node must refuse."""
    sweep = fight.kit.sweep(99)
    parts = list(split(sweep))
    await fight.go()
    await repeat(fight, parts, 500.0)


@attack("record-stuffing", Kind.FRAMES)
async def record_stuffing(fight: Fight) -> None:
    """Reroutes with 257 signed records each, two a second."""
    identities = await asyncio.to_thread(fight.kit.identities, 257)
    from swarm.directory.node_record import seal

    def make() -> list[bytes]:
        return [seal(fight.kit.record(one, Span(0, 6), "127.0.0.1:9"), one) for one in identities]

    records = tuple(await asyncio.to_thread(make))
    await fight.go()
    connection = await fight.kit.connection(fight.ground.nodes[0])
    link: RawLink | None = None
    attach = fight.kit.attach()
    async for number in fight.pace(2.0):
        try:
            if link is None:
                link = fight.kit.link_over(connection, None, grpc.Compression.Gzip)
                attach = fight.kit.attach()
                await link.send(attach)
                fight.kit.scope.spawn(link.listen())
            other = RouteHop(PeerId(identities[number % 257].peer_id), fight.ground.nodes[1].span)
            route = (fight.kit.route[0], other)
            await link.send(fight.kit.reroute(attach, number + 1, route, *records))
            fight.tally.acts += 1
        except ENDED:
            fight.tally.refused += 1
            link = None


@attack("empty-snapshots", Kind.FRAMES)
async def empty_snapshots(fight: Fight) -> None:
    """Snapshots without nodes whose next id is none, ten a second; a stack trace in the node's log is a breach."""
    empty = Snapshot(0, 0, 0, TreeNodeId(7), Sampling(), (), (), (), (), ())
    await fight.go()
    log = LogTail(fight.ground.nodes[0].log)
    try:
        await repeat(fight, list(split(empty)), 10.0)
    finally:
        if b"Traceback" in log.read():
            fight.breach("a node's log has a stack trace of it")


@attack("wide-session", Kind.FRAMES)
async def wide_session(fight: Fight) -> None:
    """One session that keeps 8,000 live nodes on a node, whose ancestors nobody budgeted."""
    await fight.go()
    wide = fight.kit.opening(window=256, sweeps=16, nodes=8_192)
    link, is_ready = await fight.kit.session(fight.kit.attach(open=wide))
    if not is_ready:
        await fight.stay()
    fight.kit.keep_pinging(link)
    with suppress(*ENDED):
        for number in range(8):
            parents: list[TreeNodeId | None] = [None]
            parents += [TreeNodeId(1_000 * number + place) for place in range(999)]
            first = TreeNodeId(1_000 * number)
            tokens = tuple((7 * number + place) % 4_000 for place in range(1_000))
            await link.send(SweepFrame(Sweep(number + 1, 0, first, tokens, tuple(parents), first)))
            await asyncio.sleep(0.3)
    await fight.stay()


@attack("log-flood", Kind.FRAMES)
async def log_flood(fight: Fight) -> None:
    """300 streams a second that are refused, with lines of their own in what they say."""
    await fight.go()
    connection = await fight.kit.connection(fight.ground.nodes[0])
    log = LogTail(fight.ground.nodes[0].log)
    evil = "done\n2026-01-01 00:00:00 ERROR node: \x1b]0;owned\x07 your disk is full"
    try:
        async for number in fight.pace(300.0):
            link = fight.kit.link_over(connection)
            with suppress(*ENDED):
                bad = RouteHop(PeerId(evil[:60]), Span(0, 6))
                await link.send(Close(evil) if number % 2 else fight.kit.attach((bad,), 0))
                await link.call.done_writing()
            fight.kit.scope.spawn(link.listen())
            fight.tally.acts += 1
    finally:
        written = log.read()
        if b"\x1b" in written or b"\n2026-01-01" in written:
            fight.breach("a stranger writes lines or escapes into a node's log")


@attack("mutated-frames", Kind.FRAMES)
async def mutated_frames(fight: Fight) -> None:
    """200 frames a second with flipped bits, in streams of sessions."""
    rng = random.Random(1)
    await fight.go()
    connection = await fight.kit.connection(fight.ground.nodes[0])
    link: RawLink | None = None
    async for _ in fight.pace(200.0):
        try:
            if link is None:
                link = fight.kit.link_over(connection)
                await link.send(fight.kit.attach())
                fight.kit.scope.spawn(link.listen())
            head = bytearray(wire.encode_frame(fight.kit.sweep(1)))
            for _ in range(rng.choice((1, 2, 8))):
                head[rng.randrange(len(head))] ^= 1 << rng.randrange(8)
            await link.send_bytes(wire.encode_part(len(head), 0, (bytes(head), b"")))
            fight.tally.acts += 1
        except ENDED:
            fight.tally.refused += 1
            link = None
