"""What a request declares or carries that this server has not: left out, and said in a header and in the log.

A client that declares a web search, or replays an image, has a conversation that can be answered without. Refusing it
would end that conversation: the same part comes back with each turn. What a request *demands* is still refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Final

from starlette.types import Scope

logger = logging.getLogger(__name__)

HEADER: Final = "canopy-left-out"
SCOPE: Final = "canopy.left_out"
"""Where the words of a request stand in its scope: a list that the guard puts there, and makes a header of."""
MAX_WORDS: Final = 16
"""Kinds that one answer names, at most."""
MAX_LOGGED: Final = 64
"""Kinds that the log names, at most, in the life of a server: each once."""
_NAMES: Final = {
    "image": "an image",
    "screenshot": "an image",
    "audio": "a recording",
    "video": "a video",
    "document": "a document",
    "file": "a file",
}


class LeftOut:
    """Collects what a request does without."""

    def __init__(self) -> None:
        self._words: dict[str, None] = {}

    @property
    def words(self) -> tuple[str, ...]:
        """Each kind once, such as `tool web_search`."""
        return tuple(self._words)

    def tool(self, kind: str) -> None:
        """A tool that would run at the server."""
        self._add("tool", kind)

    def item(self, kind: str) -> None:
        """An item of a conversation that no text stands for."""
        self._add("item", kind)

    def part(self, kind: str) -> str:
        """A part that is no text; the value is what the model reads in its place."""
        self._add("part", kind)
        name = next((name for word, name in _NAMES.items() if word in kind), "something that is no text")
        return f"[Here was {name}; this model reads text only.]"

    def _add(self, place: str, kind: str) -> None:
        if len(self._words) < MAX_WORDS:
            self._words[f"{place} {re.sub(r'[^A-Za-z0-9_.-]', '?', kind[:40])}"] = None


class LeftOutLog:
    """Tells the log of each kind once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, words: Iterable[str], scope: Scope) -> None:
        """Note the words of one request, for its header and the log."""
        words = list(words)
        scope[SCOPE] += words
        new = [word for word in words if word not in self._said]
        if new and len(self._said) < MAX_LOGGED:
            self._said.update(new)
            logger.info("requests go without: %s", ", ".join(new))


def header(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The header that says what a request goes without; none where it has everything."""
    words = scope[SCOPE]
    return [(HEADER.encode(), ", ".join(words).encode())] if words else []
