"""Owners of background work: a task group that raises bare errors, work on streams, relayed generators, contexts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

logger = logging.getLogger(__name__)


T = TypeVar("T")


class TaskScope:
    """`async with TaskScope() as scope: scope.spawn(work())`.

    Leaving the block cancels what still runs and waits for it. A failing task cancels the block. An error comes
    out as itself and not wrapped in a group, so that callers catch it by its type; of several the first does.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[object, object, None], name: str | None = None) -> asyncio.Task[None]:
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel and await every task; raise the first error bare."""
        for task in list(self._tasks):
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as group:
            first = group.exceptions[0]
            if first is not error:
                raise first from first.__cause__


async def unending(run: Callable[[], Awaitable[None]], name: str, pause_s: float = 5.0) -> None:
    """Run what should never end, and again after a pause where it fails; the same failure is logged once."""
    last = ""
    while True:
        try:
            await run()
        except Exception as error:
            if repr(error) != last:
                logger.warning("%s failed; it is started again", name, exc_info=error)
            last = repr(error)
        await asyncio.sleep(pause_s)


async def relay(scope: TaskScope, source: AsyncGenerator[T, None], ahead: int = 256) -> AsyncGenerator[T, None]:
    """The items and the error of `source`, which runs in a task of its own.

    So the reader may live in any task, or in several one after another. Leaving the loop ends the source first.

    Args:
        source: what is iterated; it is closed at the end.
        ahead: items that may wait for the reader before the source is paused.
    """
    items: asyncio.Queue[T | _End] = asyncio.Queue(ahead)

    async def run() -> None:
        error: Exception | None = None
        try:
            async with aclosing(source):
                async for item in source:
                    await items.put(item)
        except Exception as caught:  # noqa: BLE001 - raised again where the reader is
            error = caught
        await items.put(_End(error))

    task = scope.spawn(run())
    try:
        while not isinstance(item := await items.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        task.cancel()
        await asyncio.wait([task])


@dataclass(frozen=True, slots=True)
class _End:
    """The last item: the source is exhausted, or failed with `error`."""

    error: Exception | None


class HeldContext(Generic[T]):
    """An async context that is open in a task of its own, so that any task may use and close it."""

    def __init__(self, scope: TaskScope) -> None:
        self._scope = scope
        self._leave = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enter the context; if the caller is cancelled meanwhile, it is left again."""
        entered: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._task = self._scope.spawn(self._hold(context, entered))
        try:
            return await entered
        except BaseException:
            self._task.cancel()
            raise

    async def close(self) -> None:
        self._leave.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _hold(self, context: AbstractAsyncContextManager[T], entered: asyncio.Future[T]) -> None:
        try:
            async with context as value:
                if not entered.done():
                    entered.set_result(value)
                await self._leave.wait()
        except Exception as error:
            if entered.done():
                logger.debug("a held context ended with an error", exc_info=error)
            else:
                entered.set_exception(error)


def spawn_on(scope: TaskScope, writer: asyncio.StreamWriter, work: Coroutine[object, object, None]) -> None:
    """Start the work on a stream; made for what a server's callback gets, so it never raises.

    A task that is cancelled before its first step runs no `finally` of its own, and a scope that has ended takes no
    task at all: in both cases nobody else would close the stream.

    Args:
        scope: owns the task; where it has ended, the work is dropped.
        writer: of the stream; closed at once where the work is dropped, is cancelled or fails.
        work: on the stream; whether the stream stays open after it is its own affair.
    """
    try:
        task = scope.spawn(work)
    except RuntimeError:  # the connection came as the scope ended
        work.close()
        writer.transport.abort()
        return

    def ended(task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            writer.transport.abort()

    task.add_done_callback(ended)
