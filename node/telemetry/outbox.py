"""What a node has yet to publish over MQTT: the newest status and metrics, a few events. Bounded; never blocks.

Status and metrics are made when they leave, so only the fact that they are due is kept: old ones are never sent. When
there are too many events, the oldest are dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final

from swarm.telemetry.messages import EventKind, MessageKind

MAX_EVENTS: Final = 32
"""Fewer than `swarm.telemetry.guard.BURST_MESSAGES`: what waited for a broker may come all at once."""


@dataclass(frozen=True, slots=True)
class PendingEvent:
    """An event that has not left yet."""

    event: EventKind
    text: str


Due = PendingEvent | MessageKind


class Outbox:
    """A queue whose order is by kind: status first, then events, then metrics.

    Attributes:
        dropped: how many events were dropped.
        leaving: the node leaves; the status is the last message.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self.leaving = False
        self._events: deque[PendingEvent] = deque()
        self._requested: set[MessageKind] = set()
        self._changed = asyncio.Event()

    def request(self, part: MessageKind) -> None:
        """The newest status or metrics are due."""
        self._requested.add(part)
        self._changed.set()

    def add_event(self, event: EventKind, text: str) -> None:
        """Something happened."""
        if len(self._events) >= MAX_EVENTS:
            self._events.popleft()
            self.dropped += 1
        self._events.append(PendingEvent(event, text))
        self._changed.set()

    def leave(self) -> None:
        """Publish nothing more but what waits, and then the status."""
        self.leaving = True
        self.request(MessageKind.STATUS)

    async def next(self) -> Due:
        """What is to be published next; it stays due until `sent`."""
        while (due := self._first()) is None:
            self._changed.clear()
            await self._changed.wait()
        if isinstance(due, MessageKind):
            self._requested.discard(due)  # what changes from now on is news
        return due

    def sent(self, due: Due) -> None:
        """It has left."""
        if self._events and self._events[0] is due:
            self._events.popleft()

    def _first(self) -> Due | None:
        if MessageKind.STATUS in self._requested and not self.leaving:
            return MessageKind.STATUS
        if self._events:
            return self._events[0]
        if self.leaving:
            return MessageKind.STATUS
        return MessageKind.METRICS if MessageKind.METRICS in self._requested else None
