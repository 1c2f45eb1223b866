"""One TLS port for everything that a machine offers, for networks that let nothing else out.

What a connection is for is told by the protocols that its ClientHello names (ALPN):

    canopy-directory    the DHT peer's libp2p, in this port's TLS
    canopy-relay        what the relay is told (`swarm.reach.relay.openings`), in this port's TLS

This port's own TLS vouches for nobody: what travels inside is encrypted between its two ends. Whoever connects costs
the address that he comes from, as at the relay's own port; the services see a loopback address that stands for it.
"""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar, cast

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.link.certificate import ServerCertificate
from swarm.link.egress.ports import DIRECTORY, RELAY
from swarm.reach.relay.connection import RelayConnection
from swarm.reach.relay.visits import Visit

MAX_HELLO_BYTES: Final = 8_192
"""Of a ClientHello; one with keys of several kinds has 2 KiB."""
_RECORD_HEADER, _MESSAGE_HEADER = 5, 4
_HANDSHAKE, _CLIENT_HELLO, _ALPN = 22, 1, 16
_MAX_RECORD: Final = 16_384


def named_protocols(data: bytes) -> tuple[str, ...] | None:
    """The protocols that a ClientHello names (ALPN, RFC 7301), the preferred one first; empty where it names none.

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


_RECEIVED_BYTES: Final = 65_536
_Step = TypeVar("_Step")


class TlsConnection(RelayConnection):
    """Takes over another connection, and what it has read. Reads only what it is asked for, as that one does."""

    def __init__(self, inner: RelayConnection, context: ssl.SSLContext) -> None:
        self._inner = inner
        self._sock = inner._sock
        self._rest = bytearray()
        self.host, self.address, self.key = inner.host, inner.address, inner.key
        self.is_kept = inner.is_kept
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._came.write(inner._rest)
        self._session = context.wrap_bio(self._came, self._goes, server_side=True)
        self._sending = asyncio.Lock()

    async def shake_hands(self) -> str:
        """Make it secure; the protocol that both ends speak now, empty where they agree on none.

        Raises:
            OSError: the client went, or speaks another TLS.
        """
        await self._run(self._session.do_handshake)
        return self._session.selected_alpn_protocol() or ""

    async def send(self, data: bytes | memoryview) -> None:
        """Write, and wait until the system has taken all of it.

        Raises:
            OSError: the connection was reset.
        """
        await self._run(lambda: self._session.write(data))

    def end_writing(self) -> None:
        """Tell the other end that nothing more comes."""
        with suppress(ssl.SSLError):
            self._session.unwrap()
        if not self._sending.locked():
            with suppress(OSError):
                self._sock.send(self._goes.read())
        super().end_writing()

    async def _receive(self, most: int) -> bytes:
        buffer = memoryview(bytearray(most))
        return bytes(buffer[: await self._fill(buffer)])

    async def _fill(self, buffer: memoryview) -> int:
        try:
            return await self._run(lambda: cast("int", self._session.read(len(buffer), buffer)))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return 0

    async def _run(self, step: Callable[[], _Step]) -> _Step:
        """Take a step of TLS, which may need bytes to come or leave bytes to go."""
        while True:
            try:
                made = step()
            except ssl.SSLWantReadError:
                await self._flush()
                piece = await asyncio.get_running_loop().sock_recv(self._sock, _RECEIVED_BYTES)
                if piece:
                    self._came.write(piece)
                else:
                    self._came.write_eof()
            except ssl.SSLError:
                await self._flush()  # why it fails
                raise
            else:
                await self._flush()
                return made

    async def _flush(self) -> None:
        async with self._sending:
            while said := self._goes.read():
                await asyncio.get_running_loop().sock_sendall(self._sock, said)


def tls_context(peer: PeerId, protocols: list[str]) -> ssl.SSLContext:
    """What a TLS port answers with: a certificate of its own that nobody checks, and the protocols that it speaks."""
    certificate = ServerCertificate.fresh(peer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(protocols)
    with tempfile.TemporaryDirectory(prefix="canopy-") as folder:  # OpenSSL's binding reads files alone
        path = Path(folder) / "certificate.pem"
        path.touch(0o600)
        path.write_bytes(certificate.key_pem + certificate.pem)
        context.load_cert_chain(path)
    return context


class TlsEntry:
    """Lets connections in."""

    def __init__(self, peer: PeerId, directory: str = "") -> None:
        """Offer the relay, and what else there is.

        Args:
            directory: `host:port` of the DHT peer of this machine; empty: it is not offered.
        """
        self._services = {DIRECTORY: directory} if directory else {}
        self._offered = {RELAY, *self._services}
        self._context = tls_context(peer, sorted(self._offered))

    async def enter(self, visit: Visit) -> str:
        """Find out what somebody wants.

        Returns:
            `host:port` of a service of this machine, to which the visit's connection is to lead now; empty where the
            relay is meant.

        Raises:
            RemoteProtocolError: it is no TLS, or names nothing that is here.
            OSError: it went.
        """
        names = None
        while names is None:
            names = named_protocols(await visit.connection.look(MAX_HELLO_BYTES))
        if not self._offered.intersection(names):
            raise RemoteProtocolError("ALPN", "wants what this port does not offer")
        secured = TlsConnection(visit.connection, self._context)
        visit.connection = secured
        return self._services.get(await secured.shake_hands(), "")
