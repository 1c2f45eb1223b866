"""An HTTP proxy of a few lines that passes CONNECT to some ports alone."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from swarm.base.tasks import TaskScope, spawn_on
from swarm.link.egress.streams import Streams, splice


@dataclass
class ConnectProxy:
    """What it was told.

    Attributes:
        ports: to which it connects.
        credentials: that it wants, `USER:PASSWORD`; empty: it wants none.
        asked: the addresses that it was asked for.
        connected: those to which it led.
    """

    ports: tuple[int, ...]
    credentials: str = ""
    asked: list[str] = field(default_factory=list)
    connected: set[str] = field(default_factory=set)


@asynccontextmanager
async def proxying(
    listener: socket.socket, proxy: ConnectProxy, outgoing: Callable[[], socket.socket] = socket.socket
) -> AsyncIterator[ConnectProxy]:
    """Run a proxy.

    Args:
        listener: bound; listens from now on.
        proxy: what it passes.
        outgoing: makes the sockets with which it connects.
    """

    async def answer(near: Streams) -> None:
        head = (await near.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        verb, address, _ = head[0].split(" ")
        proxy.asked.append(address)
        wanted = f"Proxy-Authorization: Basic {base64.b64encode(proxy.credentials.encode()).decode()}"
        host, _, port = address.rpartition(":")
        status = 200
        if proxy.credentials and wanted not in head:
            status = 407
        elif verb != "CONNECT" or int(port) not in proxy.ports:
            status = 403
        near.writer.write(f"HTTP/1.1 {status} Said By A Test\r\nVia: test\r\n\r\n".encode())
        if status != 200:
            return near.close()
        proxy.connected.add(address)
        sock = outgoing()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        await splice(near, Streams(*await asyncio.open_connection(sock=sock)))

    async with TaskScope() as scope:

        async def guarded(near: Streams) -> None:
            try:
                await answer(near)
            except (OSError, asyncio.IncompleteReadError):
                near.abort()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            spawn_on(scope, writer, guarded(Streams(reader, writer)))

        server = await asyncio.start_server(accept, sock=listener)
        try:
            yield proxy
        finally:
            server.close()
