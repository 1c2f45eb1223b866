"""The connections that a node's server takes: so many, so many of one address, none that says nothing, none packed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio
import pytest

import node.life.span_host
from node.life import connection_guard
from node.life.connection_guard import AcceptedConnection, connections_to, keep_connections_bounded, surplus
from node.life.span_host import bind
from swarm.base.quota import address_key
from swarm.link.dial import CHANNEL_OPTIONS, SERVER_OPTIONS
from tests.net.three_nodes import until

MOST = 12


async def echo(request: bytes, _context: object) -> bytes:
    return request


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    """A node's server that echoes; its port."""
    server, port = bind("127.0.0.1", 0, None)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the server ended a connection; what it said before is passed over."""
    try:
        async with asyncio.timeout(0.2):
            while await reader.read(100):
                pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes `MOST` connections and waits 0.3 s for a handshake."""
    options = [(name, 300 if name == "grpc.server_handshake_timeout_ms" else value) for name, value in SERVER_OPTIONS]
    monkeypatch.setattr(node.life.span_host, "SERVER_OPTIONS", options)
    monkeypatch.setattr(node.life.span_host, "MAX_CONNECTIONS", MOST)


@pytest.mark.usefixtures("few")
async def test_a_server_takes_so_many_connections_and_none_that_says_nothing() -> None:
    async with served() as port, AsyncExitStack() as stack:
        opened = []
        for _ in range(2 * MOST):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            opened.append(reader)
        assert sum(await asyncio.gather(*map(is_closed, opened))) >= MOST

        async def all_closed() -> bool:
            return all(await asyncio.gather(*map(is_closed, opened)))

        await until(all_closed)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", CHANNEL_OPTIONS) as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test/echo")
            assert await call(b"free again") == b"free again"


async def test_packed_messages_are_not_unpacked() -> None:
    async with served() as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test/echo")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(10_000), compression=grpc.Compression.Gzip)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_one_address_has_so_many_connections_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "weight_of", lambda key: 1)
    async with served() as port, AsyncExitStack() as stack:
        working = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = working.unary_unary("/test/echo")
        assert await call(b"") == b""
        opened = []
        for _ in range(6):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            opened.append(reader)
        guard = asyncio.get_running_loop().create_task(keep_connections_bounded(port, 3, 0.01))

        async def closed() -> bool:
            return sum(await asyncio.gather(*map(is_closed, opened))) == 4

        await until(closed)
        assert len(connections_to(port)) == 3
        assert await call(b"goes on") == b"goes on"
        guard.cancel()


async def test_who_is_shut_out_loses_its_connections_and_nobody_else() -> None:
    shut: set[str] = set()
    async with served() as port, AsyncExitStack() as stack:
        opened = []
        for source in ("127.0.0.5", "127.0.0.6"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
            stack.callback(writer.close)
            opened.append(reader)
        guard = asyncio.get_running_loop().create_task(
            keep_connections_bounded(port, look_s=0.01, shut_out=lambda: frozenset(shut))
        )
        await asyncio.sleep(0.1)
        assert len(connections_to(port)) == 2
        shut.add("127.0.0.5")

        async def closed() -> bool:
            return await is_closed(opened[0])

        await until(closed)
        assert [address_key(one.peer[0]) for one in connections_to(port)] == ["127.0.0.6"]
        guard.cancel()


def test_each_address_keeps_its_first_ones() -> None:
    many = [AcceptedConnection(file, ("9.9.9.9", file)) for file in range(100)]
    near = [AcceptedConnection(200 + file, ("127.0.0.1", file)) for file in range(100)]
    v6 = [AcceptedConnection(400 + file, (f"2a00:1450::{file:x}", 1)) for file in range(70)]
    assert surplus([*reversed(many), *near, *v6]) == [*many[64:], *v6[64:]]


def test_a_file_that_is_another_one_by_now_is_left_alone() -> None:
    left, right = socket.socketpair()
    with left, right:
        connection_guard.shut_down(AcceptedConnection(left.fileno(), ("9.9.9.9", 1)))
        left.send(b"still there")
        assert right.recv(20) == b"still there"
    connection_guard.shut_down(AcceptedConnection(left.fileno(), ("9.9.9.9", 1)))
