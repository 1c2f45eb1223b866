"""The client library, blocking: the same as `client.aio`, run on an event loop in a thread of its own.

So it works in a notebook whose own loop is running.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, Unpack

from anyio.from_thread import BlockingPortal, start_blocking_portal

from client.aio import AsyncSwarm
from client.chat import AsyncChat
from client.conversation import Message
from client.options import ConnectOptions, GenerateOptions
from client.session import Piece
from client.stats import Result
from swarm.errors import GenerationInterrupted

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

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Generator[Piece, None, None]:
        """Generate and yield text as it becomes certain; as `AsyncSwarm.stream`. Leaving the loop early stops it."""
        return _iterate(self._portal, self._inner.stream(prompt, **options))

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Result:
        """Generate and return the whole result; as `AsyncSwarm.generate`."""
        return _wait(self._portal, lambda: self._inner.generate(prompt, **options))

    def resume(self, interrupted: GenerationInterrupted) -> Generator[Piece, None, None]:
        """Go on where a generation was interrupted; as `AsyncSwarm.resume`."""
        return _iterate(self._portal, self._inner.resume(interrupted))

    def chat(self, system: str | None = None, **options: Unpack[GenerateOptions]) -> Chat:
        """A conversation that keeps its session between turns; as `AsyncSwarm.chat`."""
        return Chat(self._inner.chat(system, **options), self._portal)

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


class Chat:
    """A conversation; made by `Swarm.chat`. Leaving `with swarm.chat() as chat:` ends its session."""

    def __init__(self, inner: AsyncChat, portal: BlockingPortal) -> None:
        self._inner = inner
        self._portal = portal

    @property
    def history(self) -> Sequence[Message]:
        """Every message so far; as `AsyncChat.history`."""
        return self._inner.history

    @property
    def has_template(self) -> bool:
        """Whether the model brings a chat template; as `AsyncChat.has_template`."""
        return self._inner.has_template

    def stream(self, text: str, **options: Unpack[GenerateOptions]) -> Generator[Piece, None, None]:
        """Say something and yield the answer as it becomes certain; as `AsyncChat.stream`."""
        return _iterate(self._portal, self._inner.stream(text, **options))

    def say(self, text: str, **options: Unpack[GenerateOptions]) -> Result:
        """Say something and return the whole answer; as `AsyncChat.say`."""
        return _wait(self._portal, lambda: self._inner.say(text, **options))

    def clear(self) -> None:
        """Begin again: forget every message but the system's."""
        self._portal.call(self._inner.clear)

    def close(self) -> None:
        """End the session; its KV is free everywhere."""
        self._portal.call(self._inner.close)

    def __enter__(self) -> Self:
        """A session is opened by the first turn."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the session."""
        self.close()


def _iterate(portal: BlockingPortal, pieces: AsyncGenerator[Piece, None]) -> Generator[Piece, None, None]:
    try:
        while True:
            try:
                yield _wait(portal, lambda: _next(pieces))
            except StopAsyncIteration:
                return
    finally:
        portal.call(pieces.aclose)


def _wait(portal: BlockingPortal, work: Callable[[], Awaitable[T]]) -> T:
    """Run on the loop and wait; Ctrl-C here stops the work there first."""
    future = portal.start_task_soon(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        wait([future], timeout=STOP_S)
        raise


async def _next(pieces: AsyncGenerator[Piece, None]) -> Piece:
    return await anext(pieces)
