"""Tasks end with their owner, and errors come out as themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest

from swarm.tasks import TaskScope


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
