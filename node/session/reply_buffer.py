"""Replies of one session at the tail: kept until the client holds them, sent on the newest reply stream (R6)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from swarm.protocol.messages import Ping, Reply
from swarm.transport.link import ROUND_TRIPS_KEPT

MAX_ROUND_TRIP_MS = 120_000.0


class ReplyBuffer:
    """Bounded by the session's credits: the client never has more than W sweeps unanswered (F1).

    Attributes:
        link_ms: half the shortest of the latest round trips to the client on the reply stream.
    """

    def __init__(self) -> None:
        self.link_ms = 0.0
        self._round_trips: deque[float] = deque(maxlen=ROUND_TRIPS_KEPT)
        self._kept: dict[int, Reply] = {}
        self._reader = 0
        self._sent = 0
        self._ping: Ping | None = None
        self._closed = False
        self._changed = asyncio.Event()

    def put(self, reply: Reply, acked: int) -> None:
        """Keep a reply and forget those that the client holds."""
        self._kept = {sequence: kept for sequence, kept in self._kept.items() if sequence > acked}
        self._kept[reply.sequence] = reply
        self._changed.set()

    def measured(self, round_trip_ms: float) -> None:
        """A ping was answered; the time that the client reports is bounded."""
        self._round_trips.append(min(round_trip_ms, MAX_ROUND_TRIP_MS))
        self.link_ms = min(self._round_trips) / 2

    def ping(self, ping: Ping) -> None:
        """Send a ping when the stream is next free; only the newest one waits."""
        self._ping = ping
        self._changed.set()

    def resend(self, sequence: int) -> None:
        """Send a kept reply once more, because its sweep came again (P9)."""
        if sequence in self._kept:
            self._sent = min(self._sent, sequence - 1)
            self._changed.set()

    def close(self) -> None:
        """End the reply stream."""
        self._closed = True
        self._changed.set()

    async def stream(self, acked: int) -> AsyncIterator[Reply | Ping]:
        """Everything kept beyond `acked`, then what comes, and pings; a newer stream ends this one."""
        self._reader += 1
        reader, self._sent = self._reader, acked
        self._changed.set()
        while reader == self._reader and not self._closed:
            waiting = [sequence for sequence in self._kept if sequence > self._sent]
            if self._ping is not None:
                ping, self._ping = self._ping, None
                yield ping
            elif waiting:
                self._sent = min(waiting)
                yield self._kept[self._sent]
            else:
                self._changed.clear()
                await self._changed.wait()
