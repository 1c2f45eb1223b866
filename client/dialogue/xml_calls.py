"""Calls whose arguments stand between tags, one by one: Qwen3-Coder and GLM-4.x.

An argument is text where its tool's schema says so, or where it is no JSON. Arguments go out one by one, as a JSON
object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from client.dialogue.json_calls import NAME, CallParser
from client.dialogue.messages import Tool
from client.dialogue.parsing import Steps


class TaggedParser(CallParser):
    """A call that is written argument by argument."""

    def __init__(self, new_id: Callable[[], str], tools: Sequence[Tool]) -> None:
        """Parse calls of these tools; `new_id` gives each an id."""
        self._parameters = {tool.name: tool.parameters for tool in tools}
        self._name = ""
        self._written = 0
        super().__init__(new_id)

    def _start(self, name: str) -> None:
        self._begin(name)
        self._name, self._written = name, 0

    def _argument(self, key: str, text: str) -> None:
        """Pass one argument on."""
        before = ", " if self._written else "{"
        self._written += 1
        value = _value(text, self._parameters.get(self._name, {}), key)
        self._arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: {value}")

    def _end(self) -> None:
        """The call has ended, rightly or not: its arguments are an object either way."""
        self._arguments("}" if self._written else "{}")


class QwenXmlParser(TaggedParser):
    """Qwen3-Coder: `<function=name>` with a `<parameter=key>` for each argument."""

    def _parse(self) -> Steps[None]:
        yield
        function = "<function="
        while marker := (yield from self._until(("<tool_call>", function), self._content)):
            kept = marker
            if marker != function:
                kept += yield from self._space()
                if self._unread[:1] == "{":
                    yield from self._calls(kept, ("</tool_call>",))
                    continue
                found = yield from self._starts_with(function)
                kept += found
                if not found:
                    self._give_back(kept)
                    continue
            yield from self._function(kept)
        self._finish_content()

    def _function(self, begin: str) -> Steps[None]:
        name, marker = yield from self._collect((">", "\n"))
        if marker != ">" or NAME.fullmatch(name.strip()) is None:
            self._give_back(begin + name + marker)
            return
        self._start(name.strip())
        kept = yield from self._space()
        while (yield from self._starts_with("<parameter=")):
            key, marker = yield from self._collect((">", "\n"))
            text, end = ("", "")
            if marker == ">":
                text, end = yield from self._collect(("</parameter>", "<parameter=", "</function>"))
            if end != "</parameter>":
                self._unread = end + self._unread
                kept = f"<parameter={key}{marker}{text}"
                break
            self._argument(key.strip(), _unwrapped(text))
            kept = yield from self._space()
        self._end()
        if not (yield from self._starts_with("</function>")):
            self._content(kept)
            return
        kept = yield from self._space()
        if not (yield from self._starts_with("</tool_call>")):
            self._content(kept)


class GlmParser(TaggedParser):
    """GLM-4.x: a name, then an `<arg_key>` and an `<arg_value>` for each argument."""

    def _parse(self) -> Steps[None]:
        yield
        while marker := (yield from self._until(("<tool_call>",), self._content)):
            yield from self._one(marker)
        self._finish_content()

    def _one(self, begin: str) -> Steps[None]:
        begin += yield from self._space()
        name, marker = yield from self._collect(("\n", "<arg_key>", "</tool_call>", "{"))
        if marker in {"", "{"} or NAME.fullmatch(name.strip()) is None:
            self._unread = name + marker + self._unread
            if not name and marker:
                yield from self._calls(begin, ("</tool_call>",))
            else:
                self._give_back(begin)
            return
        self._unread = marker + self._unread
        self._start(name.strip())
        while True:
            kept = yield from self._space()
            tag = yield from self._starts_with("<arg_key>", "</tool_call>")
            if tag != "<arg_key>":
                break
            key, end = yield from self._collect(("</arg_key>", "</tool_call>"))
            kept += tag + key + end
            if end != "</arg_key>":
                break
            kept += yield from self._space()
            opened = yield from self._starts_with("<arg_value>")
            kept += opened
            if not opened:
                break
            text, end = yield from self._collect(("</arg_value>", "</tool_call>"))
            kept += text + end
            if end != "</arg_value>":
                break
            self._argument(key.strip(), text)
            tag = ""
        self._end()
        if tag != "</tool_call>":
            self._content(kept)


def _unwrapped(text: str) -> str:
    """A value without the line break on each side of it."""
    return text.removeprefix("\n").removesuffix("\n")


def _value(text: str, parameters: Mapping[str, Any], key: str) -> str:
    """An argument as JSON."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind != "string":
        try:
            return json.dumps(json.loads(text), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)
