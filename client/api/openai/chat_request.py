"""A chat completion's request: its fields, and the job that it means. Owns no route."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from client.api.backend import ChatJob
from client.api.errors import invalid, unsupported
from client.api.left_out import LeftOut
from client.api.openai.fields import MAX_TOKENS, ApiModel, ResponseFormat, SamplingRequest
from client.dialogue.messages import Message, Role, Tool, ToolCall, ToolChoice

MAX_MESSAGES: Final = 4_096
MAX_TOOLS: Final = 128
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


class TemplateFields(ApiModel):
    """`chat_template_kwargs`, as vLLM has it; of its switches one is known."""

    enable_thinking: bool | None = None


class ChatRequest(SamplingRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOG_PROBS)] | None = None
    tools: Annotated[list[ToolField], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateFields | None = None
    modalities: list[str] | None = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None

    def job(self) -> ChatJob:
        """What is asked for.

        Raises:
            ApiError: a field contradicts another one, or asks for what this server does not offer.
        """
        self.check()
        self._check_offers()
        options = self.generate_options()
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if limit is not None:
            options["max_new_tokens"] = limit
        if self.logprobs:
            options["log_probs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise invalid("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
        grammar = None if self.response_format is None else self.response_format.grammar()
        if grammar is not None:
            options["grammar"] = grammar
        left_out = LeftOut()
        given = enumerate(self.messages)
        messages = [_message(message, f"messages[{place}]", left_out) for place, message in given]
        if self.continue_final_message and messages[-1].role != "assistant":
            raise invalid("There is no message of an assistant to go on with.", "continue_final_message")
        tools = tuple(_tools(self.tools or (), left_out))
        choice, reasoning = self._tool_choice(tools), self._reasoning()
        return ChatJob(messages, options, tools, choice, reasoning, self.continue_final_message, left_out.words)

    def _check_offers(self) -> None:
        if self.functions is not None or self.function_call is not None:
            raise unsupported("functions" if self.functions is not None else "function_call", "Use 'tools' instead.")
        if self.audio is not None or (self.modalities is not None and self.modalities != ["text"]):
            raise unsupported("audio" if self.audio is not None else "modalities", "This server writes text alone.")
        if self.web_search_options is not None:
            raise unsupported("web_search_options", "This server searches nothing.")

    def _tool_choice(self, tools: Sequence[Tool]) -> ToolChoice:
        parallel = self.parallel_tool_calls is not False
        choice = self.tool_choice
        if not tools:
            if choice not in (None, "none", "auto"):
                raise invalid("'tool_choice' is only allowed when 'tools' are specified.", "tool_choice")
            return ToolChoice("none" if choice == "none" else "auto", parallel=parallel)
        if isinstance(choice, NamedTool):
            name = choice.function.name
            if name not in {tool.name for tool in tools}:
                raise invalid(f"Tool choice '{name[:80]}' is not among 'tools'.", "tool_choice")
            return ToolChoice("required", name, parallel)
        return ToolChoice(choice or "auto", parallel=parallel)

    def _reasoning(self) -> bool | None:
        if self.chat_template_kwargs is not None and self.chat_template_kwargs.enable_thinking is not None:
            return self.chat_template_kwargs.enable_thinking
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


def _message(given: ChatMessage, place: str, left_out: LeftOut) -> Message:
    """One message.

    Raises:
        ApiError: its role wants something that is missing.
    """
    role = _ROLES[given.role]
    calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in given.tool_calls or ())
    if given.content is None and not (role == "assistant" and (calls or given.refusal)):
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
