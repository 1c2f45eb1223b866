"""The HTTP server among callers that say nothing, little, or nothing more, and where no file can be opened."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import swarm.status.http
from swarm.base.tasks import TaskScope
from swarm.status.http import ConnectionLimits, Guarded, make_server

ASK = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"


async def hello(_: Request) -> Response:
    return PlainTextResponse("hello")


@dataclass(frozen=True)
class Caller:
    """A connection to the server, from its other end."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(b"hello"), 10)

    async def ended(self) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(), 10) == b""
        except ConnectionError:
            return True


Connect = Callable[[bytes], Awaitable[Caller]]


@asynccontextmanager
async def served(limits: ConnectionLimits) -> AsyncIterator[Connect]:
    server = make_server(Guarded(Starlette(routes=[Route("/", hello)])), limits)
    callers: list[Caller] = []

    async def serve(listening: socket.socket) -> None:
        await server.serve(sockets=[listening])

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        async def connect(said: bytes) -> Caller:
            callers.append(Caller(*await asyncio.open_connection("127.0.0.1", port)))
            callers[-1].writer.write(said)
            return callers[-1]

        async with TaskScope() as scope:
            task = scope.spawn(serve(listening))
            yield connect
            for one in callers:
                one.writer.close()
                with suppress(ConnectionError):
                    await one.writer.wait_closed()
            server.should_exit = True
            await asyncio.wait([task])


async def test_idle_connections_make_room() -> None:
    async with served(ConnectionLimits(total=8)) as connect:
        idle = [await connect(b"") for _ in range(8)]
        for _ in range(8):
            await connect(ASK[:-2])  # half a head
        assert all([await one.ended() for one in idle])
        assert b"200 OK" in await (await connect(ASK)).answer()


async def test_a_head_that_does_not_come_is_not_awaited() -> None:
    async with served(ConnectionLimits(total=8, head_s=0.4)) as connect:
        silent, drip = await connect(b""), await connect(ASK)
        assert b"200 OK" in await drip.answer()  # the connection stays for a next request, whose head drips
        waiting = asyncio.gather(silent.ended(), drip.ended())
        for byte in ASK[:-2]:
            if waiting.done():
                break
            drip.writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
        assert all(await waiting)


async def test_where_no_file_can_be_opened_it_waits_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop, tries = asyncio.get_running_loop(), []
    accept = loop.sock_accept

    async def full(listening: socket.socket) -> tuple[socket.socket, object]:
        tries.append(True)
        if len(tries) < 5:
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", full)
    monkeypatch.setattr(swarm.status.http, "PAUSE_S", 0.01)
    with caplog.at_level(logging.WARNING):
        async with served(ConnectionLimits(total=8)) as connect:
            assert b"200 OK" in await (await connect(ASK)).answer()
    assert len(tries) == 6
    assert [record.getMessage() for record in caplog.records] == [
        "no connection can be accepted ([Errno 24] Too many open files); trying again"
    ]


async def test_a_reader_that_takes_nothing_is_cut() -> None:
    has_ended = asyncio.Event()

    async def large(_: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x" * 65_536
                    await asyncio.sleep(0)
            finally:
                has_ended.set()

        return StreamingResponse(parts())

    server = make_server(Starlette(routes=[Route("/", large)]), ConnectionLimits(stalled_s=0.05))

    async def serve(listening: socket.socket) -> None:
        await server.serve(sockets=[listening])

    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as caller:
        caller.connect(listening.getsockname())
        caller.send(ASK)
        async with TaskScope() as scope:
            task = scope.spawn(serve(listening))
            async with asyncio.timeout(10):
                await has_ended.wait()
            server.should_exit = True
            await asyncio.wait([task])
