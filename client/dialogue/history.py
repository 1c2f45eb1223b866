"""Messages and tools in the form that chat templates of Hugging Face expect. Owns no tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from client.dialogue.families import ToolFamily
from client.dialogue.messages import Message, Tool, ToolCall
from swarm.errors import ConfigError

TemplateDict = dict[str, Any]

HERMES_INTRODUCTION = (
    "You may call functions to help with the user's query. Each line between <tools> and </tools> describes one:\n"
    "<tools>\n{tools}\n</tools>\n\n"
    "For each call, write a JSON object with the function's name and its arguments between <tool_call> and "
    "</tool_call>:\n"
    '<tool_call>\n{{"name": "the name", "arguments": {{"the argument": "its value"}}}}\n</tool_call>'
)
"""For a model whose template shows no tools."""
DEEPSEEK_INTRODUCTION = (
    "## Tools\nYou have access to the following tools, each a JSON object:\n\n{tools}\n\n"
    "To call tools, write exactly this, with the arguments as a JSON object:\n{example}"
)
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>the name\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
_DEEPSEEK_V31_CALL = "<｜tool▁call▁begin｜>the name<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def alternating(messages: Sequence[Message]) -> list[Message]:
    """The conversation for a strict template: one system message at its beginning, then turns of changing speakers.

    A later system message is said by the user.
    """
    out: list[Message] = []
    for message in messages:
        if message.role == "system" and any(earlier.role != "system" for earlier in out):
            message = replace(message, role="user")
        last = out[-1] if out else None
        if last is None or last.role != message.role or message.role == "tool" or last.tool_calls:
            out.append(message)
            continue
        parts = (last.content, message.content), (last.reasoning, message.reasoning)
        content, reasoning = ("\n\n".join(filter(None, part)) for part in parts)
        out[-1] = replace(message, content=content, reasoning=reasoning)
    return out


def tool_dicts(tools: Sequence[Tool]) -> list[TemplateDict]:
    """Tools as templates expect them."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": _plain(tool.parameters)},
        }
        for tool in tools
    ]


def message_dicts(
    messages: Sequence[Message], *, as_text: bool, call_id: Callable[[str], str] = str
) -> list[TemplateDict]:
    """Messages as templates expect them.

    Args:
        messages: of a conversation.
        as_text: whether a call's arguments are its JSON text; else the object that it stands for.
        call_id: gives a call's id in the form that the template wants.
    """
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    return [_message_dict(message, names, as_text=as_text, call_id=call_id) for message in messages]


def nine_characters(call_id: str) -> str:
    """A call's id as Mistral's templates want it: nine letters and digits."""
    if len(call_id) == len("abcdefghi") and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def with_thoughts_apart(messages: Sequence[Message], marks: tuple[str, str]) -> list[Message]:
    """The conversation with thoughts that stand in an assistant's content, as some clients send them, apart from it."""
    start, end = marks
    out = []
    for message in messages:
        text = message.content.lstrip()
        if message.role == "assistant" and not message.reasoning and text.startswith(start) and end in text:
            thoughts, _, content = text.removeprefix(start).partition(end)
            message = replace(message, reasoning=thoughts.strip(), content=content.lstrip())
        out.append(message)
    return out


def without_lost_thoughts(messages: Sequence[Message]) -> list[Message]:
    """The conversation for GPT-OSS, whose template takes a call with thoughts or with content, and not with both."""
    return [
        replace(message, reasoning="") if message.tool_calls and message.content else message for message in messages
    ]


def with_tools_in_system(messages: Sequence[TemplateDict], tools: Sequence[TemplateDict]) -> list[TemplateDict]:
    """The conversation for a template that reads tools from its system's message, as JSON text."""
    text = json.dumps(list(tools), ensure_ascii=False)
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "tools": text}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": text}, *messages]


def without_calls(messages: Sequence[Message]) -> list[Message]:
    """The conversation for a template that knows neither calls nor results: both are written as Hermes does."""
    out: list[Message] = []
    is_result = False
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if is_result:
                out[-1] = replace(out[-1], content=f"{out[-1].content}\n{text}")
            else:
                out.append(Message("user", text))
            is_result = True
            continue
        is_result = False
        if message.tool_calls:
            calls = [_hermes_call(call) for call in message.tool_calls]
            message = replace(message, content="\n".join(filter(None, [message.content, *calls])), tool_calls=())
        out.append(message)
    return out


def introduced(messages: Sequence[TemplateDict], text: str) -> list[TemplateDict]:
    """The conversation with a text of ours at the end of the system's message."""
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def introduction(tools: Sequence[TemplateDict], family: ToolFamily) -> str:
    """What a model is told of tools that its template does not show."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if family in {"deepseek", "deepseek_v31"}:
        call = _DEEPSEEK_CALL if family == "deepseek" else _DEEPSEEK_V31_CALL
        call = call.format(arguments='{"the argument": "its value"}')
        return DEEPSEEK_INTRODUCTION.format(tools=lines, example=f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>")
    return HERMES_INTRODUCTION.format(tools=lines)


def _message_dict(
    message: Message, names: Mapping[str, str], *, as_text: bool, call_id: Callable[[str], str]
) -> TemplateDict:
    made: TemplateDict = {"role": message.role, "content": message.content}
    name = message.name or names.get(message.tool_call_id, "")
    if name:
        made["name"] = name
    if message.role == "tool" and message.tool_call_id:
        made["tool_call_id"] = call_id(message.tool_call_id)
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "type": "function",
                "id": call_id(call.id),
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if as_text else _arguments(call),
                },
            }
            for call in message.tool_calls
        ]
    return made


def _arguments(call: ToolCall) -> TemplateDict:
    """The object that arguments stand for.

    Raises:
        ConfigError: they stand for none.
    """
    if not call.arguments.strip():
        return {}
    try:
        value = json.loads(call.arguments)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"messages: the arguments of the call {call.name!r} are no JSON object")
    return dict(value)


def _hermes_call(call: ToolCall) -> str:
    arguments = call.arguments.strip() or "{}"
    return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {arguments}}}\n</tool_call>'


def _plain(value: object) -> object:
    """A value of plain lists and dictionaries."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
