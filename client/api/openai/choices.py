"""Choices of one request as OpenAI writes them, whole or as a stream of chunks. Owns no field of a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import ClassVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from client.api.backend import Delta, Finished, Job
from client.api.context import FullAnswer, ModelContext, StartedAnswers, begin_all, complete_all, reasoning_tokens
from client.api.errors import ApiError, error_body
from client.api.json_text import JsonObject
from client.api.openai.fields import SamplingRequest, fingerprint, new_id, speed, usage
from client.api.sse import DONE, sse, sse_response


class ChoicesWriter(ABC):
    """Writes the answers to one request.

    Attributes:
        kinds: `object` of a whole answer, and of a chunk.
    """

    kinds: ClassVar[tuple[str, str]]

    def __init__(self, context: ModelContext, request: SamplingRequest, prefix: str) -> None:
        self.context = context
        self.request = request
        self._card = context.card
        self._id = new_id(prefix)
        self._created = int(context.settings.clock())

    async def respond(self, jobs: Sequence[Job], request: Request) -> Response:
        """Run every job and send the answers; errors as of `ApiContext.begin`."""
        if self.request.stream:
            answers = await begin_all(self.context, jobs, request)
            return sse_response(answers, self._chunks(answers), _error_frame, self.context.settings)
        return JSONResponse(self._whole(await complete_all(self.context, jobs, request)))

    def _whole(self, answers: Sequence[FullAnswer]) -> JsonObject:
        ends, thought = [one.end for one in answers], sum(one.reasoning_tokens for one in answers)
        prompts = {number: answer.prompt_tokens for number, answer in enumerate(answers)}
        choices = [self._choice(number, answer) for number, answer in enumerate(answers)]
        body = {**self._head(self.kinds[0]), "choices": choices, "usage": usage(self._sum(prompts), ends, thought)}
        return {**body, **self._speed(ends[0])}

    async def _chunks(self, answers: StartedAnswers) -> AsyncGenerator[bytes, None]:
        for number in range(len(answers.jobs)):
            for frame in self._begin(number):
                yield frame
        ends: list[Finished] = []
        thought = 0
        async with aclosing(answers.events()) as events:
            async for number, event in events:
                if isinstance(event, Delta):
                    thought += reasoning_tokens(event)
                    for frame in self._deltas(number, event):
                        yield frame
                elif isinstance(event, Finished):
                    ends.append(event)
                    yield self._end(number, event)
        if self.request.wants_usage:
            body = {"choices": [], "usage": usage(self._sum(answers.prompt_tokens), ends, thought)}
            yield sse({**self._head(self.kinds[1]), **body})
        yield DONE

    def _sum(self, prompt_tokens: Mapping[int, int]) -> int:
        """Tokens of every prompt once; the choices of one prompt stand in a row."""
        return sum(prompt_tokens[number] for number in range(0, len(prompt_tokens), self.request.choices))

    def _chunk_of(self, choice: JsonObject) -> JsonObject:
        usage_field = {"usage": None} if self.request.wants_usage else {}
        return {**self._head(self.kinds[1]), "choices": [choice], **usage_field}

    def _speed(self, end: Finished) -> JsonObject:
        return {"canopy": speed(end.result)} if self.request.canopy is not None else {}

    def _head(self, kind: str) -> JsonObject:
        tier = {"service_tier": "default"} if kind.startswith("chat.") else {}
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._card.id}
        return {**head, **tier, "system_fingerprint": fingerprint(self._card)}

    @abstractmethod
    def _begin(self, number: int) -> Iterable[bytes]: ...

    @abstractmethod
    def _deltas(self, number: int, delta: Delta) -> Iterable[bytes]: ...

    @abstractmethod
    def _end(self, number: int, end: Finished) -> bytes: ...

    @abstractmethod
    def _choice(self, number: int, answer: FullAnswer) -> JsonObject: ...


def _error_frame(error: ApiError) -> bytes:
    return sse(error_body("openai", error))
