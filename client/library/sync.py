"""The client library, blocking: the same as `client.library.aio`, run on an event loop in a thread of its own.

So it works in a notebook whose own loop is running.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from client.base.options import ConnectOptions, GenerateOptions
from client.base.stats import Result, Stats
from client.dialogue.messages import Message
from client.library.aio import AsyncSwarm
from client.library.chat import AsyncChat
from client.library.loop_thread import LoopThread
from client.library.session import Piece
from swarm.base.errors import GenerationInterrupted


class Swarm:
    """One model in one swarm; `with Swarm.connect(…) as swarm:`, or `close` it yourself."""

    def __init__(self, inner: AsyncSwarm, loop: LoopThread) -> None:
        self._inner = inner
        self._loop = loop

    @classmethod
    def connect(cls, model: str | Path, **options: Unpack[ConnectOptions]) -> Self:
        """Join a swarm; arguments and errors as in `AsyncSwarm.connect`."""
        loop = LoopThread.start()
        try:
            return cls(loop.open(AsyncSwarm.connect(model, **options)), loop)
        except BaseException:
            loop.close()
            raise

    @property
    def draft_notes(self) -> tuple[str, ...]:
        """As `AsyncSwarm.draft_notes`."""
        return self._inner.draft_notes

    @property
    def defaults(self) -> GenerateOptions:
        """As `AsyncSwarm.defaults`."""
        return self._inner.defaults

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Generator[Piece, None, None]:
        """Generate and yield text as it becomes certain; as `AsyncSwarm.stream`. Leaving the loop early stops it."""
        return _iterate(self._loop, self._inner.stream(prompt, **options))

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Result:
        """Generate and return the whole result; as `AsyncSwarm.generate`."""
        return self._loop.run(lambda: self._inner.generate(prompt, **options))

    def resume(self, interrupted: GenerationInterrupted) -> Generator[Piece, None, None]:
        """Go on where a generation was interrupted; as `AsyncSwarm.resume`."""
        return _iterate(self._loop, self._inner.resume(interrupted))

    def chat(self, system: str | None = None, **options: Unpack[GenerateOptions]) -> Chat:
        """A conversation that keeps its session between turns; as `AsyncSwarm.chat`."""
        return Chat(self._inner.chat(system, **options), self._loop)

    def close(self) -> None:
        """Leave the swarm."""
        self._loop.close()

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

    def __init__(self, inner: AsyncChat, loop: LoopThread) -> None:
        self._inner = inner
        self._loop = loop

    @property
    def history(self) -> Sequence[Message]:
        """Every message so far; as `AsyncChat.history`."""
        return self._inner.history

    @property
    def stats(self) -> Stats | None:
        """Of the last answer; as `AsyncChat.stats`."""
        return self._inner.stats

    @property
    def has_template(self) -> bool:
        """Whether the model brings a chat template; as `AsyncChat.has_template`."""
        return self._inner.has_template

    def stream(self, text: str, **options: Unpack[GenerateOptions]) -> Generator[Piece, None, None]:
        """Say something and yield the answer as it becomes certain; as `AsyncChat.stream`."""
        return _iterate(self._loop, self._inner.stream(text, **options))

    def say(self, text: str, **options: Unpack[GenerateOptions]) -> Result:
        """Say something and return the whole answer; as `AsyncChat.say`."""
        return self._loop.run(lambda: self._inner.say(text, **options))

    def clear(self) -> None:
        """Begin again: forget every message but the system's."""
        self._loop.finish(self._inner.clear)

    def close(self) -> None:
        """End the session; its KV is free everywhere."""
        self._loop.finish(self._inner.close)

    def __enter__(self) -> Self:
        """A session is opened by the first turn."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the session."""
        self.close()


def _iterate(loop: LoopThread, pieces: AsyncGenerator[Piece, None]) -> Generator[Piece, None, None]:
    try:
        while (piece := loop.run(lambda: anext(pieces, None))) is not None:
            yield piece
    finally:
        loop.finish(pieces.aclose)
