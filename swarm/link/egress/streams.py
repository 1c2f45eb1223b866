"""A connection's two directions, opened, read by bounded lines and passed on without holding more than a little.

Beside them: addresses as `host:port`, an IPv6 host in brackets, and TCP segments that fit every path, so that a path
MTU black hole stops nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from asyncio.staggered import staggered_race
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from swarm.base.errors import RemoteProtocolError
from swarm.base.tasks import TaskScope


def split_host(address: str) -> tuple[str, int]:
    """The host, in its brackets if it has them, and the port of `host:port`.

    Raises:
        ValueError: the address is malformed, or of no one machine.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65_536:
        raise ValueError(f"{address[:80]!r} is not host:port")
    if not _names_a_machine(match["host"]):
        raise ValueError(f"{address[:80]!r} is not the address of one machine")
    return match["host"], int(match["port"])


def bracketed(host: str) -> str:
    """A host as it is written before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def _names_a_machine(host: str) -> bool:
    """Whether a host is a name, or an IP address that one machine can have.

    A host that ends in a number has to be an IP address in full: resolvers read `0` and `0x7f.1` as addresses too.
    """
    is_ip = host.startswith("[") or _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]) is not None
    if not is_ip:
        return True
    try:
        ip = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None) or ip
    return not (mapped.is_unspecified or mapped.is_multicast or str(mapped) == "255.255.255.255")


_ADDRESS: Final = re.compile(
    r"(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})", re.ASCII
)
_NUMBER: Final = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")


MAX_LINE_BYTES: Final = 512
"""Of an opening, and of everything that a relay says; its line feed included."""


def words(line: bytes) -> list[str]:
    """The words of a line.

    Raises:
        RemoteProtocolError: it is too long or not printable ASCII.
    """
    if len(line) > MAX_LINE_BYTES:
        raise RemoteProtocolError("opening", f"a line has at most {MAX_LINE_BYTES} bytes")
    text = line.removesuffix(b"\n").removesuffix(b"\r")
    if not text.isascii() or not text.decode("ascii", "replace").isprintable():
        raise RemoteProtocolError("opening", "a line is printable ASCII")
    return text.decode().split(" ")


SEGMENT_BYTES: Final = 1_220
"""Of TCP in one packet: 1,280 bytes, which every path of IPv6 carries, less the headers of IPv6 and TCP."""


def keep_segments_small(sock: socket.socket) -> None:
    """Let a TCP socket send and announce segments that fit any path; it listens, or is not connected yet."""
    if hasattr(socket, "TCP_MAXSEG"):
        with suppress(OSError):  # some systems let nobody choose it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)


CHUNK_BYTES: Final = 1 << 16
"""Read at a time; a stream holds twice as much at most before its source waits."""
LINGER_S: Final = 10.0
"""How long one direction may go on after the other has ended."""
STUCK_S: Final = 30.0
"""Bytes that nobody acknowledges for so long end their connection."""
FAMILY_DELAY_S: Final = 0.25
"""After so long a name's next address is tried beside the first: half of a name's addresses may be dead."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Both directions of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def remote_host(self) -> str:
        """The other end's IP address without brackets; empty where it has none."""
        name = self.writer.get_extra_info("peername")
        return str(name[0]).partition("%")[0] if isinstance(name, tuple) else ""

    @property
    def remote(self) -> str:
        """`host:port` of the other end, an IPv6 host in brackets; empty where it has none."""
        name = self.writer.get_extra_info("peername")
        if not isinstance(name, tuple):
            return ""
        return f"{bracketed(self.remote_host)}:{name[1]}"

    async def say(self, *line: str) -> None:
        """Send one line of words.

        Raises:
            OSError: the connection is gone.
        """
        self.writer.write(" ".join(line).encode() + b"\n")
        await self.writer.drain()

    async def hear(self) -> list[str]:
        """The words of the next line; none at the end.

        Raises:
            RemoteProtocolError: it is no line of words, or longer than `MAX_LINE_BYTES`.
            OSError: the connection is gone.
        """
        try:
            line = await self.reader.readline()
        except ValueError as error:
            raise RemoteProtocolError("line", f"longer than {MAX_LINE_BYTES} bytes") from error
        return words(line) if line.endswith(b"\n") else []

    def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        self.writer.transport.abort()


async def connect(address: str) -> Streams:
    """Connect to `host:port`. A name's addresses are tried beside each other, so one dead family does no harm.

    Raises:
        OSError: nothing answers there, or it is no address.
    """
    sock = await connected_socket(address)
    try:
        return tuned(*await asyncio.open_connection(sock=sock, limit=CHUNK_BYTES))
    except BaseException:
        sock.close()
        raise


async def connected_socket(address: str) -> socket.socket:
    """A socket that is connected to `host:port` in small segments (`swarm.link.egress.streams`); errors as of
    `connect`."""
    try:
        named, port = split_host(address)
    except ValueError as error:
        raise OSError(str(error)) from None
    host = named.strip("[]")
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    opened: list[socket.socket] = []
    taken: socket.socket | None = None
    tries = [partial(_connect, family, where, opened) for family, _, _, _, where in found]
    try:
        taken, _, failed = await staggered_race(tries, FAMILY_DELAY_S)
    finally:  # what lost the race, or came as nobody waited any more
        for sock in opened:
            if sock is not taken:
                sock.close()
    if taken is not None:
        return taken
    raise next((error for error in failed if isinstance(error, OSError)), OSError(f"{host} has no address"))


async def _connect(family: int, where: Any, opened: list[socket.socket]) -> socket.socket:  # noqa: ANN401
    """Connect to an address as getaddrinfo gives it; the socket is noted among those that are open."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        keep_segments_small(sock)
        await asyncio.get_running_loop().sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    opened.append(sock)
    return sock


def tuned(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Streams:
    """The streams of a new connection, on which small messages leave at once and a dead end is noticed."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):  # some systems refuse it where the other end has gone meanwhile
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STUCK_S * 1e3))
    return Streams(reader, writer)


async def splice(one: Streams, other: Streams) -> None:
    """Join two connections until both directions have ended, or either breaks; both are closed then.

    An end of one direction is passed on as such. A slow reader slows the other side's writer.
    """
    try:
        async with TaskScope() as scope:
            pours = [scope.spawn(_pour(one, other)), scope.spawn(_pour(other, one))]
            await asyncio.wait(pours, return_when=asyncio.FIRST_COMPLETED)
            _, running = await asyncio.wait(pours, timeout=LINGER_S)
        if not running:
            one.close()
            other.close()
    except OSError:  # a reset is passed on as one
        pass
    finally:
        for ends in (one, other):
            if not ends.writer.is_closing():
                ends.abort()


async def _pour(source: Streams, sink: Streams) -> None:
    while data := await source.reader.read(CHUNK_BYTES):
        sink.writer.write(data)
        await sink.writer.drain()
    with suppress(OSError, RuntimeError):
        if sink.writer.can_write_eof():
            sink.writer.write_eof()
