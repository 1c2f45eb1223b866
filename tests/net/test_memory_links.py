"""Links in memory behave as gRPC's do, wherever nodes and clients would notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from benchmarks.simulation.virtual_loop import VirtualLoop
from tests.memory_links import MemoryLinks, MemoryServer

METHOD = "/tests.Echo/Talk"
LARGE = bytes(1 << 20)
Handler = Callable[[AsyncIterator[bytes], Any], Any]


@asynccontextmanager
async def talking(links: MemoryLinks | None, handler: Handler) -> AsyncIterator[tuple[Any, Any]]:
    """A server that answers with this handler, and a stream to it."""
    server: Any = links.server() if links is not None else grpc.aio.server()
    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(handler)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tests.Echo", {"Talk": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address = f"127.0.0.1:{port}"
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, None)
        opened: Any = links.channel(address) if links is not None else grpc.aio.insecure_channel(address)
        channel = await stack.enter_async_context(opened)
        yield server, channel.stream_stream(METHOD)()


@pytest.fixture(params=["memory", "grpc"])
async def in_memory(request: pytest.FixtureRequest) -> MemoryLinks | None:
    return MemoryLinks() if request.param == "memory" else None


async def echo(requests: AsyncIterator[bytes], context: Any) -> None:  # noqa: ANN401 - either kind
    async for message in requests:
        await context.write(message)


async def test_messages_keep_their_order_and_a_half_close_ends_the_stream(in_memory: MemoryLinks | None) -> None:
    async with talking(in_memory, echo) as (_, call):
        for message in (b"a", b"b", b"c"):
            await call.write(message)
        await call.done_writing()
        assert [await call.read() for _ in range(3)] == [b"a", b"b", b"c"]
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(b"d")


async def test_an_abort_comes_behind_what_was_written(in_memory: MemoryLinks | None) -> None:
    async def refuse(_: AsyncIterator[bytes], context: Any) -> None:  # noqa: ANN401
        await context.write(b"first")
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such session")

    async with talking(in_memory, refuse) as (_, call):
        assert await call.read() == b"first"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, "no such session")
        assert call.done()


async def test_a_machine_that_dies_breaks_its_streams(in_memory: MemoryLinks | None) -> None:
    async with talking(in_memory, echo) as (server, call):
        await call.write(b"a")
        assert await call.read() == b"a"
        await server.stop(None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            await call.write(b"b")


async def test_who_cancels_ends_the_handler(in_memory: MemoryLinks | None) -> None:
    ended = asyncio.Event()

    async def watched(requests: AsyncIterator[bytes], context: Any) -> None:  # noqa: ANN401
        try:
            await echo(requests, context)
        finally:
            ended.set()

    async with talking(in_memory, watched) as (_, call):
        await call.write(b"a")
        assert await call.read() == b"a"
        assert call.cancel()
        async with asyncio.timeout(5):
            await ended.wait()
        assert call.done()


async def test_nobody_writes_more_to_who_does_not_read_than_a_window(in_memory: MemoryLinks | None) -> None:
    async with talking(in_memory, echo) as (_, call):

        async def write_on() -> None:
            for _ in range(100):
                await call.write(LARGE)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(write_on(), 0.5)


async def test_nobody_answers_at_an_address_without_a_machine() -> None:
    call = MemoryLinks().channel("127.0.0.1:1").stream_stream(METHOD)()
    with pytest.raises(grpc.aio.AioRpcError, match="failed to connect"):
        await call.read()


def test_delays_mutes_and_lost_callers_take_virtual_time() -> None:
    """By plan: a link of 100 ms, a machine that says nothing for an hour, and a caller that is cut off."""
    loop = VirtualLoop()

    async def run() -> list[float]:
        links = MemoryLinks(delay_s=0.1)
        moments = []
        async with talking(links, echo) as (server, call):
            assert isinstance(server, MemoryServer)
            began = loop.time()
            for _ in range(2):
                await call.write(b"a")
                assert await call.read() == b"a"
                moments.append(loop.time() - began)
            links.mute(server)
            await call.write(b"b")
            loop.call_later(3_600, links.mute)
            assert await call.read() == b"b"
            moments.append(loop.time() - began)
            links.lose(server, b"")
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
        return moments

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        first, second, third = runner.run(run())
    assert first == pytest.approx(0.4 + 0.2), "two round trips to connect, one for the message"
    assert second == pytest.approx(0.8)
    assert third >= 3_600
