"""One TCP connection of a relay: lines first, then bytes, with nothing kept back in between.

It reads from the socket only what it is asked for, so that what a sender may have under way is TCP's own window.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Final

from swarm.base.errors import RemoteProtocolError
from swarm.base.quota import address_key, parse_ip
from swarm.link.egress.streams import bracketed

_UNSENT_BYTES: Final = 131_072
"""What the system takes from a writer beyond what is under way."""


class RelayConnection:
    """A connection that somebody made to the relay.

    Attributes:
        host: IP address that it comes from.
        address: the same with its port, as `host:port`.
        key: who pays for it.
        is_kept: whether somebody else than the one who accepted it closes it.
    """

    def __init__(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        self._sock = sock
        self._rest = bytearray()
        found = parse_ip(peer[0])
        self.host = peer[0] if found is None else str(found)
        self.address = f"{bracketed(self.host)}:{peer[1]}"
        self.key = address_key(self.host)
        self.is_kept = False
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    async def read_line(self, most: int) -> bytes:
        """The next line, its line feed included.

        Args:
            most: bytes that it may have.

        Raises:
            RemoteProtocolError: it is longer.
            OSError: the connection ended before.
        """
        while b"\n" not in self._rest:
            if len(self._rest) >= most:
                raise RemoteProtocolError("opening", f"a line has at most {most} bytes")
            piece = await self._receive(most - len(self._rest))
            if not piece:
                raise ConnectionResetError("ended within a line")
            self._rest += piece
        line, feed, rest = self._rest.partition(b"\n")
        self._rest = rest
        return bytes(line + feed)

    async def read_into(self, buffer: memoryview) -> int:
        """Fill a buffer with what is there; how much that is, 0 at the end.

        Raises:
            OSError: the connection was reset.
        """
        if self._rest:
            count = min(len(self._rest), len(buffer))
            buffer[:count] = self._rest[:count]
            del self._rest[:count]
            return count
        return await self._fill(buffer)

    async def look(self, most: int) -> bytes:
        """What has come so far and was not read, after more has come; it stays to be read.

        Args:
            most: bytes that may be kept so.

        Raises:
            OSError: the connection ended.
        """
        piece = await self._receive(most - len(self._rest))
        if not piece:
            raise ConnectionResetError("ended before it said what it wants")
        self._rest += piece
        return bytes(self._rest)

    async def _receive(self, most: int) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self._sock, most)

    async def _fill(self, buffer: memoryview) -> int:
        return await asyncio.get_running_loop().sock_recv_into(self._sock, buffer)

    async def send(self, data: bytes | memoryview) -> None:
        """Write, and wait until the system has taken all of it.

        Raises:
            OSError: the connection was reset.
        """
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def say(self, line: str) -> None:
        """Write a line.

        Raises:
            OSError: the connection was reset.
        """
        await self.send(f"{line}\n".encode())

    def end_writing(self) -> None:
        """Tell the other end that nothing more comes.

        Raises:
            OSError: the connection was reset.
        """
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End it in order: what was written arrives. No reading or writing may be under way."""
        self._sock.close()

    def reset(self) -> None:
        """End it at once, so that the other end knows that something was lost."""
        with suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()
