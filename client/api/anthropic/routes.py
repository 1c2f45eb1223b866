"""Routes of the Messages API."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from client.api.anthropic.request import MessagesInput, MessagesRequest, hides_thinking, make_job
from client.api.anthropic.writer import MessageWriter
from client.api.backend import AnswerEvent, Delta, Finished
from client.api.context import ApiContext, StartedAnswer, request_id
from client.api.errors import ApiError, error_body
from client.api.json_text import JsonRoute
from client.api.sse import Frames, sse, sse_response


def routes(context: ApiContext) -> APIRouter:
    """All routes."""
    router = APIRouter(tags=["Anthropic messages"], route_class=JsonRoute)

    @router.post("/v1/messages", response_model=None, summary="Create a message")
    async def create(body: MessagesRequest, request: Request) -> Response:
        card = await context.card(body.model)
        job = make_job(body)
        writer = MessageWriter(card.id, hides_thinking=hides_thinking(body))
        if body.stream:
            answer = await context.begin(job, request)
            frames = _frames(writer, answer, body.max_tokens)
            name = request_id(request)
            return sse_response(answer, frames, lambda error: _error_frame(error, name), context.settings)
        end = await context.read(job, request, lambda event: _take(writer, event))
        _ = list(writer.finish(end, body.max_tokens))
        return JSONResponse(writer.whole(end, body.max_tokens))

    @router.post("/v1/messages/count_tokens", response_model=None, summary="Count tokens")
    async def count(body: MessagesInput) -> Response:
        await context.card(body.model)
        tokens = await asyncio.to_thread(context.backend.count, make_job(body))
        return JSONResponse({"input_tokens": tokens})

    return router


async def _frames(writer: MessageWriter, answer: StartedAnswer, max_tokens: int) -> Frames:
    for event in writer.begin(answer.begun):
        yield sse(event, event["type"])
    async for part in answer.events:
        if isinstance(part, Delta):
            for event in writer.take(part):
                yield sse(event, event["type"])
        elif isinstance(part, Finished):
            for event in writer.finish(part, max_tokens):
                yield sse(event, event["type"])


def _take(writer: MessageWriter, event: AnswerEvent) -> None:
    if isinstance(event, Delta):
        _ = list(writer.take(event))


def _error_frame(error: ApiError, name: str | None) -> bytes:
    return sse(error_body("anthropic", error, name), "error")
