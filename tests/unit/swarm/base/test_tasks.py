"""Tasks end with their owner, and errors come out as themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager

import pytest

from swarm.base.tasks import HeldContext, TaskScope, relay, unending


async def forever() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise KeyError("task")


async def test_leaving_cancels_what_runs() -> None:
    async with TaskScope() as scope:
        task = scope.spawn(forever())
    assert task.cancelled()


async def beside(*others: Coroutine[object, object, None], then: Exception | None = None) -> None:
    """A scope with some tasks, whose block raises or waits."""
    async with TaskScope() as scope:
        for other in others:
            scope.spawn(other)
        if then is not None:
            raise then
        await forever()


async def test_an_error_of_the_block_comes_out_as_itself() -> None:
    with pytest.raises(ValueError, match="block"):
        await beside(forever(), then=ValueError("block"))


async def test_a_failing_task_ends_the_block_with_its_error() -> None:
    with pytest.raises(KeyError, match="task"):
        await beside(forever(), fail())


async def test_of_several_errors_the_first_comes_out() -> None:
    with pytest.raises(KeyError, match="task"):
        await beside(fail(), fail())


async def test_being_cancelled_is_not_swallowed() -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(beside(forever()), 0.01)


async def test_what_should_never_end_begins_again_and_the_same_failure_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults = iter([OSError("a"), OSError("a"), ValueError("b")])
    begun = asyncio.Event()

    async def run() -> None:
        fault = next(faults, None)
        if fault is not None:
            raise fault
        begun.set()
        await forever()

    async with TaskScope() as scope:
        scope.spawn(unending(run, "the feed", pause_s=0.0))
        await asyncio.wait_for(begun.wait(), 10)
    assert [record.getMessage() for record in caplog.records] == ["the feed failed; it is started again"] * 2


async def counting(ended: list[str], fault: Exception | None = None) -> AsyncGenerator[int, None]:
    try:
        for number in range(3):
            yield number
        if fault is not None:
            raise fault
        await forever()
    finally:
        ended.append("ended")


async def test_a_relay_hands_on_items_and_the_error() -> None:
    ended: list[str] = []
    items: list[int] = []

    async def read() -> None:
        async with TaskScope() as scope:
            async for item in relay(scope, counting(ended, KeyError("source"))):
                items.append(item)  # noqa: PERF401 - the items before the error count too

    with pytest.raises(KeyError, match="source"):
        await read()
    assert items == [0, 1, 2]
    assert ended == ["ended"]


async def test_leaving_a_relay_ends_its_source() -> None:
    ended: list[str] = []
    async with TaskScope() as scope:
        async with aclosing(relay(scope, counting(ended), ahead=1)) as items:
            async for _ in items:
                break
        assert ended == ["ended"]


@asynccontextmanager
async def context(said: list[str], fault: Exception | None = None) -> AsyncIterator[str]:
    if fault is not None:
        raise fault
    said.append("in")
    try:
        yield "value"
    finally:
        said.append("out")


async def test_a_held_context_is_open_until_it_is_closed_from_any_task() -> None:
    said: list[str] = []
    async with TaskScope() as scope:
        held: HeldContext[str] = HeldContext(scope)
        assert await held.open(context(said)) == "value"
        assert said == ["in"]
        async with asyncio.TaskGroup() as group:
            group.create_task(held.close())
        assert said == ["in", "out"]


async def test_a_context_that_cannot_be_entered_says_why_to_who_opens_it() -> None:
    async with TaskScope() as scope:
        with pytest.raises(KeyError, match="no entry"):
            await HeldContext[str](scope).open(context([], KeyError("no entry")))


async def test_a_cancelled_opening_leaves_the_context() -> None:
    said: list[str] = []

    @asynccontextmanager
    async def slow() -> AsyncIterator[str]:
        async with context(said) as value:
            await forever()
            yield value

    async with TaskScope() as scope:
        held: HeldContext[str] = HeldContext(scope)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(held.open(slow()), 0.01)
        await held.close()
        assert said == ["in", "out"]
