"""A request of the Responses API, and the job that it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from client.api.backend import ChatJob
from client.api.errors import invalid, unsupported
from client.api.left_out import LeftOut
from client.api.openai.chat_request import MAX_MESSAGES, MAX_TOOLS
from client.api.openai.fields import ApiModel, Limit, SampledRequest
from client.api.request_fields import BodyKind, note_left_out
from client.api.responses.items import InputItem, read_items
from client.api.responses.tools import AnyToolSpec, OfferedTools, read_tools
from client.api.sampling_fields import Whole, schema_grammar, token_limit
from client.dialogue.messages import Message
from client.options import GenerateOptions, Grammar

LOG_PROBS: Final = "message.output_text.logprobs"
INCLUDABLE: Final = frozenset({LOG_PROBS, "reasoning.encrypted_content"})
"""What `include` may ask for; thoughts are never encrypted here, so asking for that adds nothing."""
MAX_METADATA: Final = 16

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


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
        request: to read.
        earlier: messages up to that response.
        left_out: takes what is no text.

    Raises:
        ApiError: there is nothing to answer, or an item is not valid.
    """
    if not request.input:
        raise invalid("Missing required parameter: 'input'.", "input", "missing_required_parameter")
    calls = [call for message in earlier for call in message.tool_calls]
    return [*earlier, *read_items(request.input, left_out, calls)]


def make_job(
    request: ResponsesInput, conversation: Sequence[Message], offered: OfferedTools, left_out: LeftOut
) -> ChatJob:
    """The job of a request.

    Args:
        request: whose fields count.
        conversation: all messages but the instructions, which come first and are not carried on.
        offered: the tools.
        left_out: what the request goes without.
    """
    instructions = [Message("system", request.instructions)] if request.instructions else []
    if request.text is not None and request.text.verbosity is not None:
        note_left_out("text.verbosity")
    if request.reasoning is not None and request.reasoning.summary is not None:
        note_left_out("reasoning.summary")
    effort = None if request.reasoning is None else request.reasoning.effort
    return ChatJob(
        messages=(*instructions, *conversation),
        options=_options(request),
        tools=offered.tools,
        tool_choice=offered.choice,
        reasoning=None if effort is None else effort not in {"none", "minimal"},
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
        raise invalid(
            "Missing required parameter: 'text.format.schema'.", "text.format.schema", "missing_required_parameter"
        )
    return schema_grammar(text_format.schema_)


def offered_tools(request: ResponsesInput, left_out: LeftOut) -> OfferedTools:
    """The tools of a request, those that its items bring among them; errors as of `read_tools`."""
    brought = [] if isinstance(request.input, str) else [spec for item in request.input for spec in item.tools or ()]
    parallel = request.parallel_tool_calls is not False
    return read_tools([*(request.tools or ()), *brought], request.tool_choice, parallel=parallel, left_out=left_out)
