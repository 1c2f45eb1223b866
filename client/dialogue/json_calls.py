"""Calls that are JSON objects behind a marker: Hermes and Qwen, Phi, Mistral, Llama 3.

Arguments are passed on as they come where a call begins with its name. A call that is no JSON object, or names nothing,
is content. One that stops to be JSON in its arguments stays as far as it came, and what follows is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any

from client.dialogue.json_scanner import JsonScanner
from client.dialogue.messages import ContentDelta, ToolCallDelta
from client.dialogue.parsing import Steps, TextParser

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
    """Content with calls in it. White space around calls belongs to nobody.

    Attributes:
        calls: that were found so far.
    """

    def __init__(self, new_id: Callable[[], str], names: Collection[str] = ()) -> None:
        """Parse calls; `new_id` gives each an id; `names` are those of the tools."""
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
        """A call begins."""
        self._blank = ""
        self.calls += 1
        self._out.append(ToolCallDelta(self.calls - 1, self._new_id(), name, ""))

    def _arguments(self, text: str) -> None:
        """More of the last call."""
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
            ends: markers that may follow.
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
        """Parse calls between `begin` and `end`."""
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
