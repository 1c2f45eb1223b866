"""Loopback ports that lead elsewhere, for libp2p's daemon, which can only dial, in a network that lets little out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from swarm.egress.proxy import ProxyRefused
from swarm.egress.streams import CHUNK_BYTES, Streams, splice, tuned
from swarm.runtime.counted_log import describe
from swarm.runtime.stream_tasks import spawn_on
from swarm.runtime.tasks import TaskScope

MAX_CARRIED: Final = 8
"""Connections of one port at a time; the daemon has one or two."""

OpenFar = Callable[[], Awaitable[Streams]]


class Forwarder:
    """One loopback port.

    Attributes:
        port: its number.
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
