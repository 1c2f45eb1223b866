"""The queue: bounded, and fair between keys."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from client.api.queue import FairQueue, QueueFull, QueueLimits
from swarm.base.tasks import TaskScope


class Requests:
    """Requests of several keys, each of which runs until it is told to end."""

    def __init__(self, queue: FairQueue, scope: TaskScope) -> None:
        self.queue = queue
        self.running: list[str] = []
        self._scope = scope
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str) -> None:
        """A request of the key that is the name's first letter."""
        self._ends[name] = asyncio.Event()
        self._tasks[name] = self._scope.spawn(self._run(name))
        await settled()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settled()

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        await settled()

    async def _run(self, name: str) -> None:
        async with self.queue.turn(name[0]):
            self.running.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.running.remove(name)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def limited(running: int, waiting: int = 10, per_key: int = 10) -> QueueLimits:
    return QueueLimits(running, waiting, per_key)


async def test_keys_take_turns() -> None:
    async with TaskScope() as scope:
        requests = Requests(FairQueue(limited(1)), scope)
        for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2"):
            await requests.ask(name)
        order = []
        while requests.running:
            order += requests.running
            await requests.end(requests.running[0])
        assert order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
        assert (requests.queue.running, requests.queue.waiting) == (0, 0)


async def test_so_many_run_at_a_time() -> None:
    async with TaskScope() as scope:
        requests = Requests(FairQueue(limited(2)), scope)
        for name in ("a1", "a2", "a3"):
            await requests.ask(name)
        assert requests.running == ["a1", "a2"]
        await requests.end("a2")
        assert requests.running == ["a1", "a3"]


async def test_a_key_with_little_takes_the_place_of_one_with_much() -> None:
    async with TaskScope() as scope:
        requests = Requests(FairQueue(limited(1, waiting=4)), scope)
        refused: list[str] = []

        async def ask(name: str) -> None:
            try:
                async with requests.queue.turn(name[0]):
                    pass
            except QueueFull:
                refused.append(name)

        await requests.ask("a0")
        for name in ("a1", "a2", "a3", "a4", "b1", "b2", "b3", "c1"):
            scope.spawn(ask(name))
            await settled()
        assert refused == ["a4", "a3", "b3", "a2"]
        assert (requests.queue.waiting, requests.queue.refused) == (4, 4)
        await requests.end("a0")
        assert refused == ["a4", "a3", "b3", "a2"]
        assert (requests.queue.running, requests.queue.waiting) == (0, 0)


async def test_who_leaves_after_its_place_was_taken_gives_no_turn() -> None:
    async with TaskScope() as scope:
        requests = Requests(FairQueue(limited(1, waiting=2)), scope)
        queue = requests.queue

        async def ask(key: str) -> None:
            with contextlib.suppress(QueueFull):
                async with queue.turn(key):
                    pass

        await requests.ask("a0")
        first, newest = scope.spawn(ask("a")), scope.spawn(ask("a"))
        await asyncio.sleep(0)
        other = scope.spawn(ask("b"))
        await asyncio.sleep(0)
        newest.cancel()  # its place is taken already, and it does not know yet
        await settled()
        assert (queue.running, queue.waiting, first.done(), other.done()) == (1, 2, False, False)


@pytest.mark.parametrize(
    ("limits", "asked", "words"),
    [
        (limited(1, waiting=2), ("a1", "b1", "c1"), "2 requests wait already"),
        (limited(1, per_key=1), ("a1", "a2"), "1 requests of yours wait already"),
    ],
    ids=["of all", "of one key"],
)
async def test_more_than_may_wait_are_refused(limits: QueueLimits, asked: tuple[str, ...], words: str) -> None:
    async with TaskScope() as scope:
        requests = Requests(FairQueue(limits, clock=lambda: 0.0), scope)
        for name in asked:
            await requests.ask(name)
        async with AsyncExitStack() as stack:
            with pytest.raises(QueueFull, match=words) as caught:
                await stack.enter_async_context(requests.queue.turn(asked[-1][0]))
        assert 0 < caught.value.retry_after_s <= 60
        assert requests.queue.refused == 1
        assert requests.queue.waiting == len(asked) - 1


async def leave_waiting(requests: Requests) -> None:
    await requests.leave("a2")


async def leave_running(requests: Requests) -> None:
    await requests.leave("a1")


async def leave_both_at_once(requests: Requests) -> None:
    requests._ends["a1"].set()
    await requests.leave("a2")


@pytest.mark.parametrize("leave", [leave_waiting, leave_running, leave_both_at_once])
async def test_who_leaves_gives_its_place(leave: Callable[[Requests], object]) -> None:
    async with TaskScope() as scope:
        requests = Requests(FairQueue(limited(1)), scope)
        for name in ("a1", "a2", "b1"):
            await requests.ask(name)
        await leave(requests)  # type: ignore[misc]
        while requests.running:
            await requests.end(requests.running[0])
        assert (requests.queue.running, requests.queue.waiting) == (0, 0)
