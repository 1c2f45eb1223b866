"""A loopback proxy that delays every byte by a fixed time each way: the demo's links. Owns no protocol.

`python -m client.delay MILLISECONDS LISTEN:TARGET …` serves until its standard input closes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial

CHUNK_BYTES = 1 << 16
QUEUED_CHUNKS = 1_024


async def serve(delay_s: float, ports: Sequence[tuple[int, int]]) -> None:
    """Forward each `(listen, target)` port of loopback, `delay_s` late in both directions, until cancelled."""

    async def forward(target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pump(reader, far_writer, delay_s))
                tasks.create_task(_pump(far_reader, writer, delay_s))
        except* OSError:
            pass  # either side is gone: so is the link
        finally:
            for end in (writer, far_writer):
                end.close()

    servers = [await asyncio.start_server(partial(forward, target), "127.0.0.1", listen) for listen, target in ports]
    try:
        await asyncio.Event().wait()
    finally:
        for server in servers:
            server.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Hand on what is read, each chunk when it is due; chunks wait in a bounded queue."""
    clock = asyncio.get_running_loop().time
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUED_CHUNKS)

    async def read() -> None:
        while data := await reader.read(CHUNK_BYTES):
            await queue.put((clock() + delay_s, data))
        await queue.put((clock() + delay_s, b""))

    async def write() -> None:
        while True:
            due, data = await queue.get()
            await asyncio.sleep(max(due - clock(), 0.0))
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        tasks.create_task(write())


async def _main(arguments: Sequence[str]) -> None:
    pairs = [pair.split(":") for pair in arguments[1:]]
    async with asyncio.TaskGroup() as tasks:
        proxy = tasks.create_task(serve(float(arguments[0]) / 1e3, [(int(a), int(b)) for a, b in pairs]))
        await asyncio.to_thread(sys.stdin.read)
        proxy.cancel()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1:]))
