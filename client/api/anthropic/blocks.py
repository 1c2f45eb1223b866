"""Content blocks of the Messages API as messages of a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pydantic import Field

from client.api.errors import invalid
from client.api.left_out import LeftOut
from client.api.openai.fields import ApiModel
from client.dialogue.messages import Message, ToolCall

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
    """The system prompt, one block per line."""
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
    """Reads one turn after the other.

    Attributes:
        left_out: takes blocks that are no text.
        messages: so far.
        names: of the tools that were called, by the call's id.
    """

    left_out: LeftOut
    messages: list[Message] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def read_user(self, content: Content, param: str) -> None:
        """A turn of the user."""
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
        """A turn of the assistant."""
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
    """What the model reads of a block."""
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
