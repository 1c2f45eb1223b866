"""A request of the Messages API, and the job that it asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from client.api.anthropic.blocks import InputBlock, read_messages, system_text
from client.api.backend import ChatJob
from client.api.errors import invalid
from client.api.left_out import LeftOut
from client.api.openai.chat_request import MAX_MESSAGES, MAX_TOOLS
from client.api.openai.fields import ApiModel, RequestBody
from client.api.request_fields import BodyKind, note_left_out
from client.api.sampling_fields import Whole, asked_options, one_grammar, schema_grammar
from client.dialogue.messages import Message, Tool, ToolChoice

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


def hides_thinking(request: MessagesRequest) -> bool:
    """Whether thoughts come without their text."""
    return request.thinking is not None and request.thinking.display == "omitted"


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
        for field, value in (("name", spec.name), ("input_schema", spec.input_schema)):
            if value is None:
                raise invalid(f"tools.{place}.{field}: Field required", f"tools.{place}")
        yield Tool(spec.name or "", spec.description or "", spec.input_schema or {}, bool(spec.strict))
