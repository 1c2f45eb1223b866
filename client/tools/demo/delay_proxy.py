"""A loopback proxy that emulates links where network namespaces are not available. Reads no protocol.

`python -m client.tools.demo.delay_proxy SHAPE LISTEN:TARGET …` serves until its standard input closes; SHAPE is a
`LinkShape` as JSON. A host is a program that listens on a TARGET port; clients connect to its LISTEN port. A host has
one interface in and one out for all its connections. The proxy does not know who connects, so links are named `(null,
host)` towards a host and `(host, null)` from it. A line `[number, verb, link, …]` on standard input is an order; the
answer `[number, {}]` says that it has taken effect.

Limits: a connection opens at once, without a round trip; TCP's windows are those of loopback; a cut link holds bytes
back until it is joined again; nothing is ever lost.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import selectors
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from client.tools.demo.link_shape import EmulatedLink, Ends, Interface, LinkShape, matching_links
from swarm.base.errors import ConfigError, SwarmError
from swarm.base.tasks import TaskScope

CHUNK_BYTES = 1 << 14
QUEUED_CHUNKS = 1_024


def free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


class Direction:
    """All bytes into one host, or all bytes out of it."""

    def __init__(self, shape: LinkShape, seed: str) -> None:
        self._link = EmulatedLink(LinkShape(), Interface(), Interface(), random.Random(seed).random)
        self._queue_s = 0.0
        self._send_lock = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self.reshape(shape)

    def reshape(self, shape: LinkShape) -> None:
        """Use another shape from the next byte on.

        Raises:
            ConfigError: the shape has losses.
        """
        if shape.loss:
            raise ConfigError(f"loss {shape.loss}: a proxy hands on a stream whole; losses need root and TUN devices")
        self._queue_s = shape.queue_ms / 1e3
        self._link.shape = replace(shape, queue_ms=math.inf)

    def cut(self) -> None:
        self._open.clear()

    def join(self) -> None:
        """Deliver again, after `cut`."""
        self._open.set()

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hand on the bytes of one connection until its end, each chunk when it is due."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUED_CHUNKS)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take(reader, queue))
            tasks.create_task(self._deliver(queue, writer))

    async def _take(self, reader: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes]]) -> None:
        clock = asyncio.get_running_loop().time
        data = b"more"
        while data:
            data = await reader.read(CHUNK_BYTES)
            async with self._send_lock:  # a full queue delays TCP's sender; nothing is dropped
                await asyncio.sleep(max(self._link.outgoing.free_s - clock() - self._queue_s, 0.0))
                due_s = self._link.depart(clock(), len(data))
            assert due_s is not None, "the shape has no losses and an endless queue"
            await queue.put((due_s, data))

    async def _deliver(self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due_s, data = await queue.get()
            await asyncio.sleep(max(due_s - clock(), 0.0))
            await self._open.wait()
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()


class Proxy:
    """The two directions of every host."""

    def __init__(self, shape: LinkShape, targets: Sequence[int]) -> None:
        """`targets[host]` is the port that the host listens on.

        Raises:
            ConfigError: the shape has losses.
        """
        self._targets = targets
        ends: list[Ends] = [ends for host in range(len(targets)) for ends in ((None, host), (host, None))]
        self._directions = {link: Direction(shape, f"{link}") for link in ends}

    async def forward(self, host: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._targets[host])
        except OSError:
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._directions[None, host].pump(reader, far_writer))
                tasks.create_task(self._directions[host, None].pump(far_reader, writer))
        except* OSError:
            pass  # one side closed: so does the other
        finally:
            for end in (writer, far_writer):
                end.close()

    def apply_order(self, verb: str, ends: Sequence[int | None], *values: object) -> None:
        """Change links.

        Args:
            ends: source and target host of the links; None stands for every host.
            values: for "shape", the fields of a `LinkShape`.

        Raises:
            ConfigError: the shape has losses.
        """
        source, target = ends
        for link in matching_links((source, target), self._directions):
            direction = self._directions[link]
            match verb, *values:
                case "shape", dict(shape):
                    direction.reshape(LinkShape(**shape))
                case ("cut",):
                    direction.cut()
                case ("join",):
                    direction.join()
                case _:
                    raise ValueError(f"no such order: {verb} {values}")


async def _serve(arguments: Sequence[str]) -> None:
    pairs = [pair.split(":") for pair in arguments[1:]]
    proxy = Proxy(LinkShape(**json.loads(arguments[0])), [int(target) for _, target in pairs])
    async with TaskScope() as connections, AsyncExitStack() as servers:

        def accept(host: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.spawn(proxy.forward(host, reader, writer))

        for host, (listen, _) in enumerate(pairs):
            server = await asyncio.start_server(partial(accept, host), "127.0.0.1", int(listen))
            servers.callback(server.close)
        _answer(None, {})
        while line := await asyncio.to_thread(sys.stdin.readline):
            number, *order = json.loads(line)
            try:
                proxy.apply_order(*order)
            except ConfigError as error:
                _answer(number, {"error": str(error)})
            else:
                _answer(number, {})


def _answer(number: int | None, answer: dict[str, str]) -> None:
    sys.stdout.write(json.dumps([number, answer]) + "\n")
    sys.stdout.flush()


def main() -> None:
    loop = partial(
        asyncio.SelectorEventLoop, selectors.SelectSelector()
    )  # select sleeps with µs precision, epoll with ms
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(_serve(sys.argv[1:]))
    except (SwarmError, OSError) as error:
        _answer(None, {"error": str(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
