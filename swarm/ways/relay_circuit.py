"""The way that is always there: through the relay, with the words that gRPC itself would say to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from swarm.egress.lines import MAX_LINE_BYTES
from swarm.egress.streams import Streams, connect
from swarm.errors import RemoteProtocolError
from swarm.ids import PeerId
from swarm.relay.openings import MAX_HEADER_BYTES
from swarm.runtime.plain_text import plain_line
from swarm.transport.way import LinkPath
from swarm.ways.way import NoWay, OpenedWay

CONNECT_S: Final = 5.0
"""How long a relay and the peer behind it may take."""

DialRelay = Callable[[str], Awaitable[Streams]]


class RelayCircuit:
    """Asks a relay for a circuit."""

    name = "relay"

    def __init__(self, dial: DialRelay = connect) -> None:
        """Ask nobody yet.

        Args:
            dial: connects to a relay at `host:port`.
        """
        self._dial = dial

    async def open(self, peer: PeerId, relay: str) -> OpenedWay:
        """A circuit to a peer; errors as of every way."""
        streams: Streams | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                streams = await self._dial(relay)
                streams.writer.write(f"CONNECT {peer}:1 HTTP/1.1\r\n\r\n".encode())
                await streams.writer.drain()
                status = await _answer(streams.reader)
        except BaseException:
            if streams is not None:
                streams.abort()
            raise
        if status[1:2] != ["200"]:
            streams.abort()
            raise NoWay(f"the relay at {relay} answers {plain_line(' '.join(status[1:]))[:80]!r}")
        return OpenedWay(streams, LinkPath.RELAYED)


async def _answer(reader: asyncio.StreamReader) -> list[str]:
    """The words of a status line, whose headers are read past.

    Raises:
        RemoteProtocolError: it is none.
    """
    left = MAX_HEADER_BYTES
    lines: list[bytes] = []
    while not lines or lines[-1] not in (b"\r\n", b"\n"):
        try:
            line = await reader.readline()
        except ValueError as error:
            raise RemoteProtocolError("status", "longer than a header may be") from error
        left -= len(line)
        if not line.endswith(b"\n") or left < 0 or (not lines and len(line) > MAX_LINE_BYTES):
            raise RemoteProtocolError("status", "no answer of a relay")
        lines.append(line)
    status = lines[0].decode("ascii", "replace").split()
    if not status[:1] or not status[0].startswith("HTTP/1."):
        raise RemoteProtocolError("status", "no answer of a relay")
    return status
