"""`POST /v1/chat/completions`, whole and as a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from client.api.backend import Delta, Finished, ModelCard
from client.api.choices import StartedAnswers, begin_all, complete_all
from client.api.context import ApiContext, FullAnswer, reasoning_tokens
from client.api.errors import ApiError, error_body
from client.api.json_text import JsonRoute
from client.api.openai.bodies import chat_log_probs, fingerprint, new_id, speed, usage
from client.api.openai.chat_request import ChatRequest
from client.api.openai.fields import for_choice
from client.api.sse import DONE, sse, sse_response
from client.dialogue.messages import AnswerDelta, ContentDelta, ReasoningDelta, ToolCallDelta


def routes(context: ApiContext) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @router.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """An answer to a conversation."""
        card = await context.card(body.model)
        job = body.job()
        jobs = [replace(job, options=for_choice(job.options, choice)) for choice in range(body.choices)]
        writer = ChatWriter(context, body, card, new_id("chatcmpl"), int(context.settings.clock()))
        if body.stream:
            answers = await begin_all(context, jobs, request)
            return sse_response(answers, writer.chunks(answers), error_frame, context.settings)
        full = await complete_all(context, jobs, request)
        return JSONResponse(writer.whole(full))

    return router


def error_frame(error: ApiError) -> bytes:
    """An error in mid-stream, as OpenAI's clients expect it."""
    return sse(error_body("openai", error))


@dataclass(frozen=True, slots=True)
class ChatWriter:
    """Writes the answers to one request."""

    context: ApiContext
    request: ChatRequest
    card: ModelCard
    id: str
    created: int

    def whole(self, answers: list[FullAnswer]) -> dict[str, Any]:
        """The body of an answer that was not streamed."""
        ends = [answer.end for answer in answers]
        thought = sum(answer.reasoning_tokens for answer in answers)
        body = {
            **self._head("chat.completion"),
            "choices": [self._choice(number, answer) for number, answer in enumerate(answers)],
            "usage": usage(answers[0].prompt_tokens, ends, thought),
        }
        return {**body, "canopy": speed(ends[0].result)} if self.request.canopy is not None else body

    async def chunks(self, answers: StartedAnswers) -> AsyncGenerator[bytes, None]:
        """The frames of a stream."""
        for number in range(len(answers.jobs)):
            yield self._chunk(number, {"role": "assistant", "content": "", "refusal": None})
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
                    yield self._chunk(number, {}, event.reason, self._speed(event))
        if self.request.wants_usage:
            body = {"choices": [], "usage": usage(answers.prompt_tokens[0], ends, thought)}
            yield sse({**self._head("chat.completion.chunk"), **body})
        yield DONE

    def _deltas(self, number: int, delta: Delta) -> list[bytes]:
        """The chunks of one sweep: one per part; log-probabilities and the trace come with the first."""
        extra: dict[str, Any] = {}
        if self.request.wants_trace:
            extra = {"canopy": {"tokens": list(delta.tokens), "sweeps": list(delta.sweeps)}}
        log_probs = chat_log_probs(delta.log_probs, self.context.backend.token_bytes) if delta.log_probs else None
        parts: list[dict[str, Any]] = [_part(part) for part in delta.parts]
        if not parts and (log_probs is not None or delta.sweeps):
            parts = [{}]
        frames = []
        for part in parts:
            frames.append(self._chunk(number, part, extra=extra, log_probs=log_probs))
            extra, log_probs = {}, None
        return frames

    def _chunk(
        self,
        number: int,
        delta: dict[str, Any],
        reason: str | None = None,
        extra: dict[str, Any] | None = None,
        log_probs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": number, "delta": delta, "logprobs": log_probs, "finish_reason": reason}
        usage_field = {"usage": None} if self.request.wants_usage else {}
        return sse({**self._head("chat.completion.chunk"), "choices": [choice], **usage_field, **(extra or {})})

    def _speed(self, end: Finished) -> dict[str, Any]:
        return {"canopy": speed(end.result)} if self.request.canopy is not None else {}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.card.id,
            "service_tier": "default",
            "system_fingerprint": fingerprint(self.card),
        }

    def _choice(self, number: int, answer: FullAnswer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None, "annotations": []}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.tool_calls
            ]
        asked = self.request.logprobs
        log_probs = chat_log_probs(answer.log_probs, self.context.backend.token_bytes) if asked else None
        return {"index": number, "message": message, "logprobs": log_probs, "finish_reason": answer.end.reason}


def _part(part: AnswerDelta) -> dict[str, Any]:
    match part:
        case ContentDelta():
            return {"content": part.text}
        case ReasoningDelta():
            return {"reasoning_content": part.text}
        case ToolCallDelta():
            call: dict[str, Any] = {"index": part.index}
            if part.id:
                call |= {"id": part.id, "type": "function"}
            function = {"name": part.name} if part.name else {}
            call["function"] = {**function, "arguments": part.arguments}
            return {"tool_calls": [call]}
