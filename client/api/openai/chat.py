"""`POST /v1/chat/completions`: its fields, the job that they mean, and the answer, whole or as a stream of chunks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from client.api.backend import ChatJob, Delta, Finished
from client.api.context import ApiContext, FullAnswer, ModelContext
from client.api.errors import invalid, missing, unsupported
from client.api.json_text import JsonObject, JsonRoute
from client.api.openai.choices import ChoicesWriter
from client.api.openai.fields import (
    ApiModel,
    Effort,
    Limit,
    SamplingRequest,
    Whole,
    for_choice,
    log_prob_entries,
    thinks,
    token_limit,
)
from client.api.request_fields import BodyKind, LeftOut
from client.api.sse import sse
from client.base.stats import TokenLogProbs
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
    reasoning_effort: Effort | None = None
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
        return thinks(self.reasoning_effort)


def _tools(fields: Sequence[ToolField], left_out: LeftOut) -> Iterator[Tool]:
    for place, tool in enumerate(fields):
        if tool.type != "function":
            left_out.tool(tool.type)
            continue
        if tool.function is None:
            raise missing(f"tools[{place}].function")
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
        raise missing(f"{place}.tool_call_id")
    if role != "assistant" and calls:
        raise invalid("Only an assistant calls tools.", f"{place}.tool_calls")
    content = _text(given.content if given.content is not None else given.refusal or "", place, left_out)
    return Message(role, content, given.reasoning_content or "", calls, given.tool_call_id or "", given.name or "")


def _text(content: str | Sequence[ContentPart], place: str, left_out: LeftOut) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        if part.type not in {"text", "refusal"}:
            texts.append(left_out.part(part.type))
            continue
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise missing(f"{place}.content[{number}].{part.type}")
        texts.append(text)
    return "".join(texts)


def routes(context: ApiContext) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

    @router.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """An answer to a conversation."""
        asked = await context.of(body.model)
        job = body.job()
        jobs = [replace(job, options=for_choice(job.options, choice)) for choice in range(body.choices)]
        return await ChatWriter(asked, body, "chatcmpl").respond(jobs, request)

    return router


class ChatWriter(ChoicesWriter):
    kinds = ("chat.completion", "chat.completion.chunk")

    def __init__(self, context: ModelContext, request: ChatRequest, prefix: str) -> None:
        super().__init__(context, request, prefix)
        self._asks_log_probs = request.logprobs

    def _begin(self, number: int) -> Iterator[bytes]:
        yield self._chunk(number, {"role": "assistant", "content": "", "refusal": None})

    def _deltas(self, number: int, delta: Delta) -> Iterator[bytes]:
        """The chunks of one sweep: one per part; log-probabilities and the trace come with the first."""
        extra: JsonObject = {}
        if self.request.wants_trace:
            extra = {"canopy": {"tokens": list(delta.tokens), "sweeps": list(delta.sweeps)}}
        log_probs = self._log_probs(delta.log_probs) if delta.log_probs else None
        parts = [_part(part) for part in delta.parts]
        if not parts and (log_probs is not None or delta.sweeps):
            parts = [{}]
        for part in parts:
            yield self._chunk(number, part, log_probs=log_probs, extra=extra)
            extra, log_probs = {}, None

    def _end(self, number: int, end: Finished) -> bytes:
        return self._chunk(number, {}, end.reason, extra=self._speed(end))

    def _chunk(
        self,
        number: int,
        delta: JsonObject,
        reason: str | None = None,
        log_probs: JsonObject | None = None,
        extra: JsonObject | None = None,
    ) -> bytes:
        choice = {"index": number, "delta": delta, "logprobs": log_probs, "finish_reason": reason}
        return sse({**self._chunk_of(choice), **(extra or {})})

    def _choice(self, number: int, answer: FullAnswer) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": answer.content, "refusal": None, "annotations": []}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.tool_calls
            ]
        log_probs = self._log_probs(answer.log_probs) if self._asks_log_probs else None
        return {"index": number, "message": message, "logprobs": log_probs, "finish_reason": answer.end.reason}

    def _log_probs(self, log_probs: Sequence[TokenLogProbs]) -> JsonObject:
        return {"content": log_prob_entries(log_probs, self.context.backend.token_bytes), "refusal": None}


def _part(part: AnswerDelta) -> JsonObject:
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
