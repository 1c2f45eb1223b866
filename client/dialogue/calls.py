"""Parsers of answers, one per family of tool calls. `parser_for` in `client.dialogue.plan` chooses among them.

A JSON scanner finds where a call's object ends; what is no call is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from client.dialogue.messages import ContentDelta, ReasoningDelta, Tool, ToolCallDelta
from client.dialogue.parsing import Emit, Steps, TextParser

ScanState = Literal["open", "done", "bad"]

_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SCALAR_CHARS = frozenset("+-.0123456789aeflnrstuE")
_SPACE = frozenset(" \t\n\r")
_HEX = frozenset("0123456789abcdefABCDEF")
_AFTER_ESCAPE = frozenset('"\\/bfnrtu')
MAX_DEPTH = 256
"""Levels of objects and lists in one another, at most."""


class JsonScanner:
    """Tells where a JSON object ends, and where it stops to be one.

    Attributes:
        state: `open` until the object is complete; `bad` after a character that no JSON object has there.
    """

    def __init__(self) -> None:
        self.state: ScanState = "open"
        self._closers: list[str] = []
        self._expected = "object"
        self._scalar = ""
        self._escape = ""

    def feed(self, text: str) -> int:
        """Take characters as long as they go on with the object. Returns how many were taken."""
        for place, char in enumerate(text):
            if self.state != "open":
                return place
            if not self._step(char):
                self.state = "bad"
                return place
        return len(text)

    def _step(self, char: str) -> bool:
        if self._expected in {"string", "key string"}:
            return self._in_string(char)
        if self._scalar:
            if char in _SCALAR_CHARS:
                self._scalar += char
                return len(self._scalar) < MAX_DEPTH
            if _SCALAR.fullmatch(self._scalar) is None:
                return False
            self._scalar, self._expected = "", "comma"
        if char in _SPACE:
            return True
        return self._structure(char)

    def _in_string(self, char: str) -> bool:
        if self._escape.startswith("u"):
            self._escape = self._escape + char if len(self._escape) < len("uFFF") else ""
            return char in _HEX
        if self._escape:
            self._escape = "u" if char == "u" else ""
            return char in _AFTER_ESCAPE
        if char == '"':
            self._expected = "colon" if self._expected == "key string" else "comma"
        elif char == "\\":
            self._escape = "\\"
        return char >= " "

    def _structure(self, char: str) -> bool:
        expected = self._expected
        if expected == "object":
            return char == "{" and self._open("}", "first key")
        if expected == "comma":
            if char == ",":
                self._expected = "key" if self._closers[-1] == "}" else "value"
                return True
            return self._close(char)
        if expected in {"key", "first key"}:
            if char == '"':
                self._expected = "key string"
                return True
            return expected == "first key" and self._close(char)
        if expected == "colon":
            self._expected = "value"
            return char == ":"
        return self._value(char)

    def _value(self, char: str) -> bool:
        if char == "{":
            return self._open("}", "first key")
        if char == "[":
            return self._open("]", "first value")
        if char == '"':
            self._expected = "string"
            return True
        if self._expected == "first value" and char == "]":
            return self._close(char)
        self._scalar = char
        return char in "-0123456789tfn"

    def _open(self, closer: str, expected: str) -> bool:
        self._closers.append(closer)
        self._expected = expected
        return len(self._closers) <= MAX_DEPTH

    def _close(self, char: str) -> bool:
        if not self._closers or self._closers.pop() != char:
            return False
        self._expected = "comma"
        if not self._closers:
            self.state = "done"
        return True


_STRING = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*"'
_HEAD = re.compile(
    rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
MAX_HEAD = 1_024
"""Characters before the arguments of a call that goes out as it comes, at most."""
_WITHOUT_ARGUMENTS = frozenset({"name", "type", "id"})
"""Keys of a call that may go without arguments; with others, it is no call."""
NAME = re.compile(r"[\w.\-]{1,128}")


class CallParser(TextParser):
    """Content with calls in it. White space around calls belongs to nobody."""

    def __init__(self, new_id: Callable[[], str], names: Collection[str] = ()) -> None:
        self.calls = 0
        self._new_id = new_id
        self._names = frozenset(names)
        self._blank = ""
        super().__init__()

    def _content(self, text: str) -> None:
        """Pass content on; white space at its end waits, because it goes away before a call."""
        text = self._blank + text
        kept = text.rstrip()
        self._blank = text[len(kept) :]
        if kept:
            self._out.append(ContentDelta(kept))

    def _finish_content(self) -> None:
        """Pass on what waits at the end of a text; behind a call, white space goes away there too."""
        if self._blank and not self.calls:
            self._out.append(ContentDelta(self._blank))
        self._blank = ""

    def _begin(self, name: str) -> None:
        self._blank = ""
        self.calls += 1
        self._out.append(ToolCallDelta(self.calls - 1, self._new_id(), name, ""))

    def _arguments(self, text: str) -> None:
        if text:
            self._out.append(ToolCallDelta(self.calls - 1, "", "", text))

    def _give_back(self, text: str) -> None:
        """Read a text again that was no call, as content from its second character on."""
        self._content(text[:1])
        self._unread = text[1:] + self._unread

    def _stream_object(self) -> Steps[bool]:
        """Pass a JSON object on as arguments. Returns whether it is complete."""
        scanner = JsonScanner()
        while True:
            taken = scanner.feed(self._unread)
            self._arguments(self._unread[:taken])
            self._unread = self._unread[taken:]
            if scanner.state != "open" or self._has_ended:
                return scanner.state == "done"
            yield

    def _call(self) -> Steps[str | None]:
        """Read one call that is a JSON object.

        Returns:
            None if there was one, else what was read and is no call.
        """
        whole, read = JsonScanner(), ""
        while True:
            head = _HEAD.match(read + self._unread[:MAX_HEAD]) if len(read) <= MAX_HEAD else None
            if head is not None and head.end() < MAX_HEAD and self._is_tool(name := json.loads(head[1])):
                self._unread = (read + self._unread)[head.end() :]
                self._begin(name)
                if (yield from self._stream_object()):
                    yield from self._rest_of_call(head[0] + "{}")
                return None
            taken = whole.feed(self._unread)
            read += self._unread[:taken]
            self._unread = self._unread[taken:]
            if whole.state == "done":
                return None if self._whole_call(read) else read
            if whole.state == "bad" or self._has_ended:
                return read
            yield

    def _rest_of_call(self, before: str) -> Steps[None]:
        """Read what comes behind the arguments up to the end of the object."""
        scanner, read = JsonScanner(), ""
        scanner.feed(before)
        while True:
            taken = scanner.feed(self._unread)
            read += self._unread[:taken]
            self._unread = self._unread[taken:]
            if scanner.state == "done":
                return
            if scanner.state == "bad" or self._has_ended:
                self._content(read)
                return
            yield

    def _whole_call(self, text: str) -> bool:
        """A call in another order of its keys. Returns whether the object is one."""
        try:
            value: dict[str, Any] = json.loads(text)
        except ValueError:
            return False
        inner = value.get("function")
        value = inner if isinstance(inner, dict) else value
        name = value.get("name")
        bare: dict[str, Any] | None = {} if set(value) <= _WITHOUT_ARGUMENTS else None
        arguments = value.get("arguments", value.get("parameters", bare))
        if not isinstance(name, str) or not self._is_tool(name) or not isinstance(arguments, dict | str):
            return False
        self._begin(name)
        self._arguments(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
        return True

    def _is_tool(self, name: str) -> bool:
        return bool(name)

    def _calls(self, begin: str, ends: tuple[str, ...]) -> Steps[None]:
        """Read one call, or a list of them, behind a marker; what is none is content.

        Args:
            begin: the marker, which was read.
        """
        kept, before = begin, self.calls
        kept += yield from self._space()
        in_list = yield from self._starts_with("[")
        kept += in_list
        while True:
            kept += yield from self._space()
            wrong = yield from self._call()
            if wrong is not None:
                if self.calls == before:
                    self._give_back(kept + wrong)
                else:
                    self._unread = wrong + self._unread
                return
            kept = yield from self._space()
            if not in_list or not (yield from self._starts_with(",")):
                break
        closing = (yield from self._starts_with("]")) if in_list else ""
        if closing:
            kept = yield from self._space()
        if not (ends and (yield from self._starts_with(*ends))):
            self._content(kept)


class MarkedJsonParser(CallParser):
    """Hermes, Qwen and Phi: every call, or a list of calls, between two markers."""

    def __init__(self, new_id: Callable[[], str], begin: str, end: str) -> None:
        self._begin_marker, self._end_marker = begin, end
        super().__init__(new_id)

    def _parse(self) -> Steps[None]:
        yield
        while marker := (yield from self._until((self._begin_marker,), self._content)):
            yield from self._calls(marker, (self._end_marker,))
        self._finish_content()


class MistralParser(CallParser):
    """Mistral: `[TOOL_CALLS]` before a list of calls, or before a name, `[ARGS]` and the arguments."""

    def _parse(self) -> Steps[None]:
        yield
        while marker := (yield from self._until(("[TOOL_CALLS]",), self._content)):
            space = yield from self._space()
            if self._unread[:1] in {"[", "{"}:
                yield from self._calls(marker + space, ())
            else:
                yield from self._named_call(marker + space)
        self._finish_content()

    def _named_call(self, begin: str) -> Steps[None]:
        header, marker = yield from self._collect(("[ARGS]", "[TOOL_CALLS]", "{"))
        name = header.partition("[CALL_ID]")[0].strip()
        space = yield from self._space()
        if marker != "[ARGS]" or NAME.fullmatch(name) is None or self._unread[:1] != "{":
            self._give_back(begin + header + marker + space)
            return
        self._begin(name)
        yield from self._stream_object()


class LlamaParser(CallParser):
    """Llama 3: an answer that is a call, or calls behind `<|python_tag|>`, parted by semicolons.

    An object that names no tool is content, because an answer may be JSON.
    """

    def _parse(self) -> Steps[None]:
        yield
        tag = "<|python_tag|>"
        kept = yield from self._space()
        if self._unread[:1] == "{":
            yield from self._bare_calls(kept)
        else:
            self._content(kept)
        while marker := (yield from self._until((tag,), self._content)):
            kept = marker + (yield from self._space())
            yield from self._bare_calls(kept)
        self._finish_content()

    def _bare_calls(self, kept: str) -> Steps[None]:
        while True:
            wrong = yield from self._call()
            if wrong is not None:
                self._content(kept + wrong)
                return
            kept = yield from self._space()
            semicolon = yield from self._starts_with(";")
            kept += semicolon + (yield from self._space())
            if self._unread[:1] != "{":
                self._content(kept)
                return

    def _is_tool(self, name: str) -> bool:
        return name in self._names


CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json\n", "```"


class DeepSeekParser(CallParser):
    """V3 writes `function`, the separator, the name and fenced arguments; V3.1 only name, separator and arguments."""

    def _parse(self) -> Steps[None]:
        yield
        while marker := (yield from self._until((CALLS, CALL), self._content)):
            kept = ""
            if marker == CALLS:
                kept = marker + (yield from self._space())
                if not (yield from self._starts_with(CALL)):
                    self._content(kept)
                    continue
            yield from self._one(kept + CALL)
            yield from self._space()
            yield from self._starts_with(CALLS_END)
        self._finish_content()

    def _one(self, begin: str) -> Steps[None]:
        read, marker = yield from self._collect((SEPARATOR, CALL_END))
        begin, name = begin + read + marker, read.strip()
        is_fenced = marker == SEPARATOR and name == "function"
        if is_fenced:
            read, marker = yield from self._collect(("\n", CALL_END))
            begin, name = begin + read + marker, read.strip()
            fence = yield from self._starts_with(FENCE)
            begin, marker = begin + fence, SEPARATOR if fence else ""
        space = yield from self._space()
        if marker != SEPARATOR or NAME.fullmatch(name) is None or self._unread[:1] != "{":
            self._give_back(begin + space)
            return
        self._begin(name)
        if (yield from self._stream_object()):
            kept = yield from self._space()
            if is_fenced:
                kept += yield from self._starts_with(FENCE_END)
                kept += yield from self._space()
            if not (yield from self._starts_with(CALL_END)):
                self._content(kept)


class TaggedParser(CallParser):
    """A call that is written argument by argument."""

    def __init__(self, new_id: Callable[[], str], tools: Sequence[Tool]) -> None:
        self._parameters = {tool.name: tool.parameters for tool in tools}
        self._name = ""
        self._written = 0
        super().__init__(new_id)

    def _start(self, name: str) -> None:
        self._begin(name)
        self._name, self._written = name, 0

    def _argument(self, key: str, text: str) -> None:
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
    return text.removeprefix("\n").removesuffix("\n")


def _value(text: str, parameters: Mapping[str, Any], key: str) -> str:
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind != "string":
        try:
            return json.dumps(json.loads(text), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"to=([\w.\-]+)")


class HarmonyParser(CallParser):
    """GPT-OSS: messages in channels. Analysis is reasoning, a recipient makes a call, the rest is content."""

    def _parse(self) -> Steps[None]:
        yield
        header = ""
        while True:
            before, marker = yield from self._before_header()
            header += before
            if marker == START:
                header = ""
                continue
            if not marker:
                break
            if marker == CHANNEL:
                text, marker = yield from self._collect((MESSAGE, START, *ENDS))
                header += CHANNEL + text
            if marker == MESSAGE:
                yield from self._message(header)
            header = ""
        self._content(header)
        self._finish_content()

    def _before_header(self) -> Steps[tuple[str, str]]:
        """Text between messages: a header's beginning, or content where a model writes no header.

        Returns:
            The header's beginning, and the marker behind it.
        """
        held, is_content = "", False

        def take(text: str) -> None:
            nonlocal held, is_content
            held += text
            is_content = is_content or not _may_be_header(held)
            if is_content:
                self._content(held)
                held = ""

        marker = yield from self._until((START, CHANNEL, MESSAGE, *ENDS), take)
        if marker in ENDS:
            marker = START  # the end of what had no header
            self._content(held)
            held = ""
        return held, marker

    def _message(self, header: str) -> Steps[None]:
        channel, to = _CHANNEL.search(header), _TO.search(header)
        emit: Emit = self._content
        name = to[1].removeprefix("functions.") if to is not None and to[1].startswith("functions.") else ""
        if name:
            self._begin(name)
            emit = self._arguments
        elif channel is not None and channel[1] == "analysis":
            emit = self._think
        marker = yield from self._until((START, CHANNEL, *ENDS), emit)
        if marker in {START, CHANNEL}:
            self._unread = marker + self._unread

    def _think(self, text: str) -> None:
        if text:
            self._out.append(ReasoningDelta(text))


def _may_be_header(text: str) -> bool:
    """Whether a header can begin so: a role and a recipient, both or none of them, complete or not."""
    text = text.lstrip()
    if "assistant".startswith(text):
        return True
    text = text.removeprefix("assistant").lstrip()
    return "to=".startswith(text) or re.fullmatch(r"to=[\w.\-]*\s*", text) is not None
