"""Requests of Ollama's API, and the jobs that they ask for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from client.api.backend import ChatJob, Job, ModelCard, TextJob
from client.api.errors import invalid, unsupported
from client.api.left_out import LeftOut
from client.api.openai.chat_request import MAX_MESSAGES, MAX_TOOLS
from client.api.openai.fields import ApiModel, RequestBody
from client.api.request_fields import BodyKind
from client.api.sampling_fields import Whole, asked_options, penalties, schema_grammar, stop_strings
from client.dialogue.messages import Message, Tool, ToolCall
from client.options import GenerateOptions, Grammar

USUAL: Final = GenerateOptions(temperature=0.8, top_k=40, top_p=0.9)
"""What Ollama takes where neither a request nor a model says."""


class RunOptions(RequestBody):
    """`options`."""

    body = BodyKind.OLLAMA_OPTIONS

    model_config = ConfigDict(strict=False)  # its clients send 20.0 for 20

    num_predict: int | None = None
    temperature: float | None = Field(default=None, ge=0)
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class RunRequest(RequestBody):
    """What chat and generate share."""

    model: str
    stream: bool | None = None
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: RunOptions | None = None
    think: bool | Literal["high", "medium", "low", "max"] | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether lines are sent as they come, which is so unless it is refused."""
        return self.stream is not False


class CallFunction(ApiModel):
    """The function of a call."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class ChatCall(ApiModel):
    """A call of an assistant's message."""

    id: str | None = None
    function: CallFunction


class ChatTurn(ApiModel):
    """A message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[ChatCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ToolFunction(ApiModel):
    """A function that may be called."""

    name: Annotated[str, Field(pattern=r"^[\w.\-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(ApiModel):
    """A tool."""

    type: str = "function"
    function: ToolFunction | None = None


class ChatRunRequest(RunRequest):
    """Of `/api/chat`; no messages ask whether the model is there."""

    body = BodyKind.OLLAMA_CHAT

    messages: list[ChatTurn] = Field(default_factory=list, max_length=MAX_MESSAGES)
    tools: list[ChatTool] | None = Field(default=None, max_length=MAX_TOOLS)


class GenerateRequest(RunRequest):
    """Of `/api/generate`; no prompt asks whether the model is there."""

    body = BodyKind.OLLAMA_GENERATE

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None


def chat_job(request: ChatRunRequest) -> ChatJob:
    """The job of a chat.

    Raises:
        ApiError: a function is missing.
    """
    left_out = LeftOut()
    tools = []
    for place, tool in enumerate(request.tools or ()):
        spec = tool.function
        if tool.type != "function":
            left_out.tool(tool.type)
        elif spec is None:
            raise invalid(f"tools[{place}].function is missing", f"tools[{place}].function")
        else:
            tools.append(Tool(spec.name, spec.description or "", spec.parameters or {}))
    messages = tuple(_messages(request.messages, left_out))
    return ChatJob(
        messages=messages,
        options=_options(request),
        tools=tuple(tools),
        reasoning=_reasoning(request),
        continues=request.messages[-1].role == "assistant",
        left_out=left_out.words,
        defaults=USUAL,
    )


def generate_job(request: GenerateRequest, card: ModelCard) -> Job:
    """The job of a prompt: a turn of the user in the model's template, or the text itself.

    A model without a template continues the text.

    Raises:
        ApiError: a field asks for what is not served.
    """
    left_out = LeftOut()
    prompt = _with_images(request.prompt, request.images, left_out)
    if request.raw:
        if request.system:
            raise invalid("raw mode does not support template, system, or context", "raw")
        return TextJob(prompt, _options(request), USUAL)
    if not card.has_template:
        if request.system:
            raise unsupported("system", f"{card.id} has no chat template, which system needs")
        return TextJob(prompt, _options(request), USUAL)
    system = [Message("system", request.system)] if request.system else []
    messages = (*system, Message("user", prompt))
    reasoning = _reasoning(request)
    return ChatJob(messages, _options(request), reasoning=reasoning, left_out=left_out.words, defaults=USUAL)


def _reasoning(request: RunRequest) -> bool | None:
    return None if request.think is None else request.think is not False


def _options(request: RunRequest) -> GenerateOptions:
    given = request.options or RunOptions()
    return asked_options(
        max_new_tokens=given.num_predict if given.num_predict and given.num_predict > 0 else None,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        seed=given.seed if given.seed is not None and given.seed >= 0 else None,
        stop=stop_strings(given.stop),
        **penalties(
            given.repeat_last_n,
            given.repeat_penalty,
            presence_penalty=given.presence_penalty,
            frequency_penalty=given.frequency_penalty,
        ),
        grammar=_grammar(request.format),
        log_probs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def _grammar(text_format: str | dict[str, Any] | None) -> Grammar | None:
    if not text_format:
        return None
    return Grammar("json") if isinstance(text_format, str) else schema_grammar(text_format)


def _messages(turns: Sequence[ChatTurn], left_out: LeftOut) -> list[Message]:
    """Messages whose calls and results are joined by ids, which old clients do not send."""
    messages: list[Message] = []
    pending: list[ToolCall] = []
    made = 0
    for turn in turns:
        content = _with_images(turn.content or "", turn.images, left_out)
        if turn.role == "tool":
            answered = _take_pending(pending, turn)
            name = turn.tool_name or answered.name
            messages.append(Message("tool", content, tool_call_id=answered.id, name=name))
            continue
        calls = []
        for call in turn.tool_calls or ():
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            calls.append(ToolCall(call.id or f"call_{made}", call.function.name, arguments))
            made += 1
        pending += calls
        messages.append(Message(turn.role, content, reasoning=turn.thinking or "", tool_calls=tuple(calls)))
    return messages


def _take_pending(pending: list[ToolCall], turn: ChatTurn) -> ToolCall:
    """The call that a result answers: by its id, else by its name, else the first that has no result yet."""
    for call in pending:
        if turn.tool_call_id == call.id or (turn.tool_call_id is None and turn.tool_name in (None, call.name)):
            pending.remove(call)
            return call
    return ToolCall(turn.tool_call_id or "", turn.tool_name or "", "")


def _with_images(text: str, images: Sequence[str] | None, left_out: LeftOut) -> str:
    """A text with a word for each image that comes with it."""
    return "\n".join(filter(None, (text, *(left_out.part("image") for _ in images or ()))))
