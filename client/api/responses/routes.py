"""Routes of the Responses API."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from client.api.backend import AnswerEvent, ApiCaller, ChatJob, Delta, Finished, ModelCard
from client.api.context import ApiContext, StartedAnswer
from client.api.errors import ApiError, invalid, unsupported
from client.api.json_text import JsonObject, JsonRoute
from client.api.left_out import LeftOut
from client.api.openai.bodies import chat_log_probs
from client.api.responses.items import InputItem
from client.api.responses.request import (
    ResponsesInput,
    ResponsesRequest,
    check_request,
    make_job,
    offered_tools,
    read_conversation,
)
from client.api.responses.store import ResponseStore, StoredResponse, conversation_after
from client.api.responses.tools import OfferedTools
from client.api.responses.truncation import truncated
from client.api.responses.writer import ResponseWriter, new_id
from client.api.sse import Frames, sse, sse_response
from client.dialogue.messages import Message
from client.stats import TokenLogProbs

MAX_LISTED: Final = 100


def routes(context: ApiContext) -> APIRouter:
    """All routes; what they store is theirs alone."""
    router = APIRouter(tags=["OpenAI responses"], route_class=JsonRoute)
    service = _Responses(context, ResponseStore(context.settings.clock))
    router.post("/v1/responses", response_model=None, summary="Create a response")(service.create)
    router.post("/v1/responses/input_tokens", response_model=None, summary="Count input tokens")(service.count)
    router.get("/v1/responses/{response_id}", response_model=None, summary="A stored response")(service.retrieve)
    router.delete("/v1/responses/{response_id}", response_model=None, summary="Forget a response")(service.delete)
    router.get("/v1/responses/{response_id}/input_items", response_model=None, summary="Its input")(service.list_items)
    return router


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that was read.

    Attributes:
        request: itself.
        job: that it asks for.
        conversation: its messages without instructions.
        offered: its tools.
        head: fields of its response that do not change.
    """

    request: ResponsesRequest
    job: ChatJob
    conversation: Sequence[Message]
    offered: OfferedTools
    head: JsonObject


class _Responses:
    """What the routes share."""

    def __init__(self, context: ApiContext, store: ResponseStore) -> None:
        self._context = context
        self._store = store

    async def create(self, body: ResponsesRequest, request: Request) -> Response:
        """Answer a request, whole or as a stream of typed events."""
        asked = await self._read(body, self._context.caller(request))
        writer = ResponseWriter(asked.head, self._log_prob_entries, asked.offered.declared)
        caller = self._context.caller(request)
        if body.stream:
            answer = await self._context.begin(asked.job, request)
            frames = self._frames(asked, writer, answer, caller)
            return sse_response(answer, frames, lambda error: _error_frames(writer, error), self._context.settings)
        end = await self._context.read(asked.job, request, lambda event: _take(writer, event))
        _ = list(writer.finish(end, self._context.settings.clock()))
        return JSONResponse(self._kept(asked, writer, end, caller))

    async def count(self, body: ResponsesInput, request: Request) -> Response:
        """Tokens of what a request would ask."""
        await self._context.card(body.model)
        earlier = self._earlier(body.previous_response_id, self._context.caller(request))
        left_out = LeftOut()
        offered = offered_tools(body, left_out)
        job = make_job(body, read_conversation(body, earlier, left_out), offered, left_out)
        tokens = await asyncio.to_thread(self._context.backend.count, job)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    async def retrieve(self, response_id: str, request: Request, stream: bool = False) -> Response:
        """A response of this key, whole."""
        if stream:
            raise unsupported("stream", "A stored response is not streamed again.")
        return JSONResponse(self._found(response_id, request).response)

    async def delete(self, response_id: str, request: Request) -> Response:
        """Forget a response of this key."""
        self._found(response_id, request)
        self._store.delete(self._context.caller(request).key, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def list_items(
        self,
        response_id: str,
        request: Request,
        limit: int = Query(20, ge=1, le=MAX_LISTED),
        order: str = Query("desc", pattern="^(asc|desc)$"),
        after: str | None = None,
    ) -> Response:
        """The input items of a response, the newest first."""
        items = list(self._found(response_id, request).input_items)
        if order == "desc":
            items.reverse()
        if after is not None:
            places = [place for place, item in enumerate(items) if item["id"] == after]
            items = items[places[0] + 1 :] if places else []
        shown = items[:limit]
        ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": "", "last_id": ""}
        return JSONResponse({"object": "list", "data": shown, **ends, "has_more": len(items) > len(shown)})

    async def _read(self, body: ResponsesRequest, caller: ApiCaller) -> _Asked:
        check_request(body)
        card = await self._context.card(body.model)
        left_out = LeftOut()
        offered = offered_tools(body, left_out)
        conversation = read_conversation(body, self._earlier(body.previous_response_id, caller), left_out)
        job = make_job(body, conversation, offered, left_out)
        if body.truncation == "auto":
            job = await asyncio.to_thread(truncated, job, self._context.backend.count, card.context_length)
        head = response_head(body, card, offered, self._context.settings.clock())
        return _Asked(body, job, conversation, offered, head)

    def _earlier(self, response_id: str | None, caller: ApiCaller) -> Sequence[Message]:
        if response_id is None:
            return ()
        stored = self._store.get(caller.key, response_id)
        if stored is None:
            message = f"Previous response with id '{response_id[:100]}' not found."
            raise invalid(message, "previous_response_id", "previous_response_not_found")
        return stored.conversation

    def _found(self, response_id: str, request: Request) -> StoredResponse:
        stored = self._store.get(self._context.caller(request).key, response_id)
        if stored is None:
            raise ApiError(404, f"Response with id '{response_id[:100]}' not found.", code="response_not_found")
        return stored

    async def _frames(self, asked: _Asked, writer: ResponseWriter, answer: StartedAnswer, caller: ApiCaller) -> Frames:
        for event in writer.begin(answer.begun):
            yield sse(event, event["type"])
        async for part in answer.events:
            if isinstance(part, Delta):
                for event in writer.take(part):
                    yield sse(event, event["type"])
            elif isinstance(part, Finished):
                events = list(writer.finish(part, self._context.settings.clock()))
                events[-1]["response"] = self._kept(asked, writer, part, caller)  # before the client hears of its end
                for event in events:
                    yield sse(event, event["type"])

    def _kept(self, asked: _Asked, writer: ResponseWriter, end: Finished, caller: ApiCaller) -> JsonObject:
        """The response, which is stored where that was asked for."""
        response = writer.whole(end, self._context.settings.clock())
        if asked.request.store is False:
            return response
        conversation = conversation_after(asked.conversation, writer.message())
        stored = StoredResponse(response, conversation, input_items(asked.request.input))
        return response if self._store.keep(caller.key, stored) else {**response, "store": False}

    def _log_prob_entries(self, log_probs: Sequence[TokenLogProbs]) -> list[JsonObject]:
        entries: list[JsonObject] = chat_log_probs(log_probs, self._context.backend.token_bytes)["content"]
        return entries


def _take(writer: ResponseWriter, event: AnswerEvent) -> None:
    if isinstance(event, Delta):
        _ = list(writer.take(event))


def _error_frames(writer: ResponseWriter, error: ApiError) -> bytes:
    return b"".join(sse(event, event["type"]) for event in writer.fail(error))


def response_head(request: ResponsesRequest, card: ModelCard, offered: OfferedTools, created_at: float) -> JsonObject:
    """Fields of a response that do not change: its name, and what was asked for."""
    text_format = request.text.format if request.text is not None else None
    reasoning = request.reasoning
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(created_at),
        "model": card.id,
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": offered.choice.parallel,
        "previous_response_id": request.previous_response_id,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": card.sampling.get("temperature", 1.0) if request.temperature is None else request.temperature,
        "text": {"format": _format_json(text_format), "verbosity": "medium"},
        "tool_choice": request.tool_choice or "auto",
        "tools": list(offered.echo),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": card.sampling.get("top_p", 1.0) if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }


def _format_json(text_format: Any) -> JsonObject:  # noqa: ANN401
    if text_format is None:
        return {"type": "text"}
    return dict(text_format.model_dump(by_alias=True, exclude_none=True))


def input_items(given: str | Sequence[InputItem]) -> tuple[JsonObject, ...]:
    """The input items of a request as they are listed: each with a name of its own."""
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    return tuple(_listed(item) for item in items)


def _listed(item: InputItem) -> JsonObject:
    listed = item.model_dump(exclude_none=True)
    if item.type == "message":
        kind = "output_text" if item.role == "assistant" else "input_text"
        if isinstance(item.content, str):
            listed["content"] = [{"type": kind, "text": item.content}]
        return {"id": new_id("msg"), "status": "completed", **listed}
    prefix = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}.get(item.type, "item")
    return {"id": new_id(prefix), "status": "completed", **listed}
