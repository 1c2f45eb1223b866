"""Responses that a later request may name, bounded in number, bytes and age.

A response belongs to the key that asked for it. Nobody else reads it, continues it or deletes it. Where there is no
room, the oldest response of whoever holds most goes.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from client.dialogue.messages import Message

MAX_RESPONSES: Final = 4_096
MAX_BYTES: Final = 128 * 2**20
MAX_RESPONSE_BYTES: Final = 8 * 2**20
"""Of one; a longer one is not kept, and says so by `store: false`."""
MAX_AGE_S: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and what a later request goes on with.

    Attributes:
        response: its object, as JSON values.
        conversation: all messages up to its answer, without instructions.
        input_items: of its own request, as JSON values with ids.
    """

    response: dict[str, Any]
    conversation: tuple[Message, ...]
    input_items: tuple[dict[str, Any], ...]

    @property
    def id(self) -> str:
        """Its name."""
        return str(self.response["id"])

    def measure(self) -> int:
        """Bytes that it takes, about. Messages that it shares with other responses count in each."""
        texts = sum(_message_bytes(message) for message in self.conversation)
        return texts + len(json.dumps([self.response, self.input_items]))


def _message_bytes(message: Message) -> int:
    calls = sum(len(call.arguments) + len(call.name) + len(call.id) for call in message.tool_calls)
    return 200 + 4 * (len(message.content) + len(message.reasoning) + calls)


@dataclass(slots=True)
class _StoredEntry:
    """One entry."""

    stored: StoredResponse
    size_bytes: int
    at_s: float


@dataclass(slots=True)
class _Shelf:
    """What one key holds, oldest first."""

    entries: OrderedDict[str, _StoredEntry] = field(default_factory=OrderedDict)
    size_bytes: int = 0


class ResponseStore:
    """All stored responses."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        max_age_s: float = MAX_AGE_S,
    ) -> None:
        self._clock = clock
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_response_bytes = min(max_response_bytes, max_bytes)
        self._max_age_s = max_age_s
        self._shelves: dict[str, _Shelf] = {}

    def keep(self, key: str, stored: StoredResponse) -> bool:
        """Keep a response for its key; False where it is too large."""
        size_bytes = stored.measure()
        if size_bytes > self._max_response_bytes:
            return False
        self.delete(key, stored.id)
        shelf = self._shelves.setdefault(key, _Shelf())
        shelf.entries[stored.id] = _StoredEntry(stored, size_bytes, self._clock())
        shelf.size_bytes += size_bytes
        while self.count > self._max_responses or self.size_bytes > self._max_bytes:
            self._drop_one()
        return True

    def get(self, key: str, response_id: str) -> StoredResponse | None:
        """The key's response of this name; None where it has none."""
        self._forget_old()
        shelf = self._shelves.get(key)
        kept = None if shelf is None else shelf.entries.get(response_id)
        return None if kept is None else kept.stored

    def delete(self, key: str, response_id: str) -> bool:
        """Forget the key's response of this name; False where it has none."""
        if self.get(key, response_id) is None:
            return False
        self._remove(key, response_id)
        return True

    @property
    def count(self) -> int:
        """Responses that are kept."""
        return sum(len(shelf.entries) for shelf in self._shelves.values())

    @property
    def size_bytes(self) -> int:
        """Bytes that they take."""
        return sum(shelf.size_bytes for shelf in self._shelves.values())

    def _drop_one(self) -> None:
        by_count = self.count > self._max_responses
        key, shelf = max(
            self._shelves.items(), key=lambda item: len(item[1].entries) if by_count else item[1].size_bytes
        )
        self._remove(key, next(iter(shelf.entries)))

    def _forget_old(self) -> None:
        since_s = self._clock() - self._max_age_s
        for key, shelf in list(self._shelves.items()):
            while shelf.entries and next(iter(shelf.entries.values())).at_s < since_s:
                self._remove(key, next(iter(shelf.entries)))

    def _remove(self, key: str, response_id: str) -> None:
        shelf = self._shelves[key]
        shelf.size_bytes -= shelf.entries.pop(response_id).size_bytes
        if not shelf.entries:
            del self._shelves[key]


def conversation_after(conversation: Sequence[Message], answer: Message) -> tuple[Message, ...]:
    """What a later request goes on with."""
    return (*conversation, answer)
