"""A connection in TLS, as the relay's end of it: what a TLS port offers is said and heard inside."""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar, cast

from swarm.ids import PeerId
from swarm.relay.connection import RelayConnection
from swarm.transport.certificate import ServerCertificate

_RECEIVED_BYTES: Final = 65_536
_Step = TypeVar("_Step")


class TlsConnection(RelayConnection):
    """Takes over another connection, and what it has read. Reads only what it is asked for, as that one does."""

    def __init__(self, inner: RelayConnection, context: ssl.SSLContext) -> None:
        """Say nothing yet.

        Args:
            inner: a connection whose client begins with TLS.
            context: of this end.
        """
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
    """What a TLS port answers with: a certificate of its own that nobody checks, and the protocols that it speaks.

    Args:
        peer: whose port it is.
        protocols: ALPN names.
    """
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
