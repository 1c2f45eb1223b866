"""An event loop in a thread of its own, and waits for it that Ctrl-C ends without breaking anything.

CPython raises KeyboardInterrupt between any two instructions of the main thread: also while it holds a lock that the
loop's thread needs next, or after work was begun and before anything waits for it. So Ctrl-C is kept while the main
thread waits: the work is stopped first, and only then is the interrupt raised.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import wait
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Generic, Self, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from swarm.base.tasks import HeldContext, TaskScope

T = TypeVar("T")

STOP_S = 5.0
"""How long to wait for the work to end where another signal handler raised."""


class LoopThread:
    """A running loop, until `close`."""

    def __init__(
        self, portal: BlockingPortal, loop: asyncio.AbstractEventLoop, scope: TaskScope, stack: ExitStack
    ) -> None:
        self._portal = portal
        self._loop = loop
        self._scope = scope
        self._stack = stack

    @classmethod
    def start(cls) -> Self:
        """Start the thread and its loop."""
        with ExitStack() as stack:
            with interrupts_kept():
                portal = stack.enter_context(start_blocking_portal("asyncio"))
                loop = portal.call(asyncio.get_running_loop)
                scope = stack.enter_context(portal.wrap_async_context_manager(TaskScope()))
            return cls(portal, loop, scope, stack.pop_all())
        raise AssertionError("unreachable")

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work()` on the loop and wait for it; Ctrl-C stops it first, a second one does not wait for that."""
        stoppable = _Stoppable(work)

        def stop() -> None:
            self._loop.call_soon_threadsafe(stoppable.stop)

        with interrupts_kept(stop):
            future = self._portal.start_task_soon(stoppable.run)
            try:
                return future.result()
            except BaseException:
                if not future.done():  # another signal handler raised
                    stop()
                    wait([future], timeout=STOP_S)
                raise

    def finish(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work()` on the loop to its end; Ctrl-C is raised only then, a second one at once."""
        with interrupts_kept():
            return self._portal.call(work)

    def open(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enter a context on the loop, as `run` does; `close` leaves it."""
        held: HeldContext[T] = HeldContext(self._scope)
        self._stack.callback(lambda: self._portal.call(held.close))
        return self.run(lambda: held.open(context))

    def close(self) -> None:
        """Leave what is open, the last first, and end the loop and its thread; Ctrl-C as in `finish`."""
        with interrupts_kept():
            self._stack.close()


class _Stoppable(Generic[T]):
    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._task: asyncio.Task[object] | None = None
        self._stopped = False

    async def run(self) -> T:
        """What the work returns or raises; CancelledError if it was stopped before."""
        self._task = asyncio.current_task()
        if self._stopped:
            raise asyncio.CancelledError
        return await self._work()

    def stop(self) -> None:
        """Cancel it, on its loop."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()


@contextmanager
def interrupts_kept(pressed: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let Ctrl-C call `pressed` and be raised where the block ends; the second one is raised at once.

    Only where Python's own handler is in place and in the main thread; elsewhere nothing changes.
    """
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    times = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal times
        times += 1
        if times > 1:
            signal.default_int_handler(number, frame)
        pressed()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if times:
            raise KeyboardInterrupt
