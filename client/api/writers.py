"""Answers as JSON events: what the dialects' writers of one answer share, and how such an answer is sent.

A writer makes both forms: a stream sends its events, and a whole answer is what they add up to. Owns no dialect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from client.api.backend import AnswerEvent, Begun, Delta, Finished, Job
from client.api.context import ModelContext, StartedAnswer, reasoning_tokens
from client.api.errors import ApiError
from client.api.json_text import JsonObject
from client.api.sse import Frames, json_line, json_lines_response, sse, sse_response
from client.dialogue.messages import ContentDelta, ReasoningDelta, ToolCallDelta

LogProbEntries = Callable[[Delta], list[JsonObject]]
"""Log-probabilities of a delta's tokens as JSON values with the tokens' texts."""


class AnswerWriter(ABC):
    """Writes one answer in the form of a dialect.

    Attributes:
        reasoning_tokens: tokens so far that were thought and not said.
    """

    def __init__(self, entries: LogProbEntries = lambda delta: []) -> None:
        self._entries = entries
        self.reasoning_tokens = 0

    def begin(self, begun: Begun) -> Iterable[JsonObject]:
        """The events before the first token."""
        return ()

    def take(self, delta: Delta) -> Iterator[JsonObject]:
        """The events of one sweep; log-probabilities come with its first content."""
        self.reasoning_tokens += reasoning_tokens(delta)
        entries = self._entries(delta)
        for part in delta.parts:
            match part:
                case ContentDelta(text):
                    yield from self._write_content(text, entries)
                    entries = []
                case ReasoningDelta(text):
                    yield from self._write_reasoning(text)
                case ToolCallDelta():
                    yield from self._write_call(part)

    @abstractmethod
    def finish(self, finished: Finished) -> Iterator[JsonObject]:
        """The last events."""

    @abstractmethod
    def whole(self, finished: Finished) -> JsonObject:
        """The answer as one object, after `finish`."""

    @abstractmethod
    def fail(self, error: ApiError) -> Iterable[JsonObject]:
        """The events of an error in mid-stream."""

    @abstractmethod
    def _write_content(self, text: str, entries: list[JsonObject]) -> Iterable[JsonObject]: ...

    @abstractmethod
    def _write_reasoning(self, text: str) -> Iterable[JsonObject]: ...

    @abstractmethod
    def _write_call(self, part: ToolCallDelta) -> Iterable[JsonObject]: ...


async def send_answer(
    context: ModelContext, job: Job, request: Request, writer: AnswerWriter, *, stream: str | None
) -> Response:
    """Run a job and send what the writer makes of it; errors as of `ApiContext.begin`.

    Args:
        stream: `events` or `lines`; None sends the answer as one object.
    """
    if stream is None:
        end = await context.read(job, request, lambda event: _drop(writer, event))
        for _ in writer.finish(end):
            pass
        return JSONResponse(writer.whole(end))
    frame, respond = (json_line, json_lines_response) if stream == "lines" else (_typed, sse_response)
    answer = await context.begin(job, request)

    def error_frame(error: ApiError) -> bytes:
        return b"".join(map(frame, writer.fail(error)))

    return respond(answer, _frames(writer, answer, frame), error_frame, context.settings)


def _typed(event: Any) -> bytes:  # noqa: ANN401 - JSON values
    return sse(event, event["type"])


def _drop(writer: AnswerWriter, event: AnswerEvent) -> None:
    """Let the writer take an event whose frames nobody reads."""
    if isinstance(event, Delta):
        for _ in writer.take(event):
            pass


async def _frames(writer: AnswerWriter, answer: StartedAnswer, frame: Callable[[Any], bytes]) -> Frames:
    for event in writer.begin(answer.begun):
        yield frame(event)
    async for part in answer.events:
        made = writer.take(part) if isinstance(part, Delta) else ()
        for event in writer.finish(part) if isinstance(part, Finished) else made:
            yield frame(event)
