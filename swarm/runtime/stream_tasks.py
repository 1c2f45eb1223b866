"""Work on one stream in a task of a scope, so that the stream is closed however that task ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from swarm.runtime.tasks import TaskScope


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
