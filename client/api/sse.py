"""Streams to a client: server-sent events over `fastapi.sse`, or lines of JSON.

The run goes on at its own speed and is at most some bytes ahead of its reader, for whom it waits a bounded time in all:
a slow reader pins nothing. (One that takes nothing at all is cut by its connection.) Silence is bridged by comments. An
error is the last frame, never a silent end.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final, Protocol

from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from client.api.context import ApiSettings
from client.api.errors import ApiError, as_api_error, server_leaves
from swarm.base.errors import SwarmError
from swarm.base.tasks import TaskScope

logger = logging.getLogger(__name__)

DONE: Final = format_sse_event(data_str="[DONE]")
"""What ends a stream in OpenAI's form."""
NDJSON: Final = "application/x-ndjson"

Frames = AsyncGenerator[bytes, None]
"""A dialect's frames, encoded by `sse` or `json_line`."""
ErrorFrame = Callable[[ApiError], bytes]


class Closable(Protocol):
    """What a stream ends with: a `StartedAnswer`, or several."""

    async def close(self) -> None:
        """End the run."""


def compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def sse(data: Any, event: str | None = None) -> bytes:  # noqa: ANN401 - JSON values
    return format_sse_event(data_str=compact(data), event=event)


def json_line(data: Any) -> bytes:  # noqa: ANN401 - JSON values
    """One line of a stream of JSON values (Ollama)."""
    return compact(data).encode() + b"\n"


def sse_response(answer: Closable, frames: Frames, error_frame: ErrorFrame, settings: ApiSettings) -> StreamingResponse:
    """A stream of events.

    Args:
        answer: the run; it is closed when the stream ends, however it ends.
        frames: what the dialect makes of the answer's events; read and closed in one task.
        error_frame: the event for an error in mid-stream.
    """
    return _AnswerStream(answer, frames, error_frame, settings, EventSourceResponse.media_type)


def json_lines_response(
    answer: Closable, frames: Frames, error_frame: ErrorFrame, settings: ApiSettings
) -> StreamingResponse:
    """A stream of lines of JSON, without keep-alive; arguments as of `sse_response`."""
    return _AnswerStream(answer, frames, error_frame, settings, NDJSON)


class _AnswerStream(StreamingResponse):
    """Runs the frames in a task of its own, and the client's side beside it."""

    def __init__(
        self, answer: Closable, frames: Frames, error_frame: ErrorFrame, settings: ApiSettings, media_type: str
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(frames, media_type=media_type, headers=headers)
        self._answer = answer
        self._frames = frames
        self._error_frame = error_frame
        self._settings = settings
        self._unread = UnreadFrames(settings.max_unread_bytes, settings.stalled_s)
        self._keep_alive = KEEPALIVE_COMMENT if media_type == EventSourceResponse.media_type else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; whoever ends first, the run is closed."""
        try:
            async with TaskScope() as tasks:
                tasks.spawn(self._leave(tasks.spawn(self._produce(), "frames")), "server")
                tasks.spawn(_watch(receive), "client")
                await self._send(send)
        except _Gone:
            pass
        finally:
            await self._answer.close()

    async def _produce(self) -> None:
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    await self._unread.put(frame)
        except Exception as error:
            if not isinstance(error, ApiError | SwarmError):
                logger.error("a stream failed", exc_info=error)
            self._unread.put_last(self._error_frame(as_api_error(error)))
        finally:
            await self._answer.close()
            self._unread.end()

    async def _leave(self, produced: asyncio.Task[None]) -> None:
        """End the stream with an error when the server ends."""
        await self._settings.leaving.wait()
        if not produced.done():
            self._unread.put_last(self._error_frame(server_leaves()))
            produced.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while (frame := await self._next()) is not None:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> bytes | None:
        if not self._keep_alive:
            return await self._unread.get()
        try:
            async with asyncio.timeout(self._settings.keep_alive_s):
                return await self._unread.get()
        except TimeoutError:
            return self._keep_alive


async def _watch(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise _Gone


class _Gone(Exception):
    """The client closed its connection."""


class UnreadFrames:
    """Frames that were made and not sent yet: `[sent, made)`, bounded in bytes."""

    def __init__(self, max_bytes: int, stalled_s: float) -> None:
        self._max_bytes = max_bytes
        self._stalled_s = stalled_s
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._is_over = False
        self._changed = asyncio.Event()
        self.waited_s = 0.0

    async def put(self, frame: bytes) -> None:
        """Add a frame; where the reader is too far behind, it is waited for, but not for ever.

        Raises:
            ApiError: it was waited for too long.
        """
        clock = asyncio.get_running_loop().time
        while self._bytes and self._bytes + len(frame) > self._max_bytes:
            self._changed.clear()
            began = clock()
            try:
                async with asyncio.timeout(self._stalled_s - self.waited_s):
                    await self._changed.wait()
            except TimeoutError:
                raise ApiError(
                    408, "The stream was read too slowly; the answer is cut.", code="reader_too_slow"
                ) from None
            finally:
                self.waited_s += clock() - began
        self._add(frame)

    def put_last(self, frame: bytes) -> None:
        """Add a frame whatever the bound says."""
        self._add(frame)

    def end(self) -> None:
        self._is_over = True
        self._changed.set()

    async def get(self) -> bytes | None:
        """All that is there, at least one frame; None at the end."""
        while not self._frames:
            if self._is_over:
                return None
            self._changed.clear()
            await self._changed.wait()
        joined = b"".join(self._frames)
        self._frames.clear()
        self._bytes = 0
        self._changed.set()
        return joined

    def _add(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._bytes += len(frame)
        self._changed.set()
