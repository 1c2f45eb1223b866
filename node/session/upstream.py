"""The downstream side of a link: what this node sends back to the peer that opened the stream. Never waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from swarm.protocol import wire
from swarm.protocol.messages import Ack, Upstream
from swarm.transport.link import RECEIPT_S

OUTBOX_MESSAGES = 256


class StreamWriter(Protocol):
    """The part of a gRPC context that writes."""

    async def write(self, message: bytes) -> None:
        """Send one message."""


class UpstreamStream:
    """One incoming stream's way back; an unread outbox ends the stream.

    Receipts gather for a moment: one for each sweep would cost every hop two wake-ups while it computes.

    Attributes:
        receipt: makes a receipt from the number of parts that arrived.
        ended: set at the end; what is queued then still leaves.
    """

    def __init__(self) -> None:
        self.receipt: Callable[[int], Ack] = lambda parts: Ack(0, parts)
        self._parts = 0
        self._receipt_due: asyncio.TimerHandle | None = None
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

    def count_part(self) -> None:
        """A part arrived; its receipt follows soon."""
        self._parts += 1
        if self._receipt_due is None:
            self._receipt_due = asyncio.get_running_loop().call_later(RECEIPT_S, self._send_receipt)

    def _send_receipt(self) -> None:
        self._receipt_due = None
        self.send(self.receipt(self._parts))

    def end(self) -> None:
        """Finish the stream when what is queued has left."""
        if not self.ended.is_set():
            self.ended.set()
            if self._receipt_due is not None:
                self._receipt_due.cancel()
            self._outbox.put_nowait(None)

    async def drain(self, writer: StreamWriter) -> None:
        """Write until the end."""
        while (message := await self._outbox.get()) is not None:
            await writer.write(wire.encode_upstream(message))
