"""Calls of DeepSeek V3, R1 and V3.1: between markers, a name and a JSON object."""

from __future__ import annotations

from client.dialogue.json_calls import NAME, CallParser
from client.dialogue.parsing import Steps

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
