"""The upstream side of one stream of one session to its next hop: used by the client and by every hop but the tail.

One gRPC stream per session and link (F2). Sending never waits for the network: messages go to a bounded outbox that a
task of its own drains; credits (F1) keep it from filling. Owns no session rules.

- `introduce`: who opens a call signs its metadata (R15): hops with their identity, clients with their session's key.
  What is signed names the callee and its certificate, the method and what the call begins with, so it is of no use to
  another machine or for another call; a nonce and the time keep it from being used twice.
- `LivenessWatch`: is the other machine there (R10)? Every part that is written must be receipted by the other side's
  event loop, which answers whatever its compute thread does: a machine in a forward of ten seconds is slow and not
  dead, a stopped one is silent. Parts are counted, not bytes, so a large frame on a slow link shows progress long
  before it has arrived. Time in which this program itself did not run (a lid that was closed) is excused.
- `Uplink`: what one program sends over all its links together, counted, and held below a rate where its owner wants
  that. It is paced here because the system's limits need root, and gRPC hands no socket out. Before a part is written
  it waits for its turn, so what is unwritten does not count as unreceipted. Small messages (pings, receipts, picks) are
  charged and never wait. Frames are cut into parts of a few milliseconds, so that links take turns.
- `packed`: many rows leave packed (F6) where the other side reads that and it pays. Packing and unpacking cost a core
  some 6 ms per MB of bf16 rows and save a third of it, which a link of 450 Mbit/s carries in that time. A link does not
  know its rate, so its round trip decides: below `NEAR_MS` the machines are in one building, whose network is faster
  than the coder. What an owner's limit lets through is always slower.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import grpc
import grpc.aio
import msgpack

from swarm.base.errors import HopClosed, HopError, HopMisbehaved, HopTimeout, RemoteProtocolError, Unreachable
from swarm.base.ids import PeerId
from swarm.base.tasks import TaskScope
from swarm.link.dial import Connection, plain_reason
from swarm.link.endpoint import Endpoint
from swarm.protocol import wire
from swarm.protocol.frames import rows_of, split, with_rows
from swarm.protocol.limits import MAX_KEY_BYTES, MAX_SIGNATURE_BYTES, NONCE_BYTES, TIME_BYTES
from swarm.protocol.messages import (
    Ack,
    Attach,
    Attached,
    Downstream,
    Frame,
    Ping,
    Pong,
    RouteHop,
    Rows,
    Snapshot,
    SweepFrame,
    Upstream,
)
from swarm.protocol.packed_rows import pack, unpack
from swarm.protocol.wire import PART_BYTES

RECEIPT_S = 0.1
"""How long the receiving side gathers parts before it sends a receipt."""
SILENCE_S = 0.5 + RECEIPT_S
ROUND_TRIPS = 4
"""A link is silent when something is unreceipted for so many round trips and `SILENCE_S`."""


@dataclass(slots=True)
class LivenessWatch:
    """What was written to the other side, and what it receipted.

    Attributes:
        written: parts that were written so far.
        receipted: parts of those that the other side has.
        progress_s: when the other side was last known to live, on the caller's clock.
    """

    written: int = 0
    receipted: int = 0
    progress_s: float = 0.0

    def write(self, now_s: float) -> None:
        """A part is about to be written."""
        if self.written == self.receipted:
            self.progress_s = now_s
        self.written += 1

    def receipt(self, parts: int, now_s: float) -> None:
        """The other side has so many parts; a repeated or stale receipt is no progress."""
        if self.receipted < parts <= self.written:
            self.receipted = parts
            self.progress_s = now_s

    def excuse(self, seconds: float) -> None:
        """Leave out so many seconds in which this side itself did not run."""
        self.progress_s += seconds

    def is_silent(self, now_s: float, rtt_s: float) -> bool:
        """Whether something is unreceipted for longer than the link and an event loop can take."""
        return self.written > self.receipted and now_s - self.progress_s > ROUND_TRIPS * rtt_s + SILENCE_S


async def pause(seconds: float) -> float:
    """Sleep; returns how many seconds longer that took, because this program was not run or was busy."""
    started = time.monotonic()
    await asyncio.sleep(seconds)
    return max(time.monotonic() - started - seconds, 0.0)


SMALL_BYTES: Final = 2_048
"""A message up to this size is sent at once."""
BURST_S: Final = 0.25
"""So much of the rate may be saved up: a tree's rows then leave as fast as the line is."""
PART_S: Final = 0.02
"""How long one part holds up the others."""
SMALLEST_PART_BYTES: Final = 4_096

CountBytes = Callable[[int], None]
"""Called with the number of bytes of every part that was written."""


def ignore_bytes(count: int) -> None:
    """Count nothing."""


class Uplink:
    """The one way out of a program.

    Attributes:
        mbit_per_s: the limit; None for none.
        part_bytes: the largest part of a frame that is written at a time.
    """

    def __init__(
        self,
        count: CountBytes = ignore_bytes,
        mbit_per_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Have sent nothing.

        Args:
            count: told of every part that was written.
            mbit_per_s: 10⁶ bits of payload a second, at most, over any longer time.
        """
        self.mbit_per_s = mbit_per_s
        self.sent = count
        self._seconds_per_byte = 0.0 if mbit_per_s is None else 8 / (mbit_per_s * 1e6)
        fair = PART_BYTES if mbit_per_s is None else int(PART_S / self._seconds_per_byte)
        self.part_bytes = min(max(fair, SMALLEST_PART_BYTES), PART_BYTES)
        self._clock = clock
        self._sleep = sleep
        self._paid_until = float("-inf")

    @property
    def is_limited(self) -> bool:
        return self.mbit_per_s is not None

    async def turn(self, count: int) -> None:
        """Wait until a part of so many bytes may be written; who asked first goes first."""
        if self.mbit_per_s is None:
            return
        now = self._clock()
        begin = max(self._paid_until, now - BURST_S)
        self._paid_until = begin + count * self._seconds_per_byte
        if count > SMALL_BYTES and begin > now:
            await self._sleep(begin - now)


NEAR_MS: Final = 1.0
"""Machines with a shorter round trip send rows as they are."""
THREAD_BYTES: Final = 1 << 20
"""Rows of more bytes are packed and unpacked on a thread. For fewer (4 and 2 ms) the event loop would hardly wait less:
two threads hand the interpreter over every 5 ms."""

F = TypeVar("F", bound=Frame)


async def packed(message: F, rtt_ms: float, uplink: Uplink) -> F:
    """A frame for a machine that reads packed rows, as it should leave."""
    is_near = rtt_ms < NEAR_MS and not uplink.is_limited
    return message if is_near else await _changed(message, pack)


async def unpacked(message: F) -> F:
    """A frame that arrived, its rows as the sender had them.

    Raises:
        RemoteProtocolError: they cannot be unpacked.
    """
    rows = rows_of(message)
    return message if rows is None or not rows.is_packed else await _changed(message, unpack)


async def _changed(message: F, change: Callable[[Rows], Rows]) -> F:
    rows = rows_of(message)
    if rows is None or rows.size_bytes <= THREAD_BYTES:
        return with_rows(message, change)
    return await asyncio.to_thread(with_rows, message, change)


KEY, SIGNATURE, NONCE = "canopy-key-bin", "canopy-sig-bin", "canopy-nonce-bin"
_DOMAIN = b"canopy-dial\n"
_LONGEST = {KEY: MAX_KEY_BYTES, SIGNATURE: MAX_SIGNATURE_BYTES, NONCE: NONCE_BYTES + TIME_BYTES}

Metadata = tuple[tuple[str, bytes], ...]


class Signer(Protocol):
    """A key of whoever calls."""

    @property
    def public_key(self) -> bytes:
        """At most 1,024 bytes."""

    def sign(self, data: bytes) -> bytes:
        """A signature of at most 512 bytes."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """What came with a call.

    Attributes:
        public_key: of whoever calls.
        signature: over `signed`.
        nonce: 16 random bytes.
        time_ms: of the caller's clock: milliseconds since 1970.
    """

    public_key: bytes
    signature: bytes
    nonce: bytes
    time_ms: int

    def signed(self, peer: PeerId, digest: bytes, method: str, subject: bytes) -> bytes:
        """What the caller signs.

        Args:
            digest: SHA-256 of that machine's certificate; empty in an insecure swarm.
        """
        begins = hashlib.sha256(subject).digest()
        packed: bytes = msgpack.packb([peer, digest, method, self.nonce, self.time_ms, begins])
        return _DOMAIN + packed


def introduce(
    signer: Signer, endpoint: Endpoint, method: str, subject: bytes, clock: Callable[[], float] = time.time
) -> Metadata:
    """The metadata of one call.

    Args:
        subject: what the call begins with: an Attach's signature, else the bytes of the first message.
        clock: seconds since 1970.
    """
    made = Introduction(signer.public_key, b"", secrets.token_bytes(NONCE_BYTES), round(clock() * 1e3))
    signature = signer.sign(made.signed(endpoint.peer, endpoint.digest, method, subject))
    return ((KEY, made.public_key), (SIGNATURE, signature), (NONCE, made.nonce + made.time_ms.to_bytes(TIME_BYTES)))


async def send_receipt(channel: grpc.aio.Channel, sealed: bytes, timeout_s: float) -> None:
    """Tell the machine that comes next of a client's receipt (S7); one of a release that knows none takes no harm."""
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(wire.RECEIPT)
    with suppress(grpc.RpcError, grpc.aio.BaseError):
        await call(sealed, timeout=timeout_s)


def introduction_in(metadata: Iterable[tuple[str, str | bytes]]) -> Introduction:
    """The introduction of a call; its signature is not checked yet.

    Raises:
        RemoteProtocolError: it has none, or one that no signer makes.
    """
    found: dict[str, bytes] = {}
    for key, value in metadata:
        if key not in _LONGEST:
            continue
        if key in found or not isinstance(value, bytes) or len(value) > _LONGEST[key]:
            raise RemoteProtocolError(key, f"is there twice, or is longer than {_LONGEST[key]} bytes")
        found[key] = value
    if found.keys() != _LONGEST.keys() or len(found[NONCE]) != _LONGEST[NONCE]:
        raise RemoteProtocolError("introduction", "the caller does not say who it is; an older version, perhaps")
    nonce, time_ms = found[NONCE][:NONCE_BYTES], int.from_bytes(found[NONCE][NONCE_BYTES:])
    return Introduction(found[KEY], found[SIGNATURE], nonce, time_ms)


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
        reads_packed: the other side reads packed rows.
        watch: the parts that were written and receipted.
        delivered: the last sequence of which the other side has every part, as it receipted.
    """

    hop: RouteHop
    outbox: asyncio.Queue[Downstream]
    is_cold: bool = False
    rtt_ms: float = 0.0
    round_trips: deque[float] = field(default_factory=lambda: deque(maxlen=ROUND_TRIPS_KEPT))
    reads_packed: bool = False
    watch: LivenessWatch = field(default_factory=LivenessWatch)
    delivered: int = 0
    _queued: int = 0
    _written: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=OUTBOX_MESSAGES))
    _pings: dict[int, float] = field(default_factory=dict)
    _pinged_s: float = field(init=False)
    _sent_s: float = field(init=False)
    _opened_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._pinged_s = self._sent_s = self._opened_s = time.monotonic()

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
            case Attached(received=received, reads_packed=reads_packed):
                self.delivered, self.reads_packed = max(self.delivered, received or 0), reads_packed
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
    def shortest_ms(self) -> float:
        """The shortest round trip that was measured lately."""
        return min(self.round_trips, default=self.rtt_ms)

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
        attach: first message of the stream; the hop stands at `attach.index`, or is the replica of the one that does.
        listener: called in the event loop with every message, and once with the HopError that ended the stream.
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
            frame = await packed(message, link.shortest_ms, uplink) if link.reads_packed else message
            for part in split(frame, uplink.part_bytes):
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
