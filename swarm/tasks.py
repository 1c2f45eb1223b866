"""An owner for background tasks: a TaskGroup that cancels them at the end and raises errors as themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Self


class TaskScope:
    """`async with TaskScope() as scope: scope.spawn(work())`.

    Leaving the block cancels what still runs and waits for it. A failing task cancels the block. An error comes
    out as itself and not wrapped in a group, so that callers catch it by its type; of several the first does.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[object, object, None], name: str | None = None) -> asyncio.Task[None]:
        """Start a task that this scope owns."""
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def __aenter__(self) -> Self:
        """Open the scope."""
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
