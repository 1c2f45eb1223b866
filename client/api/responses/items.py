"""Input items of the Responses API as messages of a conversation.

A turn of the assistant comes as several items: what it thought, what it said, and its calls. They become one message.
Calls of tools that this server does not offer, from a conversation that began elsewhere, are calls with their name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeVar

from pydantic import ConfigDict, Field

from client.api.errors import invalid, missing, unsupported
from client.api.openai.chat import MAX_TOOLS
from client.api.openai.fields import ApiModel
from client.api.request_fields import LeftOut
from client.api.responses.tools import AnyToolSpec, custom_call, model_name
from client.dialogue.messages import Message, Role, ToolCall

TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_FieldValue = TypeVar("_FieldValue")


class InputPart(ApiModel):
    """A part of an item's content; what is no text is left out."""

    type: str = Field(examples=["input_text"])
    text: str | None = None
    refusal: str | None = None


class InputItem(ApiModel):
    """A message, a call, its output, or what the model thought; its type says which fields count."""

    model_config = ConfigDict(extra="allow")  # of calls that are not known, all is told to the model

    id: str | None = None
    type: str = Field(default="message", examples=["message"])
    role: str | None = Field(default=None, examples=["user"])
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: Any = None
    summary: list[InputPart] | None = None
    tools: Annotated[list[AnyToolSpec], Field(max_length=MAX_TOOLS)] | None = None


@dataclass(slots=True)
class _AssistantTurn:
    """Items of one turn, until an item of somebody else ends it."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message("assistant", self.content, reasoning=self.reasoning, tool_calls=tuple(self.calls))


def read_items(
    items: str | Sequence[InputItem], left_out: LeftOut, known_names: Iterable[ToolCall] = ()
) -> list[Message]:
    """The messages of an input.

    Args:
        items: of the request; a text is one message of the user.
        left_out: takes parts that are no text, and items for which no text stands.
        known_names: calls of earlier turns, whose outputs may be among the items.

    Raises:
        ApiError: an item lacks a field, or names one that is not here; `param` names it.
    """
    if isinstance(items, str):
        return [Message("user", items)]
    reader = _ItemReader({call.id: call.name for call in known_names}, left_out)
    for place, item in enumerate(items):
        reader.read(item, f"input[{place}]")
    return reader.messages()


class _ItemReader:
    def __init__(self, names: dict[str, str], left_out: LeftOut) -> None:
        self._names = names
        self._left_out = left_out
        self._turn: _AssistantTurn | None = None
        self._messages: list[Message] = []

    def messages(self) -> list[Message]:
        self._end_turn()
        return self._messages

    def read(self, item: InputItem, param: str) -> None:
        match item.type:
            case "message":
                self._read_message(item, param)
            case "reasoning":
                self._read_reasoning(item, param)
            case "function_call":
                arguments = _wanted(item.arguments, f"{param}.arguments")
                self._add_call(item, param, arguments if isinstance(arguments, str) else _json(arguments))
            case "custom_tool_call":
                self._add_call(item, param, custom_call("", "", _wanted(item.input, f"{param}.input")).arguments)
            case "item_reference":
                raise unsupported(
                    f"{param}.type",
                    "References to items are not supported; send the items, or use previous_response_id.",
                )
            case kind if kind.endswith("_output"):
                self._read_output(item, param)
            case kind if kind.endswith("_call") and item.call_id:
                self._add_call(item, param, _json({name: value for name, value in _beside(item) if value is not None}))
            case kind:
                self._left_out.item(kind)

    def _read_message(self, item: InputItem, param: str) -> None:
        text = part_text(item.content, f"{param}.content", self._left_out)
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
        text = part_text(content, f"{param}.content", self._left_out)
        turn = self._turn
        if turn is None or turn.content or turn.calls or turn.reasoning:
            turn = self._new_turn()
        turn.reasoning = text

    def _add_call(self, item: InputItem, param: str, arguments: str) -> None:
        call_id = _wanted(item.call_id, f"{param}.call_id")
        if item.type in {"function_call", "custom_tool_call"}:
            name = model_name(_wanted(item.name, f"{param}.name"), item.namespace)
        else:
            name = item.type.removesuffix("_call")
        self._names[call_id] = name
        (self._turn or self._new_turn()).calls.append(ToolCall(call_id, name, arguments))

    def _read_output(self, item: InputItem, param: str) -> None:
        is_ours = item.type in {"function_call_output", "custom_tool_call_output"}
        call_id = _wanted(item.call_id, f"{param}.call_id") if is_ours else item.call_id or item.id or ""
        if call_id not in self._names:
            if not is_ours:
                self._left_out.item(item.type)
                return
            raise invalid(f"No tool call found for function call output with call_id {call_id[:100]}.", param)
        text = self._output_text(item.output, f"{param}.output")
        self._end_turn()
        self._messages.append(Message("tool", text, tool_call_id=call_id, name=self._names[call_id]))

    def _output_text(self, output: object, param: str) -> str:
        """The text of an output: as it is, its parts, or JSON."""
        given = [output] if isinstance(output, dict) else output
        if output is None or isinstance(output, str):
            return part_text(output, param, self._left_out)
        if isinstance(given, list) and all(
            isinstance(part, dict) and isinstance(part.get("type"), str) for part in given
        ):
            parts = [InputPart(type=part["type"], text=_text_of(part)) for part in given]
            return part_text(parts, param, self._left_out)
        return _json(output)

    def _new_turn(self) -> _AssistantTurn:
        self._end_turn()
        self._turn = _AssistantTurn()
        return self._turn

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._messages.append(self._turn.message())
        self._turn = None


def part_text(content: str | Sequence[InputPart] | None, param: str, left_out: LeftOut) -> str:
    """The text of a content, its parts one after the other, and a word in the place of each that is no text.

    Raises:
        ApiError: there is none; `param` names it.
    """
    if content is None:
        raise missing(param)
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.type == "refusal":
            texts.append(part.refusal or "")
        elif part.type in TEXT_PARTS:
            texts.append(part.text or "")
        else:
            texts.append(left_out.part(part.type))
    return "".join(texts)


def _speaker(role: str | None, param: str) -> Role:
    match role:
        case "user":
            return "user"
        case "system" | "developer":
            return "system"
        case None:
            raise missing(f"{param}.role")
        case _:
            words = "Supported values are: 'assistant', 'system', 'developer', and 'user'."
            raise invalid(f"Invalid value: '{role[:100]}'. {words}", f"{param}.role", "invalid_value")


def _wanted(value: _FieldValue | None, param: str) -> _FieldValue:
    if value is None:
        raise missing(param)
    return value


def _text_of(part: dict[str, Any]) -> str:
    text = part.get("text", "")
    return text if isinstance(text, str) else _json(text)


def _beside(item: InputItem) -> Iterable[tuple[str, Any]]:
    """What an item of an unknown kind says, beside its name and state."""
    told = item.model_dump(exclude={"id", "type", "call_id"})
    return ((name, value) for name, value in told.items() if name not in {"status", "caller"})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
