"""Reads a JSON object character by character, so that it can be passed on while it is written. Owns no values."""

from __future__ import annotations

import re
from typing import Literal

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
