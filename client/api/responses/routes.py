"""The Responses API: its requests, what is stored of its answers, and its routes. Owns no item and no event."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from client.api.backend import ApiCaller, ChatJob, Delta, Job, ModelCard
from client.api.context import ApiContext, ModelContext
from client.api.errors import ApiError, invalid, missing, unsupported
from client.api.json_text import JsonObject, JsonRoute
from client.api.openai.chat import MAX_MESSAGES, MAX_TOOLS
from client.api.openai.fields import (
    ApiModel,
    Effort,
    Limit,
    SampledRequest,
    Whole,
    log_prob_entries,
    schema_grammar,
    thinks,
    token_limit,
)
from client.api.request_fields import BodyKind, LeftOut, note_left_out
from client.api.responses.items import InputItem, read_items
from client.api.responses.tools import AnyToolSpec, OfferedTools, read_tools
from client.api.responses.writer import ResponseWriter, new_id
from client.api.writers import send_answer
from client.base.options import GenerateOptions, Grammar
from client.dialogue.messages import Message

LOG_PROBS: Final = "message.output_text.logprobs"
INCLUDABLE: Final = frozenset({LOG_PROBS, "reasoning.encrypted_content"})
"""What `include` may ask for; thoughts are never encrypted here, so asking for that adds nothing."""
MAX_METADATA: Final = 16


class TextFormat(ApiModel):
    """The form of the text: `text`, `json_object` or `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(ApiModel):
    """How the text is written."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningSettings(ApiModel):
    """How the model thinks; effort `none` or `minimal` turns it off, any other turns it on."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesInput(SampledRequest):
    """What makes the prompt: of a response, and of counting its tokens."""

    body = BodyKind.RESPONSES

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(max_length=MAX_MESSAGES)] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[AnyToolSpec] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    truncation: Literal["auto", "disabled"] | None = None


class ResponsesRequest(ResponsesInput):
    """A request for a response."""

    stream: bool | None = None
    store: bool | None = None
    include: list[str] | None = None
    max_output_tokens: Limit | None = None
    metadata: dict[str, str] | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    user: str | None = None


def check_request(request: ResponsesRequest) -> None:
    """Refuse what would be passed over otherwise, with another answer than was asked for.

    Raises:
        ApiError: a field asks for what is not served; `param` names it.
    """
    for place, name in enumerate(request.include or ()):
        if name not in INCLUDABLE:
            raise unsupported(f"include[{place}]", f"`{name[:100]}` is not supported.")
    if len(request.metadata or ()) > MAX_METADATA:
        raise invalid(f"Metadata has more than {MAX_METADATA} entries.", "metadata")
    for key, value in (request.metadata or {}).items():
        if len(key) > 64 or len(value) > 512:
            raise invalid("Metadata keys have at most 64 characters, values at most 512.", "metadata")


def read_conversation(request: ResponsesInput, earlier: Sequence[Message], left_out: LeftOut) -> list[Message]:
    """The messages of a request after those of an earlier response, without the instructions.

    Args:
        earlier: messages up to that response.
        left_out: takes what is no text.

    Raises:
        ApiError: there is nothing to answer, or an item is not valid.
    """
    if not request.input:
        raise missing("input")
    calls = [call for message in earlier for call in message.tool_calls]
    return [*earlier, *read_items(request.input, left_out, calls)]


def make_job(
    request: ResponsesInput, conversation: Sequence[Message], offered: OfferedTools, left_out: LeftOut
) -> ChatJob:
    """The job of a request.

    Args:
        conversation: all messages but the instructions, which come first and are not carried on.
        left_out: what the request goes without.
    """
    instructions = [Message("system", request.instructions)] if request.instructions else []
    if request.text is not None and request.text.verbosity is not None:
        note_left_out("text.verbosity")
    if request.reasoning is not None and request.reasoning.summary is not None:
        note_left_out("reasoning.summary")
    return ChatJob(
        messages=(*instructions, *conversation),
        options=_options(request),
        tools=offered.tools,
        tool_choice=offered.choice,
        reasoning=None if request.reasoning is None else thinks(request.reasoning.effort),
        left_out=left_out.words,
    )


def log_probs(request: ResponsesRequest) -> int | None:
    """How many likeliest tokens each token comes with; None for no log-probabilities."""
    is_asked = request.top_logprobs is not None or LOG_PROBS in (request.include or ())
    return request.top_logprobs or 0 if is_asked else None


def _options(request: ResponsesInput) -> GenerateOptions:
    grammar = _grammar(request.text.format if request.text is not None else None)
    if not isinstance(request, ResponsesRequest):
        return request.asked(grammar=grammar)
    limit = token_limit(request.max_output_tokens)
    return request.asked(grammar=grammar, max_new_tokens=limit, log_probs=log_probs(request))


def _grammar(text_format: TextFormat | None) -> Grammar | None:
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return Grammar("json")
    if text_format.schema_ is None:
        raise missing("text.format.schema")
    return schema_grammar(text_format.schema_)


def offered_tools(request: ResponsesInput, left_out: LeftOut) -> OfferedTools:
    """The tools of a request, those that its items bring among them; errors as of `read_tools`."""
    brought = [] if isinstance(request.input, str) else [spec for item in request.input for spec in item.tools or ()]
    parallel = request.parallel_tool_calls is not False
    return read_tools([*(request.tools or ()), *brought], request.tool_choice, parallel=parallel, left_out=left_out)


def truncated(job: ChatJob, count: Callable[[Job], int], context_length: int) -> ChatJob:
    """The job without as few of the oldest turns as make its prompt leave room for an answer.

    System messages stay. A turn goes whole, from a message of the user to the next, so that no output of a tool stands
    without its call. The last turn always stays; where it alone does not fit, the job is too long and is refused when
    it runs.

    Args:
        job: that may be too long.
        count: tokens of a job's prompt; it is asked some times, as many as the number of turns has binary digits.
        context_length: tokens of prompt and answer together.
    """
    messages = list(job.messages)
    starts = [place for place, message in enumerate(messages) if message.role == "user"]
    if not starts or count(job) < context_length:
        return job

    def without(turns: int) -> ChatJob:
        since = starts[turns]
        kept = [message for place, message in enumerate(messages) if message.role == "system" or place >= since]
        return replace(job, messages=tuple(kept))

    turns = range(len(starts))
    fits = bisect_left(turns, True, key=lambda number: count(without(number)) < context_length)
    return without(min(fits, len(starts) - 1))


MAX_RESPONSES: Final = 4_096
MAX_BYTES: Final = 128 * 2**20
MAX_RESPONSE_BYTES: Final = 8 * 2**20
"""Of one; a longer one is not kept, and says so by `store: false`."""
MAX_AGE_S: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and what a later request goes on with.

    Attributes:
        response: its object, as JSON values.
        conversation: all messages up to its answer, without instructions.
        input_items: of its own request, as JSON values with ids.
    """

    response: dict[str, Any]
    conversation: tuple[Message, ...]
    input_items: tuple[dict[str, Any], ...]

    @property
    def id(self) -> str:
        return str(self.response["id"])

    def measure(self) -> int:
        """Bytes that it takes, about. Messages that it shares with other responses count in each."""
        texts = sum(_message_bytes(message) for message in self.conversation)
        return texts + len(json.dumps([self.response, self.input_items]))


def _message_bytes(message: Message) -> int:
    calls = sum(len(call.arguments) + len(call.name) + len(call.id) for call in message.tool_calls)
    return 200 + 4 * (len(message.content) + len(message.reasoning) + calls)


@dataclass(slots=True)
class _StoredEntry:
    stored: StoredResponse
    size_bytes: int
    at_s: float


@dataclass(slots=True)
class _Shelf:
    """What one key holds, oldest first."""

    entries: OrderedDict[str, _StoredEntry] = field(default_factory=OrderedDict)
    size_bytes: int = 0


class ResponseStore:
    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        max_age_s: float = MAX_AGE_S,
    ) -> None:
        self._clock = clock
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_response_bytes = min(max_response_bytes, max_bytes)
        self._max_age_s = max_age_s
        self._shelves: dict[str, _Shelf] = {}

    def keep(self, key: str, stored: StoredResponse) -> bool:
        """Keep a response for its key; False where it is too large."""
        size_bytes = stored.measure()
        if size_bytes > self._max_response_bytes:
            return False
        self.delete(key, stored.id)
        shelf = self._shelves.setdefault(key, _Shelf())
        shelf.entries[stored.id] = _StoredEntry(stored, size_bytes, self._clock())
        shelf.size_bytes += size_bytes
        while self.count > self._max_responses or self.size_bytes > self._max_bytes:
            self._drop_one()
        return True

    def get(self, key: str, response_id: str) -> StoredResponse | None:
        """The key's response of this name; None where it has none."""
        self._forget_old()
        shelf = self._shelves.get(key)
        kept = None if shelf is None else shelf.entries.get(response_id)
        return None if kept is None else kept.stored

    def delete(self, key: str, response_id: str) -> bool:
        """Forget the key's response of this name; False where it has none."""
        if self.get(key, response_id) is None:
            return False
        self._remove(key, response_id)
        return True

    @property
    def count(self) -> int:
        return sum(len(shelf.entries) for shelf in self._shelves.values())

    @property
    def size_bytes(self) -> int:
        return sum(shelf.size_bytes for shelf in self._shelves.values())

    def _drop_one(self) -> None:
        by_count = self.count > self._max_responses
        key, shelf = max(
            self._shelves.items(), key=lambda item: len(item[1].entries) if by_count else item[1].size_bytes
        )
        self._remove(key, next(iter(shelf.entries)))

    def _forget_old(self) -> None:
        since_s = self._clock() - self._max_age_s
        for key, shelf in list(self._shelves.items()):
            while shelf.entries and next(iter(shelf.entries.values())).at_s < since_s:
                self._remove(key, next(iter(shelf.entries)))

    def _remove(self, key: str, response_id: str) -> None:
        shelf = self._shelves[key]
        shelf.size_bytes -= shelf.entries.pop(response_id).size_bytes
        if not shelf.entries:
            del self._shelves[key]


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
    context: ModelContext
    request: ResponsesRequest
    job: ChatJob
    conversation: Sequence[Message]
    offered: OfferedTools
    head: JsonObject

    def log_prob_entries(self, delta: Delta) -> list[JsonObject]:
        return log_prob_entries(delta.log_probs, self.context.backend.token_bytes)


class _Responses:
    def __init__(self, context: ApiContext, store: ResponseStore) -> None:
        self._context = context
        self._store = store

    async def create(self, body: ResponsesRequest, request: Request) -> Response:
        """Answer a request, whole or as a stream of typed events."""
        asked = await self._read(body, self._context.caller(request))
        keep = partial(self._kept, asked, self._context.caller(request))
        declared, clock = asked.offered.declared, self._context.settings.clock
        writer = ResponseWriter(asked.head, asked.log_prob_entries, declared, clock, keep)
        stream = "events" if body.stream else None
        return await send_answer(asked.context, asked.job, request, writer, stream=stream)

    async def count(self, body: ResponsesInput, request: Request) -> Response:
        """Tokens of what a request would ask."""
        asked = await self._context.of(body.model)
        earlier = self._earlier(body.previous_response_id, self._context.caller(request))
        left_out = LeftOut()
        offered = offered_tools(body, left_out)
        job = make_job(body, read_conversation(body, earlier, left_out), offered, left_out)
        tokens = await asyncio.to_thread(asked.backend.count, job)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

    async def retrieve(self, response_id: str, request: Request, stream: bool = False) -> Response:
        if stream:
            raise unsupported("stream", "A stored response is not streamed again.")
        return JSONResponse(self._found(response_id, request).response)

    async def delete(self, response_id: str, request: Request) -> Response:
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
        context = await self._context.of(body.model)
        left_out = LeftOut()
        offered = offered_tools(body, left_out)
        conversation = read_conversation(body, self._earlier(body.previous_response_id, caller), left_out)
        job = make_job(body, conversation, offered, left_out)
        if body.truncation == "auto":
            job = await asyncio.to_thread(truncated, job, context.backend.count, context.card.context_length)
        head = response_head(body, context.card, offered, self._context.settings.clock())
        return _Asked(context, body, job, conversation, offered, head)

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

    def _kept(self, asked: _Asked, caller: ApiCaller, response: JsonObject, answer: Message) -> JsonObject:
        """The response, which is stored where that was asked for."""
        if asked.request.store is False:
            return response
        stored = StoredResponse(response, (*asked.conversation, answer), input_items(asked.request.input))
        return response if self._store.keep(caller.key, stored) else {**response, "store": False}


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
