"""What a conversation is made of, whatever dialect it came in: messages, tools, and the parts of an answer.

Plain values; owns no template and no parser.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for.

    Attributes:
        id: unique within a conversation; names the call in its result.
        arguments: JSON text, as the model wrote it.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of one speaker.

    Attributes:
        role: who speaks. A `developer` of some dialects is `system` here.
        reasoning: what an assistant thought before it; empty where it did not.
        tool_call_id: of a tool's result: the call that it answers.
        name: of the speaker or of the tool, where the dialect gives one.
    """

    role: Role
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: `[A-Za-z0-9_.-]{1,128}`.
        parameters: JSON schema of its arguments; an empty object takes none.
        strict: whether arguments must follow the schema, which the tail then enforces.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools may or must be called.

    Attributes:
        mode: `required` wants at least one call.
        name: with `required`: this tool and no other; empty for any.
        parallel: whether several calls may be in one answer.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str = ""
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call.

    Attributes:
        index: of the call in its answer, from 0.
        id: set in the first delta of a call, empty in later ones.
        arguments: the next characters of the JSON text.
    """

    index: int
    id: str
    name: str
    arguments: str


AnswerDelta = ContentDelta | ReasoningDelta | ToolCallDelta
