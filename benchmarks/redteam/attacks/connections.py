"""Connections that say nothing, too little, too slowly or too often: TCP, TLS and HTTP/2, below any message."""

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import Callable
from contextlib import suppress

from benchmarks.redteam import h2
from benchmarks.redteam.attack import Fight, Kind, attack
from benchmarks.redteam.ground import NodeMark
from benchmarks.redteam.h2 import FrameType, h2_frame
from benchmarks.redteam.kit import RawSocket
from swarm.link.link import Signer
from swarm.protocol import wire
from swarm.protocol.authority import SessionKey
from swarm.protocol.frames import split
from swarm.protocol.messages import Hold

ENDED_SOCKET = (OSError, TimeoutError)
IDLE = 1_400
"""More than the 1,024 files that a program may have open."""
SLOW = 300
HELLO_HALF = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100)
"""The beginning of a TLS handshake: a record and a ClientHello that announce 512 bytes."""
BOMB_BYTES = 256 << 20


async def many(fight: Fight, count: int, per_s: float, first: bytes, *, encrypted: bool = False) -> list[RawSocket]:
    """Open so many connections to the first node, say the same on each, and read nothing."""
    node, opened = fight.ground.nodes[0], []
    async for _ in fight.pace(per_s, count):
        try:
            one = await fight.kit.socket(node.address, encrypted=node if encrypted else None)
            if first:
                await one.send(first)
            opened.append(one)
        except (OSError, TimeoutError):
            fight.tally.refused += 1
    return opened


@attack("idle-connections", Kind.CONNECTIONS, lasts_s=26.0)
async def idle_connections(fight: Fight) -> None:
    """1,400 TCP connections to a node that say nothing."""
    await fight.go()
    await many(fight, IDLE, 700, b"")
    await fight.stay()


@attack("half-tls", Kind.CONNECTIONS)
async def half_tls(fight: Fight) -> None:
    """300 TLS handshakes that stop in the middle of the first message."""
    await fight.go()
    await many(fight, SLOW, 300, HELLO_HALF)
    await fight.stay()


@attack("half-preface", Kind.CONNECTIONS)
async def half_preface(fight: Fight) -> None:
    """300 connections that send half of HTTP/2's preface."""
    await fight.go()
    await many(fight, SLOW, 300, h2.PREFACE[:12], encrypted=True)
    await fight.stay()


@attack("bare-preface", Kind.CONNECTIONS)
async def bare_preface(fight: Fight) -> None:
    """300 connections that begin HTTP/2 and never call anything."""
    await fight.go()
    await many(fight, SLOW, 300, h2.opening(), encrypted=True)
    await fight.stay()


@attack("slow-preface", Kind.CONNECTIONS)
async def slow_preface(fight: Fight) -> None:
    """200 connections that send HTTP/2's preface at one byte per second."""
    await fight.go()
    opened = await many(fight, 200, 400, b"", encrypted=True)
    begin = h2.opening()
    async for number in fight.pace(1.0):
        for one in opened:
            with suppress(OSError):
                await one.send(begin[number % len(begin) :][:1])


@attack("connection-churn", Kind.CONNECTIONS)
async def connection_churn(fight: Fight) -> None:
    """250 connections a second, each closed at once."""
    await fight.go()
    node = fight.ground.nodes[0]
    async for _ in fight.pace(250):
        with suppress(OSError, TimeoutError):
            one = await fight.kit.socket(node.address)
            one.writer.transport.abort()


@attack("connections-of-many", Kind.CONNECTIONS, lasts_s=26.0)
async def connections_of_many(fight: Fight) -> None:
    """1,200 idle connections from 200 addresses."""
    await fight.go()
    node = fight.ground.nodes[0]
    async for number in fight.pace(600, 1_200):
        try:
            await fight.kit.socket(node.address, fight.kit.strangers[number % 200])
        except (OSError, TimeoutError):
            fight.tally.refused += 1
    await fight.stay()


async def streams(
    fight: Fight, count: int, path: str, per_connection: int = 100, **settings: int
) -> list[tuple[RawSocket, int]]:
    """Open so many streams that send headers and no message."""
    node, opened = fight.ground.nodes[0], []
    for _ in range(-(-count // per_connection)):
        try:
            one = await fight.kit.node_socket(node, settings=settings)
            for number in range(per_connection):
                await one.send(one.call(2 * number + 1, path))
                opened.append((one, 2 * number + 1))
            if not settings:
                fight.kit.scope.spawn(one.drop())
        except (OSError, TimeoutError):
            fight.tally.refused += 1
    return opened


@attack("mute-streams", Kind.CONNECTIONS)
async def mute_streams(fight: Fight) -> None:
    """4,096 streams that send headers and no message, again and again."""
    await fight.go()
    while True:
        await streams(fight, 4_096, wire.LINK)
        await asyncio.sleep(5.0)


@attack("mute-reply-streams", Kind.CONNECTIONS)
async def mute_reply_streams(fight: Fight) -> None:
    """1,500 reply streams that ask for nothing."""
    await fight.go()
    await streams(fight, 1_500, wire.REPLIES)
    await fight.stay()


@attack("dripped-heads", Kind.CONNECTIONS)
async def dripped_heads(fight: Fight) -> None:
    """200 streams that send an Attach at one byte per second."""
    await fight.go()
    opened = await streams(fight, 200, wire.LINK, 50)
    body = h2.message(next(split(fight.kit.attach())))
    async for number in fight.pace(1.0):
        for one, stream in opened:
            with suppress(OSError):
                await one.send(h2.data(stream, body[number % len(body) :][:1]))


@attack("dripped-rows", Kind.CONNECTIONS)
async def dripped_rows(fight: Fight) -> None:
    """16 sessions that announce 4 MiB of a frame and send it at one byte per second."""
    await fight.go()
    links = []
    for _ in range(16):
        link, _ = await fight.kit.session(fight.kit.attach())
        fight.kit.keep_pinging(link, 3_600.0)
        links.append(link)
    with suppress(OSError):
        for link in links:
            await link.send_bytes(wire.encode_part(4_000, 1 << 20, (b"\x0a", b"")))
        async for _ in fight.pace(1.0):
            for link in links:
                with suppress(Exception):
                    await link.send_bytes(wire.encode_part(0, 0, (b"\x0a", b"")))


@attack("deaf-readers", Kind.CONNECTIONS)
async def deaf_readers(fight: Fight) -> None:
    """60 connections whose windows are closed: they call Info 100 times each and read no answer."""
    await fight.go()
    opened = await streams(fight, 6_000, wire.INFO, 100, _4=0)
    for one, stream in opened:
        with suppress(OSError):
            await one.send(h2_frame(FrameType.DATA, h2.END_STREAM, stream, h2.message(b"")))
    await fight.stay()


@attack("rapid-reset", Kind.CONNECTIONS, burns=True)
async def rapid_reset(fight: Fight) -> None:
    """2,000 calls a second that are cancelled at once, over four connections."""
    await fight.go()
    await _churn(fight, 2_000, lambda one, stream: one.call(stream, wire.LINK) + h2.reset(stream))


async def _churn(fight: Fight, per_s: int, frames: object) -> None:
    """Send frames for ever-new streams; a connection that was ended is replaced, twice a second at most."""
    assert callable(frames)
    node = fight.ground.nodes[0]

    async def one_connection() -> None:
        while True:
            with suppress(OSError, TimeoutError):
                one = await fight.kit.node_socket(node)
                fight.kit.scope.spawn(one.drop())
                async for number in fight.pace(per_s / 40):
                    if one.is_closed:
                        fight.tally.refused += 1
                        break
                    await one.send(b"".join(frames(one, 20 * number + 2 * step + 1) for step in range(10)))
                    fight.tally.acts += 10
            await asyncio.sleep(0.5)

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(one_connection())


@attack("ping-flood", Kind.CONNECTIONS, burns=True)
async def ping_flood(fight: Fight) -> None:
    """10,000 HTTP/2 pings a second."""
    await fight.go()
    await _churn(fight, 10_000, lambda one, stream: h2_frame(FrameType.PING, payload=struct.pack(">Q", stream)))


@attack("settings-flood", Kind.CONNECTIONS, burns=True)
async def settings_flood(fight: Fight) -> None:
    """10,000 HTTP/2 settings a second."""
    await fight.go()
    await _churn(fight, 10_000, lambda one, stream: h2_frame(FrameType.SETTINGS, payload=struct.pack(">HI", 4, stream)))


@attack("continuation-flood", Kind.CONNECTIONS, burns=True)
async def continuation_flood(fight: Fight) -> None:
    """Headers that never end: 2,000 continuations a second of 1 KiB each."""
    await fight.go()
    node = fight.ground.nodes[0]
    filler = b"\x00\x01a\x7e" + b"b" * 126
    while True:
        with suppress(OSError, TimeoutError):
            one = await fight.kit.node_socket(node)
            fight.kit.scope.spawn(one.drop())
            await one.send(h2_frame(FrameType.HEADERS, 0, 1, h2.call_headers(wire.LINK, "a", is_tls=one.is_tls)))
            async for _ in fight.pace(200):
                if one.is_closed:
                    break
                await one.send(h2_frame(FrameType.CONTINUATION, 0, 1, filler * 8) * 10)
        await asyncio.sleep(0.2)


@attack("empty-data-flood", Kind.CONNECTIONS, burns=True)
async def empty_data_flood(fight: Fight) -> None:
    """Streams that send 5,000 empty data frames a second and never a message."""
    await fight.go()
    opened = await streams(fight, 8, wire.LINK, 4)
    async for _ in fight.pace(60):
        for one, stream in opened:
            with suppress(OSError):
                await one.send(h2.data(stream, b"") * 10)


@attack("gzip-bomb", Kind.CONNECTIONS)
async def gzip_bomb(fight: Fight) -> None:
    """Messages of 256 KB that would inflate to 256 MiB, twice a second."""
    bomb = await asyncio.to_thread(gzip.compress, bytes(BOMB_BYTES), 9)
    await fight.go()
    body = h2.message(bomb, is_compressed=True)
    async for number in fight.pace(2.0):
        with suppress(OSError, TimeoutError):
            one = await fight.kit.node_socket(fight.ground.nodes[number % len(fight.ground.nodes)])
            await one.send(one.call(1, wire.LINK, "gzip"))
            for start in range(0, len(body), 16_384):
                await one.send(h2.data(1, body[start : start + 16_384]))
            fight.kit.scope.spawn(one.drop())


async def _calls(
    fight: Fight, method: str, per_s: float, make: Callable[[int], bytes], signer: Signer | None = None
) -> None:
    """Call a node at a rate, and count what was refused."""
    node: NodeMark = fight.ground.nodes[0]
    connection = await fight.kit.connection(node)

    async def once(number: int) -> None:
        try:
            await fight.kit.unary(connection, method, make(number), signer)
        except Exception:  # noqa: BLE001 (refused, ended, late: all the same to an attacker)
            fight.tally.refused += 1

    async for number in fight.pace(per_s):
        fight.tally.acts += 1
        fight.kit.scope.spawn(once(number))


@attack("hello-flood", Kind.CONNECTIONS)
async def hello_flood(fight: Fight) -> None:
    """300 Hellos a second, each of which makes the node sign with its RSA key."""
    await fight.go()
    await _calls(fight, wire.HELLO, 300, lambda number: number.to_bytes(16, "big"))


@attack("info-flood", Kind.CONNECTIONS)
async def info_flood(fight: Fight) -> None:
    """300 Infos a second."""
    await fight.go()
    await _calls(fight, wire.INFO, 300, lambda number: b"")


@attack("manifest-flood", Kind.CONNECTIONS)
async def manifest_flood(fight: Fight) -> None:
    """300 questions a second for the list of a model's weight files, which may be long."""
    await fight.go()
    await _calls(fight, wire.MANIFEST, 300, lambda number: b"")


@attack("hold-flood", Kind.CONNECTIONS)
async def hold_flood(fight: Fight) -> None:
    """300 Holds a second for sessions that nobody has."""
    key = SessionKey.fresh()
    await fight.go()
    await _calls(fight, wire.HOLD, 300, lambda number: wire.encode_hold(Hold(key.session, number, 10.0)), key)
