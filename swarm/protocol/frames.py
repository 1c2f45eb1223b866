"""Frames in parts (PROTOCOL F2): one message with its row values, cut into parts of at most 1 MiB. Pure, no I/O.

frame = head (protobuf) ‖ row values (as the codec has them, or packed: F6)
parts of one frame arrive in order and never interleave with another frame's
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from swarm.base.errors import LocalProtocolError, RemoteProtocolError
from swarm.protocol.limits import MAX_HEAD_BYTES, HeadLimits
from swarm.protocol.messages import Frame, Reply, Rows, Snapshot, SweepFrame
from swarm.protocol.packed_rows import least_packed_bytes, unpack
from swarm.protocol.wire import PART_BYTES, FramePart, decode_frame, decode_part, encode_frame, encode_part

PART_OVERHEAD_BYTES = 32
"""More than protobuf adds to a part's data."""

M = TypeVar("M", bound=Frame)


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The largest frame that a receiver puts together.

    Attributes:
        head_bytes: of the serialised message.
        rows_bytes: of its row values.
        counts: what the message may hold, checked before it is decoded; None: only what the wire allows.
    """

    head_bytes: int = MAX_HEAD_BYTES
    rows_bytes: int = 256 << 20
    counts: HeadLimits | None = None

    @classmethod
    def of_session(cls, counts: HeadLimits, rows_bytes: int) -> FrameLimits:
        """What a session with these credits may send."""
        return cls(counts.head_bytes, rows_bytes, counts)


def split(message: Frame, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
    """Yield the parts of `message`; without rows it is mostly one.

    Args:
        message: what to send.
        part_bytes: the largest part but for `PART_OVERHEAD_BYTES`; at most `PART_BYTES`.

    Raises:
        LocalProtocolError: the message does not fit the wire.
    """
    head = encode_frame(message)
    rows = rows_of(message)
    values = memoryview(b"" if rows is None else rows.data)
    if rows is not None and values.nbytes != rows.size_bytes and not rows.is_packed:
        raise LocalProtocolError("rows", f"{values.nbytes} bytes of values instead of {rows.size_bytes}")
    for start in range(0, len(head) + len(values), part_bytes):
        end = start + part_bytes
        data = (head[start:end], values[max(0, start - len(head)) : max(0, end - len(head))])
        yield encode_part(len(head), len(values), data) if start == 0 else encode_part(0, 0, data)


class FrameAssembler:
    """Puts one stream's parts together. After an error the stream is lost: the next part needs a new assembler."""

    def __init__(self, limits: FrameLimits | None = None) -> None:
        self._limits = limits or FrameLimits()
        self._head = bytearray()
        self._head_bytes = 0
        self._rows_bytes = 0
        self._message: Frame | None = None
        self._values = memoryview(bytearray())
        self._filled = 0
        self._unread = memoryview(b"")

    def feed(self, part: bytes) -> Frame | None:
        """Take the next part; return the message that it completes, its rows unpacked.

        Raises:
            RemoteProtocolError: the part is malformed, out of place, or more than was announced or is allowed.
        """
        self.take(part)
        message = self.finish()
        return None if message is None else with_rows(message, unpack)

    def take(self, part: bytes) -> int:
        """The first part of `feed`, which takes no time worth mentioning.

        Returns:
            bytes of the head that `finish` will decode now; 0 for none.

        Raises:
            RemoteProtocolError: as `feed`.
        """
        if len(part) > PART_BYTES + PART_OVERHEAD_BYTES:
            raise RemoteProtocolError("part", f"{len(part)} bytes, the limit is 1 MiB of data")
        decoded = decode_part(part)
        self._start(decoded)
        data = memoryview(decoded.data)
        missing = self._head_bytes - len(self._head) + self._rows_bytes - self._filled
        if not 0 < len(data) <= missing:
            raise RemoteProtocolError("part", f"{len(data)} bytes of data where 1 … {missing} were announced")
        head = data[: self._head_bytes - len(self._head)]
        self._head += head
        self._unread = data[len(head) :]
        return self._head_bytes if self._message is None and len(self._head) == self._head_bytes else 0

    def finish(self) -> Frame | None:
        """The second part of `feed`: decode a head that is complete, which takes milliseconds for a large one.

        Rows may still be packed, and `swarm.protocol.packed_rows.unpack` takes milliseconds for many.

        Raises:
            RemoteProtocolError: as `feed`.
        """
        if self._message is None and len(self._head) == self._head_bytes:
            self._message = self._allocate(decode_frame(self._head, self._limits.counts))
        self._fill(self._unread)
        self._unread = memoryview(b"")
        return self._finished()

    def _start(self, part: FramePart) -> None:
        if (part.head_bytes > 0) == (self._head_bytes > 0):
            why = "a frame starts inside another" if self._head_bytes else "a continuation of no frame"
            raise RemoteProtocolError("part", why)
        if part.head_bytes == 0:
            return
        if part.head_bytes > self._limits.head_bytes or part.rows_bytes > self._limits.rows_bytes:
            announced = f"{part.head_bytes} + {part.rows_bytes} bytes announced"
            allowed = f"{self._limits.head_bytes} + {self._limits.rows_bytes}"
            raise RemoteProtocolError("part", f"{announced}, the limits are {allowed}")
        self._head_bytes, self._rows_bytes = part.head_bytes, part.rows_bytes

    def _allocate(self, message: Frame) -> Frame:
        """Give the message its buffer, after the header and the announcement have been found to agree."""
        rows = rows_of(message)
        expected = 0 if rows is None else rows.size_bytes
        if rows is not None and rows.is_packed:
            if not least_packed_bytes(rows) < self._rows_bytes < expected <= self._limits.rows_bytes:
                announced = f"{self._rows_bytes} bytes announced, packed of {expected}"
                raise RemoteProtocolError("rows", f"{announced}; the limit is {self._limits.rows_bytes}")
        elif expected != self._rows_bytes:
            raise RemoteProtocolError("rows", f"{self._rows_bytes} bytes announced, the header says {expected}")
        if rows is None:
            return message
        buffer = bytearray(self._rows_bytes)
        self._values = memoryview(buffer)
        return with_rows(message, lambda _: replace(rows, data=buffer))

    def _fill(self, values: memoryview) -> None:
        self._values[self._filled : self._filled + len(values)] = values
        self._filled += len(values)

    def _finished(self) -> Frame | None:
        if self._message is None or self._filled < self._rows_bytes:
            return None
        message = self._message
        self._head = bytearray()
        self._head_bytes = self._rows_bytes = self._filled = 0
        self._message, self._values = None, memoryview(bytearray())
        return message


def rows_of(message: Frame) -> Rows | None:
    """The hidden rows of a frame, if it has any."""
    return message.rows if isinstance(message, SweepFrame | Reply | Snapshot) else None


def with_rows(message: M, change: Callable[[Rows], Rows]) -> M:
    """The same frame with its rows changed, if it has any."""
    if not isinstance(message, SweepFrame | Reply | Snapshot) or message.rows is None:
        return message
    rows = change(message.rows)
    return message if rows is message.rows else replace(message, rows=rows)
