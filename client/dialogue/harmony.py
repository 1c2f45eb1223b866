"""Answers of GPT-OSS: messages in channels. Analysis is reasoning, a recipient makes a call, the rest is content."""

from __future__ import annotations

import re
from collections.abc import Callable

from client.dialogue.json_calls import CallParser
from client.dialogue.messages import ReasoningDelta
from client.dialogue.parsing import Emit, Steps

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"to=([\w.\-]+)")


class HarmonyParser(CallParser):
    """Messages with a header each, between markers."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        """Parse an answer; `new_id` gives each call an id."""
        super().__init__(new_id)

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
