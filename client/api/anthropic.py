"""Anthropic's dialect: `POST /v1/messages` and the count of its tokens. Owns no template and no queue."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from client.api.backend import Begun, ChatJob, Finished
from client.api.context import ApiContext, request_id
from client.api.errors import ApiError, error_body, invalid
from client.api.json_text import JsonObject, JsonRoute, arguments_object
from client.api.openai.chat import MAX_MESSAGES, MAX_TOOLS
from client.api.openai.fields import ApiModel, RequestBody, Whole, asked_options, one_grammar, schema_grammar
from client.api.request_fields import BodyKind, LeftOut, note_left_out
from client.api.writers import AnswerWriter, send_answer
from client.dialogue.messages import Message, Tool, ToolCall, ToolCallDelta, ToolChoice

BILLING: Final = "x-anthropic-billing-header:"
"""Begins a block of the system prompt that is for Anthropic's service and no part of the prompt. It differs from
conversation to conversation, so that no two prompts with it would begin alike."""


class InputBlock(ApiModel):
    """A block of content; its type says which fields count."""

    type: str = Field(examples=["text"])
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[InputBlock] | dict[str, Any] | None = None
    title: str | None = None
    source: Any = None
    tool_name: str | None = None
    is_error: bool | None = None


Content = str | Sequence[InputBlock]


def system_text(content: Content, left_out: LeftOut) -> str:
    if isinstance(content, str):
        return content
    blocks = [block for block in content if not (block.text or "").startswith(BILLING)]
    return block_text(blocks, "system", left_out)


def block_text(content: Content, param: str, left_out: LeftOut) -> str:
    """The text of blocks, one per line; a word stands in the place of each that is no text.

    Raises:
        ApiError: a block of text has none; the message names it.
    """
    if isinstance(content, str):
        return content
    return "\n".join(_text(block, f"{param}.{place}", left_out) for place, block in enumerate(content))


def read_messages(given: Iterable[tuple[str, Content]], left_out: LeftOut) -> list[Message]:
    """The messages of turns, each a role and a content; `left_out` takes blocks that are no text.

    Turns of one speaker that follow each other are one turn. Results of tools are messages of their own and come before
    what the user says with them.

    Raises:
        ApiError: a block lacks a field; the message names it.
    """
    reader = _TurnReader(left_out)
    for place, (role, content) in enumerate(given):
        param = f"messages.{place}.content"
        match role:
            case "system":
                reader.messages.append(Message("system", block_text(content, param, left_out)))
            case "assistant":
                reader.read_assistant(content, param)
            case _:
                reader.read_user(content, param)
    return reader.messages


@dataclass(slots=True)
class _TurnReader:
    left_out: LeftOut
    messages: list[Message] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def read_user(self, content: Content, param: str) -> None:
        if not content:
            raise invalid(f"{param}: user messages must have non-empty content", "messages")
        if isinstance(content, str):
            self._say("user", content)
            return
        texts = []
        for place, block in enumerate(content):
            if block.type == "tool_result":
                self._read_result(block, f"{param}.{place}")
            else:
                texts.append(_text(block, f"{param}.{place}", self.left_out))
        if texts:
            self._say("user", "\n".join(texts))

    def read_assistant(self, content: Content, param: str) -> None:
        if isinstance(content, str):
            self._say("assistant", content)
            return
        texts, thoughts, calls = [], [], []
        for place, block in enumerate(content):
            match block.type:
                case "thinking":
                    thoughts.append(block.thinking or "")
                case "redacted_thinking":
                    pass  # nobody here can read it
                case "tool_use":
                    calls.append(self._read_call(block, f"{param}.{place}"))
                case "text":
                    texts.append(_text(block, f"{param}.{place}", self.left_out))
                case kind:  # what a server did: a placeholder here would be the model's own words
                    self.left_out.part(kind)
        turn = Message("assistant", "".join(texts), reasoning="\n".join(thoughts), tool_calls=tuple(calls))
        if self._is_last("assistant") and not self.messages[-1].tool_calls:
            last = self.messages.pop()
            turn = replace(turn, content=last.content + turn.content, reasoning=last.reasoning + turn.reasoning)
        self.messages.append(turn)

    def _read_call(self, block: InputBlock, param: str) -> ToolCall:
        call = ToolCall(
            _wanted(block.id, f"{param}.id"),
            _wanted(block.name, f"{param}.name"),
            json.dumps(block.input or {}, ensure_ascii=False),
        )
        self.names[call.id] = call.name
        return call

    def _read_result(self, block: InputBlock, param: str) -> None:
        call_id = _wanted(block.tool_use_id, f"{param}.tool_use_id")
        if call_id not in self.names:
            words = f"unexpected `tool_use_id` found in `tool_result` blocks: {call_id[:100]}"
            raise invalid(f"{param}: {words}", "messages")
        content = _parts(block.content)
        text = block_text(content, f"{param}.content", self.left_out)
        if block.is_error:
            text = f"Error: {text}"
        self.messages.append(Message("tool", text, tool_call_id=call_id, name=self.names[call_id]))

    def _say(self, role: str, text: str) -> None:
        if self._is_last(role) and not self.messages[-1].tool_calls:
            last = self.messages[-1]
            between = "\n" if role == "user" else ""
            self.messages[-1] = replace(last, content=last.content + between + text)
        else:
            self.messages.append(Message("user" if role == "user" else "assistant", text))

    def _is_last(self, role: str) -> bool:
        return bool(self.messages) and self.messages[-1].role == role


def _parts(content: str | Sequence[InputBlock] | dict[str, Any] | None) -> Content:
    """A content that is a text or blocks; an object, as results of servers have it, is none."""
    return "" if content is None or isinstance(content, dict) else content


def _text(block: InputBlock, param: str, left_out: LeftOut) -> str:
    match block.type, block.source:
        case "text", _:
            return _wanted(block.text, f"{param}.text")
        case "document", {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)}:
            return f"{block.title}\n{text}" if block.title else text
        case "search_result", source:
            text = block_text(_parts(block.content), f"{param}.content", left_out)
            return "\n".join(filter(None, (block.title, source if isinstance(source, str) else "", text)))
        case "tool_reference", _:
            return f"[The tool {block.tool_name} may be called.]"
        case kind, _:
            return left_out.part(kind)


def _wanted(value: str | None, param: str) -> str:
    if value is None:
        raise invalid(f"{param}: Field required", "messages")
    return value


MAX_STOPS: Final = 64


class InputMessage(ApiModel):
    """One turn; `system` may stand among the others."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class ToolSpec(ApiModel):
    """A tool of the client; those that Anthropic defines, or runs at its servers, are left out."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,128}$")] | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceSpec(ApiModel):
    """Whether tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingSpec(ApiModel):
    """Whether the model thinks first; a budget is not kept."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(ApiModel):
    """The form of the text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ApiModel):
    """How the answer looks; `effort` is left to the model."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class MessagesInput(RequestBody):
    """What makes the prompt: of a message, and of counting its tokens."""

    body = BodyKind.MESSAGES

    model: str
    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | list[InputBlock] | None = None
    tools: list[ToolSpec] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoiceSpec | None = None
    thinking: ThinkingSpec | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None


class MessagesRequest(MessagesInput):
    """A request for a message."""

    max_tokens: Whole = Field(ge=1)
    stream: bool = False
    stop_sequences: list[str] | None = Field(default=None, max_length=MAX_STOPS)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: Annotated[Whole, Field(ge=-1)] | None = None


def make_job(request: MessagesInput) -> ChatJob:
    """The job of a request.

    Raises:
        ApiError: a block or a choice of tools is not valid; the message names it.
    """
    left_out = LeftOut()
    messages = read_messages([(turn.role, turn.content) for turn in request.messages], left_out)
    if request.system and (system := system_text(request.system, left_out)):
        messages.insert(0, Message("system", system))
    tools, choice = _read_tools(request, left_out)
    continues = messages[-1].role == "assistant"
    if continues:
        _check_prefill(messages[-1])
    formats = {
        "output_config": None if request.output_config is None else request.output_config.format,
        "output_format": request.output_format,
    }
    grammar = one_grammar({name: None if one is None else schema_grammar(one.schema_) for name, one in formats.items()})
    options = asked_options(grammar=grammar)
    if isinstance(request, MessagesRequest):
        _check_request(request)
        options = asked_options(
            grammar=grammar,
            max_new_tokens=request.max_tokens,
            stop=tuple(request.stop_sequences) if request.stop_sequences else None,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
        )
    if request.output_config is not None and request.output_config.effort is not None:
        note_left_out("output_config.effort")
    if request.thinking is not None and request.thinking.budget_tokens is not None:
        note_left_out("thinking.budget_tokens")
    thinking = request.thinking.type if request.thinking is not None else None
    return ChatJob(
        messages=tuple(messages),
        options=options,
        tools=tools,
        tool_choice=choice,
        reasoning={"enabled": True, "disabled": False}.get(thinking or ""),
        continues=continues,
        left_out=left_out.words,
    )


def _check_request(request: MessagesRequest) -> None:
    for place, stop in enumerate(request.stop_sequences or ()):
        if not stop.strip():
            raise invalid(f"stop_sequences.{place}: each stop sequence must contain non-whitespace", "stop_sequences")


def _check_prefill(beginning: Message) -> None:
    if beginning.tool_calls:
        raise invalid("messages: `tool_use` ids were found without `tool_result` blocks immediately after", "messages")
    if beginning.content != beginning.content.rstrip():
        raise invalid("messages: final assistant content cannot end with trailing whitespace", "messages")


def _read_tools(request: MessagesInput, left_out: LeftOut) -> tuple[tuple[Tool, ...], ToolChoice]:
    tools = tuple(_tools(request.tools or (), left_out))
    choice = request.tool_choice
    if choice is None:
        return tools, ToolChoice()
    parallel = not choice.disable_parallel_tool_use
    match choice.type:
        case "auto":
            return tools, ToolChoice(parallel=parallel)
        case "none":
            return tools, ToolChoice("none")
        case "any":
            if not tools:
                raise invalid("tool_choice: any needs tools", "tool_choice")
            return tools, ToolChoice("required", parallel=parallel)
        case "tool":
            name = choice.name or ""
            if not name or name not in [tool.name for tool in tools]:
                raise invalid(f"tool_choice: tool '{name[:100]}' not found in provided tools", "tool_choice")
            return tools, ToolChoice("required", name, parallel)


def _tools(specs: Sequence[ToolSpec], left_out: LeftOut) -> Iterator[Tool]:
    for place, spec in enumerate(specs):
        if spec.type not in (None, "custom"):
            left_out.tool(spec.type)
            continue
        for named, value in (("name", spec.name), ("input_schema", spec.input_schema)):
            if value is None:
                raise invalid(f"tools.{place}.{named}: Field required", f"tools.{place}")
        yield Tool(spec.name or "", spec.description or "", spec.input_schema or {}, bool(spec.strict))


BlockKind = Literal["text", "thinking", "tool_use"]
SIGNATURE: Final = "unsigned"
"""Stands where Anthropic signs thoughts; here nobody checks it."""


@dataclass(slots=True)
class _OpenBlock:
    """The block that grows now."""

    kind: BlockKind
    start: JsonObject
    pieces: list[str] = field(default_factory=list)
    call_index: int = -1


class MessageWriter(AnswerWriter):
    def __init__(
        self, model: str, max_tokens: int, *, hides_thinking: bool = False, request_name: str | None = None
    ) -> None:
        super().__init__()
        self._id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._max_tokens = max_tokens
        self._hides_thinking = hides_thinking
        self._request_name = request_name
        self._open: _OpenBlock | None = None
        self.content: list[JsonObject] = []

    def begin(self, begun: Begun) -> Iterator[JsonObject]:
        usage = _usage(begun.prompt_tokens, 0, 0)
        yield {"type": "message_start", "message": self._message([], None, None, usage)}
        yield {"type": "ping"}

    def finish(self, finished: Finished) -> Iterator[JsonObject]:
        """The end of the last block, then `message_delta` with the reason and the usage, then `message_stop`."""
        yield from self._end_block()
        reason, stop = stop_reason(finished, self._max_tokens)
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": self._usage(finished),
        }
        yield {"type": "message_stop"}

    def whole(self, finished: Finished) -> JsonObject:
        reason, stop = stop_reason(finished, self._max_tokens)
        return self._message(self.content, reason, stop, self._usage(finished))

    def fail(self, error: ApiError) -> Iterator[JsonObject]:
        yield error_body("anthropic", error, self._request_name)

    def _write_content(self, text: str, entries: list[JsonObject]) -> Iterator[JsonObject]:
        return self._grow("text", {"type": "text", "text": ""}, text)

    def _write_reasoning(self, text: str) -> Iterator[JsonObject]:
        start = {"type": "thinking", "thinking": "", "signature": ""}
        return self._grow("thinking", start, "" if self._hides_thinking else text)

    def _usage(self, finished: Finished) -> JsonObject:
        stats = finished.result.stats
        usage = _usage(stats.prompt_tokens - stats.reused_tokens, stats.reused_tokens, stats.tokens)
        return {**usage, "output_tokens_details": {"thinking_tokens": min(self.reasoning_tokens, stats.tokens)}}

    def _message(
        self, content: list[JsonObject], reason: str | None, stop: str | None, usage: JsonObject
    ) -> JsonObject:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _grow(self, kind: Literal["text", "thinking"], start: JsonObject, text: str) -> Iterator[JsonObject]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin_block(_OpenBlock(kind, start))
        if text:
            delta = {"type": f"{kind}_delta", kind: text}
            yield self._delta(text, delta)

    def _write_call(self, part: ToolCallDelta) -> Iterator[JsonObject]:
        if self._open is None or self._open.call_index != part.index:
            start = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            yield from self._begin_block(_OpenBlock("tool_use", start, call_index=part.index))
        if part.arguments:
            yield self._delta(part.arguments, {"type": "input_json_delta", "partial_json": part.arguments})

    def _delta(self, text: str, delta: JsonObject) -> JsonObject:
        assert self._open is not None
        self._open.pieces.append(text)
        return {"type": "content_block_delta", "index": len(self.content), "delta": delta}

    def _begin_block(self, block: _OpenBlock) -> Iterator[JsonObject]:
        yield from self._end_block()
        self._open = block
        yield {"type": "content_block_start", "index": len(self.content), "content_block": block.start}

    def _end_block(self) -> Iterator[JsonObject]:
        block = self._open
        if block is None:
            return
        self._open = None
        index, text = len(self.content), "".join(block.pieces)
        if block.kind == "thinking":
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            yield {"type": "content_block_delta", "index": index, "delta": signed}
        yield {"type": "content_block_stop", "index": index}
        self.content.append(_whole_block(block, text))


def _whole_block(block: _OpenBlock, text: str) -> JsonObject:
    match block.kind:
        case "text":
            return {"type": "text", "text": text}
        case "thinking":
            return {"type": "thinking", "thinking": text, "signature": SIGNATURE}
        case "tool_use":
            return {**block.start, "input": arguments_object(text)}


def stop_reason(finished: Finished, max_tokens: int) -> tuple[str, str | None]:
    """Why the message ended, and the stop sequence that ended it."""
    if finished.stop_string:
        return "stop_sequence", finished.stop_string
    match finished.reason:
        case "tool_calls":
            return "tool_use", None
        case "length":
            is_full = finished.result.stats.tokens < max_tokens
            return ("model_context_window_exceeded" if is_full else "max_tokens"), None
        case "stop":
            return "end_turn", None


def _usage(input_tokens: int, cached_tokens: int, output_tokens: int) -> JsonObject:
    return {
        "input_tokens": input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter(tags=["Anthropic messages"], route_class=JsonRoute)

    @router.post("/v1/messages", response_model=None, summary="Create a message")
    async def create(body: MessagesRequest, request: Request) -> Response:
        asked = await context.of(body.model)
        job = make_job(body)
        hides_thinking = body.thinking is not None and body.thinking.display == "omitted"
        writer = MessageWriter(
            asked.card.id, body.max_tokens, hides_thinking=hides_thinking, request_name=request_id(request)
        )
        return await send_answer(asked, job, request, writer, stream="events" if body.stream else None)

    @router.post("/v1/messages/count_tokens", response_model=None, summary="Count tokens")
    async def count(body: MessagesInput) -> Response:
        asked = await context.of(body.model)
        tokens = await asyncio.to_thread(asked.backend.count, make_job(body))
        return JSONResponse({"input_tokens": tokens})

    return router
