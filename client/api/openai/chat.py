"""`POST /v1/chat/completions`: its fields, the job that they mean, and the answer, whole or as a stream of chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field

from client.api.backend import ChatJob, Delta, Finished, ModelCard
from client.api.context import ApiContext, FullAnswer, StartedAnswers, begin_all, complete_all, reasoning_tokens
from client.api.errors import ApiError, error_body, invalid, unsupported
from client.api.json_text import JsonRoute
from client.api.openai.fields import (
    ApiModel,
    Limit,
    SamplingRequest,
    Whole,
    chat_log_probs,
    fingerprint,
    for_choice,
    new_id,
    speed,
    token_limit,
    usage,
)
from client.api.request_fields import BodyKind, LeftOut
from client.api.sse import DONE, sse, sse_response
from client.dialogue.messages import (
    AnswerDelta,
    ContentDelta,
    Message,
    ReasoningDelta,
    Role,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
)

MAX_MESSAGES: Final = 4_096
MAX_TOOLS: Final = 1_024
MAX_TOP_LOG_PROBS: Final = 20
_ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
ToolName = Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class ContentPart(ApiModel):
    """A part of a message's content; what is no text is left out."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(ApiModel):
    """What an assistant called."""

    name: str
    arguments: str


class ToolCallField(ApiModel):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(ApiModel):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallField] | None = None
    tool_call_id: str | None = None


class FunctionField(ApiModel):
    """A function that may be called."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(ApiModel):
    """A tool; those that are no functions are left out."""

    type: str = Field(examples=["function"])
    function: FunctionField | None = None


class NamedFunction(ApiModel):
    """The name of a function."""

    name: str


class NamedTool(ApiModel):
    """`tool_choice` that wants one function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(ApiModel):
    """`allowed_tools.allowed_tools`."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(ApiModel):
    """`tool_choice` that wants some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class TemplateFields(ApiModel):
    """`chat_template_kwargs`, as vLLM has it: the switches by which templates turn thinking on and off."""

    model_config = ConfigDict(extra="forbid")

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ChatRequest(SamplingRequest):
    """`POST /v1/chat/completions`."""

    body = BodyKind.CHAT

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOG_PROBS)] | None = None
    tools: Annotated[list[ToolField], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateFields | None = None

    def job(self) -> ChatJob:
        """What is asked for.

        Raises:
            ApiError: a field contradicts another one, or asks for what this server does not offer.
        """
        self.check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
        options = self.generate_options(
            max_new_tokens=token_limit(self.max_completion_tokens, self.max_tokens, self.n_predict),
            log_probs=(self.top_logprobs or 0) if self.logprobs else None,
        )
        left_out = LeftOut()
        given = enumerate(self.messages)
        messages = [_message(message, f"messages[{place}]", left_out) for place, message in given]
        if self.continue_final_message and messages[-1].role != "assistant":
            raise invalid("There is no message of an assistant to go on with.", "continue_final_message")
        if self.add_generation_prompt is False and not self.continue_final_message:
            raise unsupported("add_generation_prompt", "An answer begins the assistant's turn, or goes on with it.")
        tools = tuple(_tools(self.tools or (), left_out))
        choice, reasoning = self._tool_choice(tools), self._reasoning()
        if isinstance(self.tool_choice, AllowedTools):
            allowed = {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
            tools = tuple(tool for tool in tools if tool.name in allowed)
        return ChatJob(
            messages, options, tools, choice, reasoning, self.continue_final_message, left_out=left_out.words
        )

    def _tool_choice(self, tools: Sequence[Tool]) -> ToolChoice:
        parallel = self.parallel_tool_calls is not False
        choice = self.tool_choice
        if not tools:
            if choice not in (None, "none", "auto"):
                raise invalid("'tool_choice' is only allowed when 'tools' are specified.", "tool_choice")
            return ToolChoice("none" if choice == "none" else "auto", parallel=parallel)
        known = {tool.name for tool in tools}
        if isinstance(choice, AllowedTools):
            for tool in choice.allowed_tools.tools:
                _check_known(tool.function.name, known)
            return ToolChoice(choice.allowed_tools.mode, parallel=parallel)
        if isinstance(choice, NamedTool):
            _check_known(choice.function.name, known)
            return ToolChoice("required", choice.function.name, parallel)
        return ToolChoice(choice or "auto", parallel=parallel)

    def _reasoning(self) -> bool | None:
        switches = self.chat_template_kwargs or TemplateFields()
        if (asked := switches.thinking if switches.enable_thinking is None else switches.enable_thinking) is not None:
            return asked
        return None if self.reasoning_effort is None else self.reasoning_effort not in {"none", "minimal"}


def _tools(fields: Sequence[ToolField], left_out: LeftOut) -> Iterator[Tool]:
    for place, tool in enumerate(fields):
        if tool.type != "function":
            left_out.tool(tool.type)
            continue
        if tool.function is None:
            where = f"tools[{place}].function"
            raise invalid(f"Missing required parameter: '{where}'.", where, code="missing_required_parameter")
        spec = tool.function
        yield Tool(spec.name, spec.description or "", spec.parameters or {}, bool(spec.strict))


def _check_known(name: str, known: Collection[str]) -> None:
    if name not in known:
        raise invalid(f"Tool choice '{name[:80]}' is not among 'tools'.", "tool_choice")


def _message(given: ChatMessage, place: str, left_out: LeftOut) -> Message:
    """One message.

    Raises:
        ApiError: its role wants something that is missing.
    """
    role = _ROLES[given.role]
    calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in given.tool_calls or ())
    if given.content is None and role != "assistant":
        raise invalid(f"Invalid value for '{place}.content': expected a string, got null.", f"{place}.content")
    if role == "tool" and not given.tool_call_id:
        where = f"{place}.tool_call_id"
        raise invalid(f"Missing required parameter: '{where}'.", where, code="missing_required_parameter")
    if role != "assistant" and calls:
        raise invalid("Only an assistant calls tools.", f"{place}.tool_calls")
    content = _text(given.content if given.content is not None else given.refusal or "", place, left_out)
    return Message(role, content, given.reasoning_content or "", calls, given.tool_call_id or "", given.name or "")


def _text(content: str | Sequence[ContentPart], place: str, left_out: LeftOut) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        where = f"{place}.content[{number}]"
        if part.type not in {"text", "refusal"}:
            texts.append(left_out.part(part.type))
            continue
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            missing = f"{where}.{part.type}"
            raise invalid(f"Missing required parameter: '{missing}'.", missing, code="missing_required_parameter")
        texts.append(text)
    return "".join(texts)


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
    return sse(error_body("openai", error))


@dataclass(frozen=True, slots=True)
class ChatWriter:
    context: ApiContext
    request: ChatRequest
    card: ModelCard
    id: str
    created: int

    def whole(self, answers: list[FullAnswer]) -> dict[str, Any]:
        ends = [answer.end for answer in answers]
        thought = sum(answer.reasoning_tokens for answer in answers)
        body = {
            **self._head("chat.completion"),
            "choices": [self._choice(number, answer) for number, answer in enumerate(answers)],
            "usage": usage(answers[0].prompt_tokens, ends, thought),
        }
        return {**body, "canopy": speed(ends[0].result)} if self.request.canopy is not None else body

    async def chunks(self, answers: StartedAnswers) -> AsyncGenerator[bytes, None]:
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
