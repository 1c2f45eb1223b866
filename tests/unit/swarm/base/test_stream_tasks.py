"""A stream that somebody works on in a task is closed however the task ends, also where it never begins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from swarm.base.tasks import TaskScope, spawn_on


@pytest.fixture
async def writer() -> AsyncIterator[asyncio.StreamWriter]:
    server = await asyncio.start_server(lambda _, far: far.close(), "127.0.0.1", 0)
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        yield writer
        writer.transport.abort()


async def wait_for_ever(begun: list[bool]) -> None:
    begun.append(True)
    await asyncio.get_running_loop().create_future()


async def test_a_task_that_is_cancelled_before_it_begins_closes_its_stream(writer: asyncio.StreamWriter) -> None:
    begun: list[bool] = []
    async with TaskScope() as scope:
        spawn_on(scope, writer, wait_for_ever(begun))
    await asyncio.sleep(0)
    assert not begun
    assert writer.is_closing()


async def test_a_connection_that_comes_after_the_end_is_closed(writer: asyncio.StreamWriter) -> None:
    async with TaskScope() as scope:
        pass
    spawn_on(scope, writer, wait_for_ever([]))
    assert writer.is_closing()


async def test_work_that_ends_may_leave_its_stream_open(writer: asyncio.StreamWriter) -> None:
    async with TaskScope() as scope:
        done = asyncio.Event()

        async def work() -> None:
            done.set()

        spawn_on(scope, writer, work())
        await done.wait()
        await asyncio.sleep(0)
        assert not writer.is_closing()
