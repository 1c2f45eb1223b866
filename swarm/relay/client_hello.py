"""The first bytes of a TLS connection: which protocols its client names (ALPN, RFC 7301). Pure.

A TLS port tells by them what a connection is for, before it answers anything.
"""

from __future__ import annotations

from typing import Final

from swarm.errors import RemoteProtocolError

MAX_HELLO_BYTES: Final = 8_192
"""Of a ClientHello; one with keys of several kinds has 2 KiB."""
_RECORD_HEADER, _MESSAGE_HEADER = 5, 4
_HANDSHAKE, _CLIENT_HELLO, _ALPN = 22, 1, 16
_MAX_RECORD: Final = 16_384


def named_protocols(data: bytes) -> tuple[str, ...] | None:
    """The protocols that a ClientHello names, the preferred one first; empty where it names none.

    Args:
        data: what came until now.

    Returns:
        None where more must come.

    Raises:
        RemoteProtocolError: this is no ClientHello, or longer than `MAX_HELLO_BYTES`.
    """
    message = _message(data)
    if message is None:
        if len(data) >= MAX_HELLO_BYTES:
            raise _odd("too long")
        return None
    hello = _Fields(message)
    hello.skip(2 + 32)  # version, random
    for length_bytes in (1, 2, 1):  # session id, cipher suites, compression methods
        hello.vector(length_bytes)
    if not hello.left:
        return ()
    extensions = _Fields(hello.vector(2))
    while extensions.left:
        kind, content = extensions.number(2), extensions.vector(2)
        if kind == _ALPN:
            names = _Fields(_Fields(content).vector(2))
            found = []
            while names.left:
                found.append(names.vector(1).decode("ascii", "replace"))
            return tuple(found)
    return ()


def _message(data: bytes) -> bytes | None:
    """The body of the ClientHello, which may come in several records; None where more must come."""
    body, at = b"", 0
    while True:
        if data[at : at + 1] not in (b"", bytes([_HANDSHAKE])) or data[at + 1 : at + 2] not in (b"", b"\x03"):
            raise _odd("no TLS")
        header = data[at : at + _RECORD_HEADER]
        if len(header) < _RECORD_HEADER:
            return None
        length = int.from_bytes(header[3:], "big")
        if not 0 < length <= _MAX_RECORD:
            raise _odd("a record of an odd length")
        body += data[at + _RECORD_HEADER : at + _RECORD_HEADER + length]
        at += _RECORD_HEADER + length
        if body[:1] not in (b"", bytes([_CLIENT_HELLO])):
            raise _odd("another message")
        if len(body) >= _MESSAGE_HEADER:
            wanted = _MESSAGE_HEADER + int.from_bytes(body[1:_MESSAGE_HEADER], "big")
            if wanted > MAX_HELLO_BYTES:
                raise _odd("too long")
            if len(body) >= wanted:
                return body[_MESSAGE_HEADER:wanted]
        if at > len(data):
            return None


class _Fields:
    """Reads TLS's fields one after another."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def left(self) -> int:
        return len(self._data)

    def skip(self, count: int) -> bytes:
        if count > len(self._data):
            raise _odd("it ends early")
        taken, self._data = self._data[:count], self._data[count:]
        return taken

    def number(self, length_bytes: int) -> int:
        return int.from_bytes(self.skip(length_bytes), "big")

    def vector(self, length_bytes: int) -> bytes:
        return self.skip(self.number(length_bytes))


def _odd(why: str) -> RemoteProtocolError:
    return RemoteProtocolError("ClientHello", f"this begins no TLS connection: {why}")
