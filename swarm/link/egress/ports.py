"""How connections leave a machine whose network lets little out: one TLS port, a proxy, segments that fit any path.

A peer may offer everything at one TLS port (`swarm.reach.relay.tls_port`): its directory, its relay, and by that the
machines behind it. Whoever connects says by ALPN what it wants. That TLS is there for the networks on the way and
vouches for nobody: what travels inside is encrypted between its own two ends. So nothing of it is verified.

Segments are small enough for a path of 1,280 bytes. A path that drops larger packets and says nothing of it (a path MTU
black hole) so carries all that goes out here; what comes back keeps to the same size, for it is announced.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from swarm.base.ids import PeerId
from swarm.base.logs import describe
from swarm.base.tasks import TaskScope, spawn_on
from swarm.link.egress.proxy import HttpProxy, ProxyRefused, ask_proxy
from swarm.link.egress.streams import CHUNK_BYTES, Streams, bracketed, connected_socket, splice, split_host, tuned

MAX_CARRIED: Final = 8
"""Connections of one port at a time; the daemon has one or two."""

OpenFar = Callable[[], Awaitable[Streams]]


class Forwarder:
    """One loopback port.

    Attributes:
        trouble: why the last connection led nowhere; empty where it did not fail.
    """

    def __init__(self, open_far: OpenFar, scope: TaskScope) -> None:
        self.port = 0
        self.trouble = ""
        self._open_far = open_far
        self._scope = scope
        self._carried = 0

    @classmethod
    @asynccontextmanager
    async def listening(cls, open_far: OpenFar) -> AsyncIterator[Forwarder]:
        """Carry what connects, while the block runs.

        Args:
            open_far: opens the other end of a connection; raises OSError or TimeoutError.

        Raises:
            OSError: there is no port to be had.
        """
        async with TaskScope() as scope:
            forwarder = cls(open_far, scope)
            server = await asyncio.start_server(forwarder._accept, "127.0.0.1", 0, limit=CHUNK_BYTES)
            forwarder.port = server.sockets[0].getsockname()[1]
            try:
                yield forwarder
            finally:
                server.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._carried >= MAX_CARRIED:
            writer.transport.abort()
        else:
            spawn_on(self._scope, writer, self._carry(tuned(reader, writer)))

    async def _carry(self, near: Streams) -> None:
        self._carried += 1
        try:
            far = await self._open_far()
            self.trouble = ""
            await splice(near, far)
        except (OSError, TimeoutError) as error:
            self.trouble = str(error) if isinstance(error, ProxyRefused) else describe(error)
        finally:
            self._carried -= 1
            if not near.writer.is_closing():
                near.abort()


DIRECTORY: Final = "canopy-directory"
"""The ALPN name of libp2p's bytes, as the DHT peer there speaks them on its own port."""
RELAY: Final = "canopy-relay"
"""The ALPN name of what a relay is told (`swarm.reach.relay.openings`)."""
OPEN_S: Final = 5.0
"""How long a connection may take, its proxy and its TLS included."""


@dataclass(frozen=True, slots=True)
class TlsPort:
    """The one port of a peer."""

    peer: PeerId
    address: str


def tls_port(multiaddress: str) -> TlsPort | None:
    """The TLS port that `/ip4/A/tcp/P/tls/p2p/PEER` names; None where an address is of another kind."""
    match multiaddress.split("/"):
        case ["", _, host, "tcp", port, "tls", "p2p", peer]:
            return TlsPort(PeerId(peer), f"{bracketed(host)}:{port}")
        case _:
            return None


@dataclass(frozen=True, slots=True)
class Egress:
    """How connections leave this machine.

    Attributes:
        ports: TLS ports of peers that can be reached.
        proxy: for everything that leaves; None: nothing is between.
        is_narrow: whether large packets do not pass, and nobody says so.
    """

    ports: tuple[TlsPort, ...] = ()
    proxy: HttpProxy | None = None
    is_narrow: bool = False
    _relays: dict[str, TlsPort] = field(default_factory=dict, compare=False, repr=False)

    def know_relay(self, address: str, peer: PeerId | None) -> None:
        """Note whose relay listens at `host:port`: it can be had through that peer's TLS port too."""
        port = next((one for one in self.ports if one.peer == peer), None)
        if port is not None and len(self._relays) < _MAX_RELAYS:
            self._relays[address] = port

    async def open(self, address: str) -> Streams:
        """A connection to `host:port`, through the proxy where there is one.

        Raises:
            OSError: nothing answers there, the proxy refuses, or it is no address.
            TimeoutError: it takes too long.
        """
        return await self._open(address, None)

    async def open_tls(self, port: TlsPort, protocol: str) -> Streams:
        """A connection to what a TLS port offers under an ALPN name; errors as of `open`."""
        return await self._open(port.address, protocol)

    async def _open(self, address: str, protocol: str | None) -> Streams:
        async with asyncio.timeout(OPEN_S):
            sock = await _through(address, self.proxy)
            try:
                streams = await _streams(sock, address, protocol)
            except BaseException:
                sock.close()
                raise
        return streams

    async def open_relay(self, address: str) -> Streams:
        """A connection to the relay at `host:port`, through its peer's TLS port if it is known; errors as of `open`."""
        port = self._relays.get(address)
        return await self.open(address) if port is None else await self.open_tls(port, RELAY)


_MAX_RELAYS: Final = 64


async def _through(address: str, proxy: HttpProxy | None) -> socket.socket:
    """A socket that is connected to `host:port`, through a proxy where one is given."""
    sock = await connected_socket(address if proxy is None else proxy.address)
    if proxy is None:
        return sock
    try:
        await ask_proxy(proxy, address, sock)
    except BaseException:
        sock.close()
        raise
    return sock


async def _streams(sock: socket.socket, address: str, protocol: str | None) -> Streams:
    """A socket's streams, in TLS where a protocol is named; TLS errors are OSErrors."""
    if protocol is None:
        return tuned(*await asyncio.open_connection(sock=sock, limit=CHUNK_BYTES))
    host = split_host(address)[0].strip("[]")
    context = _context(protocol)
    try:
        ends = await asyncio.open_connection(sock=sock, limit=CHUNK_BYTES, ssl=context, server_hostname=host)
    except ConnectionError as error:
        raise ConnectionRefusedError(f"{address} hangs up: it offers no {protocol}, or a firewall cuts it") from error
    streams = tuned(*ends)
    if streams.writer.get_extra_info("ssl_object").selected_alpn_protocol() != protocol:
        streams.abort()
        raise ConnectionRefusedError(f"{address} does not offer {protocol}")
    return streams


def _context(protocol: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # who is inside proves it there
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    return context
