"""A way to a port that takes its time and keeps what passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from swarm.base.tasks import TaskScope, spawn_on


class Tee:
    """A way to a port.

    Attributes:
        seen: all bytes that passed, in both directions.
        delay_s: how long they take, each way.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.seen = bytearray()
        self.delay_s = delay_s

    @asynccontextmanager
    async def before(self, address: str) -> AsyncIterator[str]:
        """Lead to an address; the address of this side."""
        host, _, port = address.rpartition(":")
        async with TaskScope() as scope:

            async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                try:
                    far_reader, far_writer = await asyncio.open_connection(host, int(port))
                except BaseException as error:
                    writer.transport.abort()
                    if isinstance(error, OSError):  # nobody listens there any more
                        return
                    raise
                # What a server says unasked, it says when the connection reaches it, half a round trip later.
                spawn_on(scope, writer, self._pass(far_reader, writer, time.monotonic() + self.delay_s))
                spawn_on(scope, far_writer, self._pass(reader, far_writer, time.monotonic()))

            server = await asyncio.start_server(carry, "127.0.0.1", 0)
            async with server:
                yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, begins_s: float) -> None:
        try:
            while data := await reader.read(1 << 16):
                self.seen += data
                wait_s = max(begins_s - time.monotonic(), 0.0) + self.delay_s
                asyncio.get_running_loop().call_later(wait_s, writer.write, data)
        except OSError:
            pass
        finally:
            writer.transport.abort()
