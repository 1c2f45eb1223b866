"""The downstream side of a link: what this node says back to whoever opened the stream. Bounded, never waits."""

from __future__ import annotations

import asyncio
from typing import Protocol

from swarm import wire
from swarm.messages import Upstream

OUTBOX_MESSAGES = 256


class StreamWriter(Protocol):
    """The part of a gRPC context that writes."""

    async def write(self, message: bytes) -> None:
        """Send one message."""


class UpstreamSide:
    """One incoming stream's way back; an unread outbox ends the stream."""

    def __init__(self) -> None:
        self._outbox: asyncio.Queue[Upstream | None] = asyncio.Queue(OUTBOX_MESSAGES + 1)
        self.ended = asyncio.Event()

    def send(self, message: Upstream) -> None:
        """Queue a message; nothing is sent after the end."""
        if self.ended.is_set():
            return
        if self._outbox.qsize() >= OUTBOX_MESSAGES:
            self.end()
            return
        self._outbox.put_nowait(message)

    def end(self) -> None:
        """Finish the stream when what is queued has left."""
        if not self.ended.is_set():
            self.ended.set()
            self._outbox.put_nowait(None)

    async def drain(self, writer: StreamWriter) -> None:
        """Write until the end."""
        while (message := await self._outbox.get()) is not None:
            await writer.write(wire.encode_upstream(message))
