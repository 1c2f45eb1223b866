"""The upstream side of one stream of one session to its next hop: used by the client and by every hop but the tail.

One gRPC stream per session and link (F2). Sending never waits for the network: messages go to a bounded outbox that a
task of its own drains; credits (F1) keep it from filling. Owns no session rules.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio

from swarm.errors import HopClosed, HopError, HopMisbehaved, HopTimeout, RemoteProtocolError, Unreachable
from swarm.protocol import wire
from swarm.protocol.frames import split
from swarm.protocol.messages import (
    Ack,
    Attach,
    Attached,
    Downstream,
    Ping,
    Pong,
    RouteHop,
    Snapshot,
    SweepFrame,
    Upstream,
)
from swarm.runtime.tasks import TaskScope
from swarm.transport.dial import Connection, plain_reason
from swarm.transport.introduction import Signer, introduce
from swarm.transport.liveness import LivenessWatch, pause
from swarm.transport.uplink import Uplink

OUTBOX_MESSAGES = 256
Stream = grpc.aio.StreamStreamCall[bytes, bytes]

PING_S = 0.25
"""Between pings while a session works: silence is noticed soon after."""
IDLE_PING_S = 1.5
WORKING_S = 10.0
"""How long after its last message a session counts as working."""
ROUND_TRIPS_KEPT = 8
"""The shortest of so many is the network's; the others waited for a program that was busy."""
WARM_UP_PINGS = 8
WARM_UP_BYTES = 32_768
"""Padding of each: 256 KiB in all. Without it BBR paces a connection that carries small bursts only at what they filled
(13 KB took 12 ms longer at 50 ms round trip), and slow start needs several round trips for a large tree."""


@dataclass(slots=True)
class Link:
    """A running stream; made by `open_link`.

    Attributes:
        hop: the machine at the other end.
        outbox: messages that were not written yet.
        is_cold: the connection is to be warmed up before a tree needs it.
        rtt_ms: latest measured round trip of a ping, event loop to event loop; before one is known, half the time that
            the machine took to take the stream; 0 before that.
        round_trips: the latest round trips, in milliseconds.
        watch: the parts that were written and receipted.
        delivered: the last sequence of which the other side has every part, as it receipted.
    """

    hop: RouteHop
    outbox: asyncio.Queue[Downstream]
    is_cold: bool = False
    rtt_ms: float = 0.0
    round_trips: deque[float] = field(default_factory=lambda: deque(maxlen=ROUND_TRIPS_KEPT))
    watch: LivenessWatch = field(default_factory=LivenessWatch)
    delivered: int = 0
    _queued: int = 0
    _written: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=OUTBOX_MESSAGES))
    _pings: dict[int, float] = field(default_factory=dict)
    _pinged_s: float = field(default_factory=time.monotonic)
    _sent_s: float = field(default_factory=time.monotonic)
    _opened_s: float = field(default_factory=time.monotonic)

    def send(self, message: Downstream) -> None:
        """Queue a message.

        Raises:
            HopClosed: the outbox is full, because the peer stopped reading.
        """
        if not isinstance(message, Ping):
            self._sent_s = time.monotonic()
        try:
            self.outbox.put_nowait(message)
        except asyncio.QueueFull:
            raise HopClosed(self.hop.peer, str(self.hop.span), "reads too slowly; its link was given up") from None
        self._queued += isinstance(message, SweepFrame | Snapshot)

    def take(self, message: Upstream) -> None:
        """Note what concerns the link itself."""
        match message:
            case Attached(received=received):
                self.delivered = max(self.delivered, received or 0)
                if self.rtt_ms == 0:  # a machine that stops before the first pong is silent too
                    self.rtt_ms = (time.monotonic() - self._opened_s) * 1e3 / 2  # dialling takes a round trip as well
            case Pong(nonce=nonce) if nonce in self._pings:
                self.rtt_ms = (time.perf_counter() - self._pings.pop(nonce)) * 1e3
                self.round_trips.append(self.rtt_ms)
            case Ack():
                self.watch.receipt(message.parts, time.monotonic())
                self._note_receipts()
            case _:
                pass

    def wrote(self, message: Downstream) -> None:
        """All parts of a message were written."""
        if isinstance(message, SweepFrame | Snapshot):
            sequence = message.sequence if isinstance(message, Snapshot) else message.sweep.sequence
            self._queued -= 1
            self._written.append((self.watch.written, sequence))
            self._note_receipts()

    @property
    def is_sending(self) -> bool:
        """Whether a sweep or a snapshot was sent and is not receipted yet."""
        return self._queued > 0 or bool(self._written)

    def _note_receipts(self) -> None:
        while self._written and self._written[0][0] <= self.watch.receipted:
            self.delivered = self._written.popleft()[1]

    @property
    def ping_in_s(self) -> float:
        """How long until the next ping is due, 0 or less when it is.

        Whatever is sent is receipted like a ping and stands for one; only the round trip wants one of its own then.
        """
        now_s = time.monotonic()
        quiet_s = PING_S if now_s - self._sent_s < WORKING_S else IDLE_PING_S
        return min(max(self._sent_s, self._pinged_s) + quiet_s, self._pinged_s + IDLE_PING_S) - now_s

    @property
    def is_silent(self) -> bool:
        """Whether the other side owes a receipt for too long (R10); not before it took the stream."""
        return self.rtt_ms > 0 and self.watch.is_silent(time.monotonic(), self.rtt_ms / 1e3)

    def warm_up(self) -> None:
        """Fill a cold connection for a moment, so that TCP knows how fast it is before a tree needs it."""
        if self.is_cold:
            self.is_cold = False
            for _ in range(WARM_UP_PINGS):
                self.send(Ping(0, bytes(WARM_UP_BYTES)))

    def ping(self) -> None:
        """Measure the link once more; unanswered pings are forgotten beyond a few."""
        nonce = max(self._pings, default=0) + 1
        if len(self._pings) >= 4:
            self._pings.pop(min(self._pings))
        self._pings[nonce] = time.perf_counter()
        self._pinged_s = time.monotonic()
        self.send(Ping(nonce))


@asynccontextmanager
async def open_link(
    connection: Connection,
    signer: Signer,
    attach: Attach,
    listener: Callable[[Upstream | HopError], None],
    uplink: Uplink,
) -> AsyncIterator[Link]:
    """Open the stream to a hop and send the attach.

    Args:
        connection: to that hop.
        signer: who opens it.
        attach: first message of the stream; the hop stands at `attach.index`, or is the replica of the one that does.
        listener: called in the event loop with every message, and once with the HopError that ended the stream.
        uplink: by which everything leaves.
    """
    hop = RouteHop(connection.endpoint.peer, attach.route[attach.index].span)
    is_cold = connection.is_cold and not uplink.is_limited  # what warms up would come before the rows, and cost as much
    link = Link(hop, asyncio.Queue(OUTBOX_MESSAGES), is_cold)
    link.send(attach)
    metadata = introduce(signer, connection.endpoint, wire.LINK, attach.signature)
    call: Stream = connection.channel.stream_stream(wire.LINK)(metadata=metadata)
    async with TaskScope() as scope:
        scope.spawn(_write(call, link, uplink))
        scope.spawn(_read(call, link, listener, is_member=connection.is_member))
        scope.spawn(_watch(link, listener))
        try:
            yield link
        finally:
            try:
                await _say_goodbye(call, link)
            finally:
                call.cancel()


async def _write(call: Stream, link: Link, uplink: Uplink) -> None:
    try:
        while True:
            message = await link.outbox.get()
            for part in split(message, uplink.part_bytes):
                await uplink.turn(len(part))
                link.watch.write(time.monotonic())
                await call.write(part)
                uplink.sent(len(part))
            link.wrote(message)
            link.outbox.task_done()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # the reader sees the same end and knows why


async def _read(
    call: Stream, link: Link, listener: Callable[[Upstream | HopError], None], *, is_member: bool = False
) -> None:
    error: HopError = HopClosed(link.hop.peer, str(link.hop.span), "ended the session")
    try:
        while isinstance(data := await call.read(), bytes):
            message = wire.decode_upstream(data)
            link.take(message)
            if isinstance(message, Attached):
                link.ping()
                link.warm_up()
            listener(message)
    except grpc.aio.AioRpcError as failure:
        reason = plain_reason(failure, is_member=is_member)
        error = Unreachable(link.hop.peer, str(link.hop.span), f"the stream broke ({reason})")
    except RemoteProtocolError as failure:
        error = HopMisbehaved(link.hop.peer, str(link.hop.span), f"sent what nobody can read: {failure}")
    listener(error)


async def _watch(link: Link, listener: Callable[[Upstream | HopError], None]) -> None:
    """Ping, and give the link up when nothing is receipted any more."""
    while not link.is_silent:
        link.watch.excuse(await pause(max(link.ping_in_s, 0.0)))
        if link.ping_in_s <= 0:
            link.ping()
    error = HopTimeout(link.hop.peer, str(link.hop.span), "is silent: nothing that was sent to it is receipted")
    listener(error)


async def _say_goodbye(call: Stream, link: Link) -> None:
    """Let queued messages (a Close, usually) leave before the stream is cancelled."""
    if call.done():
        return  # broken: what is queued will never leave
    try:
        async with asyncio.timeout(1.0):
            await link.outbox.join()
            await call.done_writing()
            await call.code()
    except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
