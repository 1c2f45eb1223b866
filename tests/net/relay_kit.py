"""A relay in this process, a machine that stands at it, and raw connections to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from swarm.base.tasks import TaskScope
from swarm.directory.address_proof import who_answer
from swarm.directory.identity import Identity
from swarm.reach.relay.openings import prove_presence
from swarm.reach.relay.server import RelayServer
from swarm.reach.relay.visits import RelayLimits

HOST = "127.0.0.1"
FAST_MBIT = 100_000.0

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(slots=True)
class LiveRelay:
    """A relay that listens.

    Attributes:
        server: it.
        owner: whose it is.
        port: on loopback.
    """

    server: RelayServer
    owner: Identity
    port: int

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def dial(self, opening: bytes = b"", source: str = HOST) -> AbstractAsyncContextManager[Ends]:
        """A connection that has said this much."""
        return dialled(self.port, opening, source)

    async def ask(self, opening: bytes, source: str = HOST) -> bytes:
        """All that is answered to an opening."""
        async with self.dial(opening, source) as (reader, _):
            return await reader.read()


@asynccontextmanager
async def dialled(port: int, opening: bytes, source: str = HOST) -> AsyncIterator[Ends]:
    reader, writer = await asyncio.open_connection(HOST, port, local_addr=(source, 0))
    try:
        writer.write(opening)
        yield reader, writer
    finally:
        writer.transport.abort()


@asynccontextmanager
async def open_relay(
    mbit: float = FAST_MBIT, limits: RelayLimits | None = None, clock: Callable[[], float] | None = None
) -> AsyncIterator[LiveRelay]:
    owner = Identity.ephemeral()

    async def sign(nonce: bytes) -> bytes:
        return who_answer(owner, nonce)

    clocks = {} if clock is None else {"clock": clock}
    server = RelayServer(owner.peer_id, sign, mbit, limits, **clocks)
    async with server.listening(HOST, 0) as port:
        yield LiveRelay(server, owner, port)


@dataclass(slots=True)
class Standing:
    """A machine that stands at a relay.

    Attributes:
        identity: who it is.
        seen: the address that the relay says it comes from.
        told: what the relay said since, but PING.
        pings: how often it was pinged, one item each time.
        gone: set when the relay has ended the connection.
    """

    identity: Identity
    seen: str
    told: asyncio.Queue[list[str]] = field(default_factory=asyncio.Queue)
    pings: asyncio.Queue[None] = field(default_factory=asyncio.Queue)
    gone: asyncio.Event = field(default_factory=asyncio.Event)


async def claim(relay: LiveRelay, ends: Ends, identity: Identity) -> list[str]:
    """Say HERE and prove it; the relay's answer, in words."""
    reader, writer = ends
    writer.write(f"HERE {identity.peer_id}\n".encode())
    match (await reader.readline()).decode().split():
        case ["PROVE", peer, nonce]:
            assert peer == relay.owner.peer_id
            key, signature = prove_presence(identity, relay.owner.peer_id, bytes.fromhex(nonce))
            writer.write(f"PROOF {key} {signature}\n".encode())
    return (await reader.readline()).decode().split()


@asynccontextmanager
async def standing(relay: LiveRelay, identity: Identity | None = None, source: str = HOST) -> AsyncIterator[Standing]:
    """A machine that answers pings and takes nothing by itself."""
    identity = identity or Identity.ephemeral()
    async with relay.dial(source=source) as ends, TaskScope() as scope:
        answer, *rest = await claim(relay, ends, identity)
        assert answer == "OK", rest
        here = Standing(identity, rest[0])

        async def listen() -> None:
            while line := await ends[0].readline():
                if line == b"PING\n":
                    ends[1].write(b"PONG\n")
                    here.pings.put_nowait(None)
                else:
                    here.told.put_nowait(line.decode().split())
            here.gone.set()

        scope.spawn(listen())
        yield here


@asynccontextmanager
async def serving(relay: LiveRelay, serve: Serve, identity: Identity | None = None) -> AsyncIterator[Standing]:
    """A machine that takes every circuit and serves it."""
    async with standing(relay, identity) as here, TaskScope() as scope:

        async def take(token: str) -> None:
            async with relay.dial(f"TAKE {token}\n".encode()) as ends:
                await serve(*ends)

        async def listen() -> None:
            while True:
                _, token, *_ = await here.told.get()
                scope.spawn(take(token))

        scope.spawn(listen())
        yield here


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say back what comes, and end when it ends."""
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()
    await writer.wait_closed()


def connect(peer: str) -> bytes:
    """The opening of a dialler, as gRPC says it."""
    return f"CONNECT {peer}:1 HTTP/1.1\r\nHost: {peer}:1\r\nUser-Agent: grpc\r\n\r\n".encode()


async def accepted(reader: asyncio.StreamReader) -> bool:
    """Whether CONNECT was answered with 200."""
    head = await reader.readuntil(b"\r\n\r\n")
    return head.startswith(b"HTTP/1.1 200 ")
