"""What a node has yet to say over MQTT: the newest status, the newest metrics, a few events. Bounded; never waits.

Status and metrics are taken when they leave, so only that they are due is kept: old ones are never sent. Of events the
oldest give way.
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
    """dropped: events that gave way. leaving: the node leaves; the status is the last thing to be said."""

    def __init__(self) -> None:
        self.dropped = 0
        self.leaving = False
        self._events: deque[PendingEvent] = deque()
        self._wanted: set[MessageKind] = set()
        self._changed = asyncio.Event()

    def want(self, part: MessageKind) -> None:
        """The newest status or metrics are due."""
        self._wanted.add(part)
        self._changed.set()

    def tell(self, event: EventKind, text: str) -> None:
        """Something happened."""
        if len(self._events) >= MAX_EVENTS:
            self._events.popleft()
            self.dropped += 1
        self._events.append(PendingEvent(event, text))
        self._changed.set()

    def leave(self) -> None:
        """Nothing more is said but what waits, and then the status."""
        self.leaving = True
        self.want(MessageKind.STATUS)

    async def next(self) -> Due:
        """What is to be said next; it stays due until it was `said`."""
        while (due := self._first()) is None:
            self._changed.clear()
            await self._changed.wait()
        if isinstance(due, MessageKind):
            self._wanted.discard(due)  # what changes from now on is news
        return due

    def said(self, due: Due) -> None:
        """It has left."""
        if self._events and self._events[0] is due:
            self._events.popleft()

    def _first(self) -> Due | None:
        if MessageKind.STATUS in self._wanted and not self.leaving:
            return MessageKind.STATUS
        if self._events:
            return self._events[0]
        if self.leaving:
            return MessageKind.STATUS
        return MessageKind.METRICS if MessageKind.METRICS in self._wanted else None
