"""Input items of the Responses API as messages of a conversation.

A turn of the assistant comes as several items: what it thought, what it said, and its calls. They become one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from pydantic import Field

from client.api.errors import invalid, unsupported
from client.api.openai.fields import ApiModel
from client.dialogue.messages import Message, Role, ToolCall

TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_FieldValue = TypeVar("_FieldValue")


class InputPart(ApiModel):
    """A part of an item's content; only text is read."""

    type: str = Field(examples=["input_text"])
    text: str | None = None
    refusal: str | None = None


class InputItem(ApiModel):
    """A message, a function call, its output, or what the model thought; its type says which fields count."""

    id: str | None = None
    type: str = Field(default="message", examples=["message"])
    role: str | None = Field(default=None, examples=["user"])
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


@dataclass(slots=True)
class _AssistantTurn:
    """Items of one turn, until an item of somebody else ends it."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message("assistant", self.content, reasoning=self.reasoning, tool_calls=tuple(self.calls))


def read_items(items: str | Sequence[InputItem], known_names: Iterable[ToolCall] = ()) -> list[Message]:
    """The messages of an input.

    Args:
        items: of the request; a text is one message of the user.
        known_names: calls of earlier turns, whose outputs may be among the items.

    Raises:
        ApiError: an item lacks a field, or is of a kind that no text model reads; `param` names it.
    """
    if isinstance(items, str):
        return [Message("user", items)]
    reader = _ItemReader({call.id: call.name for call in known_names})
    for place, item in enumerate(items):
        reader.read(item, f"input[{place}]")
    return reader.messages()


class _ItemReader:
    """Reads one item after the other."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names
        self._turn: _AssistantTurn | None = None
        self._messages: list[Message] = []

    def messages(self) -> list[Message]:
        """All that was read."""
        self._end_turn()
        return self._messages

    def read(self, item: InputItem, param: str) -> None:
        """The next item; `param` names it in errors."""
        match item.type:
            case "message":
                self._read_message(item, param)
            case "reasoning":
                self._read_reasoning(item, param)
            case "function_call":
                self._read_call(item, param)
            case "function_call_output":
                self._read_output(item, param)
            case kind:
                raise unsupported(f"{param}.type", f"Items of type `{kind[:100]}` are not supported.")

    def _read_message(self, item: InputItem, param: str) -> None:
        text = part_text(item.content, f"{param}.content")
        if item.role == "assistant":
            turn = self._turn
            if turn is None or turn.content or turn.calls:
                turn = self._new_turn()
            turn.content = text
            return
        self._end_turn()
        self._messages.append(Message(_speaker(item.role, param), text))

    def _read_reasoning(self, item: InputItem, param: str) -> None:
        content = item.content if item.content else item.summary or ""
        text = part_text(content, f"{param}.content")
        turn = self._turn
        if turn is None or turn.content or turn.calls or turn.reasoning:
            turn = self._new_turn()
        turn.reasoning = text

    def _read_call(self, item: InputItem, param: str) -> None:
        call = ToolCall(
            _wanted(item.call_id, f"{param}.call_id"),
            _wanted(item.name, f"{param}.name"),
            _wanted(item.arguments, f"{param}.arguments"),
        )
        self._names[call.id] = call.name
        (self._turn or self._new_turn()).calls.append(call)

    def _read_output(self, item: InputItem, param: str) -> None:
        call_id = _wanted(item.call_id, f"{param}.call_id")
        if call_id not in self._names:
            raise invalid(f"No tool call found for function call output with call_id {call_id[:100]}.", param)
        text = part_text(item.output, f"{param}.output")
        self._end_turn()
        self._messages.append(Message("tool", text, tool_call_id=call_id, name=self._names[call_id]))

    def _new_turn(self) -> _AssistantTurn:
        self._end_turn()
        self._turn = _AssistantTurn()
        return self._turn

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._messages.append(self._turn.message())
        self._turn = None


def part_text(content: str | Sequence[InputPart] | None, param: str) -> str:
    """The text of a content, its parts one after the other.

    Raises:
        ApiError: a part is not text; `param` names it.
    """
    if content is None:
        raise invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(content):
        if part.type == "refusal":
            texts.append(part.refusal or "")
        elif part.type in TEXT_PARTS:
            texts.append(part.text or "")
        else:
            words = f"Content of type `{part.type[:100]}` is not supported: the model reads text only."
            raise unsupported(f"{param}[{place}].type", words)
    return "".join(texts)


def _speaker(role: str | None, param: str) -> Role:
    match role:
        case "user":
            return "user"
        case "system" | "developer":
            return "system"
        case None:
            raise invalid(f"Missing required parameter: '{param}.role'.", f"{param}.role", "missing_required_parameter")
        case _:
            words = "Supported values are: 'assistant', 'system', 'developer', and 'user'."
            raise invalid(f"Invalid value: '{role[:100]}'. {words}", f"{param}.role", "invalid_value")


def _wanted(value: _FieldValue | None, param: str) -> _FieldValue:
    if value is None:
        raise invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    return value
