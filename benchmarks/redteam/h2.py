"""HTTP/2 by hand, for senders that keep no rule of it. Pure: bytes only."""

from __future__ import annotations

import enum
import struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1


class FrameType(enum.IntEnum):
    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    WINDOW_UPDATE = 8
    CONTINUATION = 9


def h2_frame(kind: FrameType, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def opening(**settings: int) -> bytes:
    """What a connection begins with: the preface, then settings, which are given as `_NUMBER=value`."""
    pairs = b"".join(struct.pack(">HI", int(name.lstrip("_")), value) for name, value in settings.items())
    return PREFACE + h2_frame(FrameType.SETTINGS, payload=pairs)


def call_headers(path: str, authority: str, *, is_tls: bool, encoding: str = "") -> bytes:
    """A header block that begins a gRPC call, with nothing in it compressed.

    Args:
        encoding: Of the call's messages, where they are compressed.
    """
    block = b"\x83" + (b"\x87" if is_tls else b"\x86")  # :method POST, :scheme
    block += b"\x04" + _text(path) + b"\x01" + _text(authority)
    block += b"\x0f\x10" + _text("application/grpc") + b"\x00" + _text("te") + _text("trailers")
    if encoding:
        block += b"\x00" + _text("grpc-encoding") + _text(encoding)
    return block


def begin_call(stream: int, block: bytes, *, ends: bool = False) -> bytes:
    """The frame that opens a stream."""
    return h2_frame(FrameType.HEADERS, END_HEADERS | (END_STREAM if ends else 0), stream, block)


def data(stream: int, payload: bytes) -> bytes:
    """A frame of data, which must not be longer than 16,384 bytes."""
    return h2_frame(FrameType.DATA, 0, stream, payload)


def message(body: bytes, *, is_compressed: bool = False) -> bytes:
    """A gRPC message as it lies in data frames."""
    return struct.pack(">BI", is_compressed, len(body)) + body


def reset(stream: int) -> bytes:
    """A frame that cancels a stream."""
    return h2_frame(FrameType.RST_STREAM, 0, stream, struct.pack(">I", 8))


def _text(text: str) -> bytes:
    raw = text.encode()
    assert len(raw) < 127, "a length of one byte"
    return bytes([len(raw)]) + raw
