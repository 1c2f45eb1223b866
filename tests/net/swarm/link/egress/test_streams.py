"""Two connections become one: ends and resets are passed on, nothing is kept back, and little is held."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from swarm.base.errors import RemoteProtocolError
from swarm.base.tasks import TaskScope
from swarm.link.egress import streams as streams_module
from swarm.link.egress.streams import Streams, connect, splice


@dataclass(frozen=True, slots=True)
class Spliced:
    """The two outer ends of a spliced pair of connections, and what joins them."""

    near: Streams
    far: Streams
    splicing: asyncio.Task[None]


@asynccontextmanager
async def spliced() -> AsyncIterator[Spliced]:
    arrived: asyncio.Queue[Streams] = asyncio.Queue()
    server = await asyncio.start_server(lambda *ends: arrived.put_nowait(Streams(*ends)), "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, TaskScope() as scope:
        near, far = await connect(address), await connect(address)
        inner = await arrived.get(), await arrived.get()
        try:
            yield Spliced(near, far, scope.spawn(splice(*inner)))
        finally:
            for end in (near, far):
                end.abort()


async def test_an_end_of_one_direction_is_passed_on_and_the_other_goes_on() -> None:
    async with spliced() as pair, asyncio.timeout(10):
        pair.near.writer.write(b"question")
        pair.near.writer.write_eof()
        assert await pair.far.reader.read() == b"question"
        pair.far.writer.write(b"answer")
        pair.far.writer.write_eof()
        assert await pair.near.reader.read() == b"answer"
        await pair.splicing


@pytest.mark.parametrize("broken", ["near", "far"])
async def test_a_reset_on_either_side_ends_both(broken: str) -> None:
    async with spliced() as pair, asyncio.timeout(10):
        pair.near.writer.write(b"x")
        assert await pair.far.reader.readexactly(1) == b"x"
        dead, alive = (pair.near, pair.far) if broken == "near" else (pair.far, pair.near)
        dead.writer.write(b"unread")  # what nobody reads makes the end a reset
        dead.abort()
        assert await alive.reader.read() in (b"unread", b"")
        alive.close()
        await pair.splicing


async def test_who_ends_one_direction_and_waits_for_ever_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "LINGER_S", 0.05)
    async with spliced() as pair, asyncio.timeout(10):
        pair.near.writer.write_eof()
        await pair.splicing


async def test_much_goes_through_with_little_held_and_a_slow_reader_slows_the_writer() -> None:
    size, piece = 32 << 20, bytes(range(256)) * 256
    async with spliced() as pair, asyncio.timeout(30):
        writing = 0

        async def write() -> None:
            nonlocal writing
            while writing < size:
                pair.near.writer.write(piece)
                writing += len(piece)
                await pair.near.writer.drain()
            pair.near.writer.write_eof()

        async with TaskScope() as scope:
            task = scope.spawn(write())
            await asyncio.wait([task], timeout=0.3)
            assert not task.done(), "nobody reads: what the system and the splice hold is less than all"
            digest, count = hashlib.sha256(), 0
            while data := await pair.far.reader.read(1 << 20):
                digest.update(data)
                count += len(data)
            await task
        assert count == size
        assert digest.digest() == hashlib.sha256(piece * (size // len(piece))).digest()


async def test_lines_are_bounded() -> None:
    async with spliced() as pair, asyncio.timeout(10):
        pair.near.writer.write(b"two words\r\n" + b"x" * 512 + b"\n")
        assert await pair.far.hear() == ["two", "words"]
        with pytest.raises(RemoteProtocolError):
            await pair.far.hear()
        pair.near.writer.write(b"half a line")
        pair.near.writer.write_eof()
        assert await pair.far.hear() == [], "a line that does not end is none"


async def test_an_address_with_one_dead_family_is_reached_by_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with two addresses, of which the first swallows all packets: the second one answers within a second."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.2", 0)
    port = server.sockets[0].getsockname()[1]
    loop = asyncio.get_running_loop()
    connecting = loop.sock_connect

    async def resolve(host: str, port: int, **_options: object) -> list[tuple[object, ...]]:
        ips = ("127.0.0.1", "127.0.0.2") if host == "two.example" else (host,)
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (ip, port)) for ip in ips]

    async def swallow(sock: object, address: tuple[str, int]) -> None:
        if address[0] == "127.0.0.1":
            await loop.create_future()
        await connecting(sock, address)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "getaddrinfo", resolve)
    monkeypatch.setattr(loop, "sock_connect", swallow)
    async with server, asyncio.timeout(5):
        streams = await connect(f"two.example:{port}")
        assert streams.remote == f"127.0.0.2:{port}"
        streams.abort()
