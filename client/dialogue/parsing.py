"""What all parsers of answers share: text comes in pieces, and parts go out as soon as they cannot change any more.

A parser is a coroutine over the text: it yields where it needs more. Any split of a text into pieces gives the same
parts, once neighbours of one kind are joined. No text raises an error.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

from client.dialogue.messages import AnswerDelta, ContentDelta, ReasoningDelta, ToolCallDelta

Taken = TypeVar("Taken")
Steps = Generator[None, None, Taken]
"""A part of a parser: yields where it needs more text, returns what it found."""

Emit = Callable[[str], None]


class AnswerParser(Protocol):
    """Turns an answer's text, control tokens shown, into its parts."""

    def push(self, text: str) -> list[AnswerDelta]:
        """Take the next characters; returns what they made certain."""

    def finish(self) -> list[AnswerDelta]:
        """The text has ended; returns what was held back."""


class TextParser(ABC):
    """An answer parser as a coroutine."""

    def __init__(self) -> None:
        self._unread = ""
        self._has_ended = False
        self._out: list[AnswerDelta] = []
        self._steps = self._parse()
        next(self._steps)

    def push(self, text: str) -> list[AnswerDelta]:
        self._unread += text
        return self._advance()

    def finish(self) -> list[AnswerDelta]:
        self._has_ended = True
        return self._advance()

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """Read the whole text. Must yield before it reads, and return only after the text has ended."""

    def _advance(self) -> list[AnswerDelta]:
        next(self._steps, None)
        out, self._out = self._out, []
        return joined(out)

    def _until(self, markers: Sequence[str], emit: Emit) -> Steps[str]:
        """Pass text on before the first of some markers. Returns the marker, read; empty at the end of the text."""
        while True:
            found = [(place, marker) for marker in markers if (place := self._unread.find(marker)) >= 0]
            if found:
                place, marker = min(found)
                emit(self._unread[:place])
                self._unread = self._unread[place + len(marker) :]
                return marker
            kept = 0 if self._has_ended else longest_start(self._unread, markers)
            certain = len(self._unread) - kept
            emit(self._unread[:certain])
            self._unread = self._unread[certain:]
            if self._has_ended:
                return ""
            yield

    def _collect(self, markers: Sequence[str]) -> Steps[tuple[str, str]]:
        """Text before the first of some markers, and the marker, as `_until`."""
        pieces: list[str] = []
        marker = yield from self._until(markers, pieces.append)
        return "".join(pieces), marker

    def _space(self) -> Steps[str]:
        space = ""
        while True:
            rest = self._unread.lstrip()
            space += self._unread[: len(self._unread) - len(rest)]
            self._unread = rest
            if rest or self._has_ended:
                return space
            yield

    def _starts_with(self, *markers: str) -> Steps[str]:
        """Which of some markers comes next, read; empty for none."""
        while True:
            for marker in markers:
                if self._unread.startswith(marker):
                    self._unread = self._unread[len(marker) :]
                    return marker
            may_be = any(marker.startswith(self._unread) for marker in markers)
            if self._has_ended or not may_be:
                return ""
            yield


class ContentParser(TextParser):
    def _parse(self) -> Steps[None]:
        while True:
            yield
            if self._unread:
                self._out.append(ContentDelta(self._unread))
                self._unread = ""


class ReasoningParser:
    """Takes thoughts off the beginning of an answer; another parser gets the rest.

    Line breaks next to the marks belong to nobody.

    Attributes:
        rest: of the answer behind the thoughts.
    """

    def __init__(self, rest: AnswerParser, marks: tuple[str, str], *, is_open: bool) -> None:
        """Parse thoughts between `marks`; `is_open` where the prompt holds the first of them already."""
        self.rest = rest
        self._thoughts = _Thoughts(marks, is_open=is_open)

    def push(self, text: str) -> list[AnswerDelta]:
        return self._pass_on(self._thoughts.push(text))

    def finish(self) -> list[AnswerDelta]:
        return joined([*self._pass_on(self._thoughts.finish()), *self.rest.finish()])

    def _pass_on(self, deltas: list[AnswerDelta]) -> list[AnswerDelta]:
        out: list[AnswerDelta] = []
        for delta in deltas:
            out += self.rest.push(delta.text) if isinstance(delta, ContentDelta) else [delta]
        return joined(out)


class _Thoughts(TextParser):
    """Parts a text into thoughts and the rest, as reasoning and content."""

    def __init__(self, marks: tuple[str, str], *, is_open: bool) -> None:
        self._marks = marks
        self._is_open = is_open
        self._held = ""
        self._has_begun = False
        super().__init__()

    def _parse(self) -> Steps[None]:
        yield
        start, end = self._marks
        space = yield from self._space()
        begun = yield from self._starts_with(start)
        if begun or self._is_open:
            yield from self._until((end,), self._think)
            self._held = ""
            yield from self._space()
        else:
            self._emit(space)
        while True:
            self._emit(self._unread)
            self._unread = ""
            yield

    def _think(self, text: str) -> None:
        """Pass thoughts on but for white space at both of their ends."""
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if not self._has_begun:
            kept = kept.lstrip()
        if kept:
            self._has_begun = True
            self._out.append(ReasoningDelta(kept))
        elif not self._has_begun:
            self._held = ""

    def _emit(self, text: str) -> None:
        if text:
            self._out.append(ContentDelta(text))


def joined(deltas: Sequence[AnswerDelta]) -> list[AnswerDelta]:
    """The same parts, neighbours of one kind in one."""
    out: list[AnswerDelta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            out[-1] = ContentDelta(last.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            out[-1] = ReasoningDelta(last.text + delta.text)
        elif isinstance(delta, ToolCallDelta) and isinstance(last, ToolCallDelta) and last.index == delta.index:
            out[-1] = ToolCallDelta(last.index, last.id, last.name, last.arguments + delta.arguments)
        else:
            out.append(delta)
    return out


def longest_start(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a marker begins."""
    longest = max((len(marker) for marker in markers), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(len(marker) > size and marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0


def new_call_id() -> str:
    """An id for a call, unique in any conversation."""
    return f"call_{secrets.token_hex(12)}"
