"""The client library, blocking: the same as `client.aio`, run on an event loop in a thread of its own.

So it works in a notebook whose own loop is running.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, Unpack

from anyio.from_thread import BlockingPortal, start_blocking_portal

from client.aio import AsyncSwarm, Piece
from client.options import ConnectOptions, GenerateOptions
from client.stats import Result

T = TypeVar("T")

STOP_S = 5.0


class Swarm:
    """One model in one swarm; `with Swarm.connect(…) as swarm:`, or `close` it yourself."""

    def __init__(self, inner: AsyncSwarm, portal: BlockingPortal, stack: ExitStack) -> None:
        self._inner = inner
        self._portal = portal
        self._stack = stack

    @classmethod
    def connect(cls, model: str | Path, **options: Unpack[ConnectOptions]) -> Self:
        """Join a swarm; arguments and errors as in `AsyncSwarm.connect`."""
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal("asyncio"))
            connecting = AsyncSwarm.connect(model, **options)
            inner = stack.enter_context(portal.wrap_async_context_manager(connecting))
            return cls(inner, portal, stack.pop_all())
        raise AssertionError("unreachable")

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Iterator[Piece]:
        """Generate and yield text as it becomes certain; as `AsyncSwarm.stream`. Leaving the loop early stops it."""
        pieces = self._inner.stream(prompt, **options)
        try:
            while True:
                try:
                    yield self._wait(lambda: _next(pieces))
                except StopAsyncIteration:
                    return
        finally:
            self._portal.call(pieces.aclose)

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Result:
        """Generate and return the whole result; as `AsyncSwarm.generate`."""
        return self._wait(lambda: self._inner.generate(prompt, **options))

    def _wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run on the loop and wait; Ctrl-C here stops the work there first."""
        future = self._portal.start_task_soon(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            wait([future], timeout=STOP_S)
            raise

    def close(self) -> None:
        """Leave the swarm."""
        self._stack.close()

    def __enter__(self) -> Self:
        """Joined already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the swarm."""
        self.close()


async def _next(pieces: AsyncGenerator[Piece, None]) -> Piece:
    return await anext(pieces)
