"""The attackers' tool kit: every channel, socket, record and session of an attack is made here, and only here.

An attacker is a stranger: it has identities and session keys of its own, and introduces itself truthfully where a swarm
asks for that. It comes from addresses of its own on loopback, so that a bound per address tells it from honest users.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc.aio
from cryptography.hazmat.primitives.asymmetric import rsa

from benchmarks.redteam import h2
from benchmarks.redteam.attack import Ground, NodeMark, Tally
from swarm import wire
from swarm.discovery.dht.registry import DhtConfig, DhtRegistry
from swarm.discovery.identity import Identity
from swarm.discovery.node_record import NodeRecord, NodeState, seal
from swarm.discovery.registry import record_keys
from swarm.errors import RegistryError
from swarm.ids import ModelIdentity, SessionId, TreeNodeId
from swarm.layers import Span
from swarm.protocol.messages import (
    Attach,
    Codec,
    Downstream,
    Fault,
    Open,
    Ping,
    Ready,
    RepliesRequest,
    RouteHop,
    Sweep,
    SweepFrame,
    Upstream,
)
from swarm.runtime.tasks import TaskScope
from swarm.transport.dial import CHANNEL_OPTIONS, Dialer
from swarm.wire.frames import split

SOURCE = "127.0.0.66"
"""Where attackers come from, unless they come from many addresses."""
CHUNK_BYTES = 1 << 16
ANSWER_S = 10.0
RECORD_S = 45.0
"""For how long an attacker's records are valid, unless it says otherwise."""
HONEST_RSA_BITS = 2_048

Stream = grpc.aio.StreamStreamCall[bytes, bytes]
Unary = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]


@dataclass(slots=True)
class RawSocket:
    """A TCP connection, encrypted where the swarm is; what comes on it is read and dropped unless it is deaf."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    tally: Tally
    is_tls: bool = False
    authority: str = "localhost"

    @property
    def is_closed(self) -> bool:
        """Whether the other side has ended it."""
        return self.reader.at_eof() or self.writer.is_closing()

    async def send(self, data: bytes) -> None:
        """Write, and wait until the socket has taken it.

        Raises:
            OSError: the other side has ended it.
        """
        self.tally.sent_bytes += len(data)
        self.writer.write(data)
        await self.writer.drain()

    def call(self, stream: int, path: str, encoding: str = "") -> bytes:
        """The frame that opens a gRPC call on this connection."""
        return h2.begin_call(stream, h2.call_headers(path, self.authority, is_tls=self.is_tls, encoding=encoding))

    async def drop(self) -> None:
        """Read and drop what comes, until the other side ends it."""
        with suppress(OSError):
            while await self.reader.read(CHUNK_BYTES):
                pass


@dataclass(slots=True)
class RawLink:
    """One stream to one hop.

    Attributes:
        call: The gRPC stream.
        heard: Every answer so far, the newest 4,096.
        tally: Counts what is sent.
    """

    call: Stream
    tally: Tally
    heard: list[Upstream] = field(default_factory=list)

    async def send(self, *messages: Downstream) -> None:
        """Send messages as frames in parts.

        Raises:
            grpc.aio.AioRpcError: the stream has ended.
        """
        for message in messages:
            for part in split(message):
                await self.send_bytes(part)

    async def send_bytes(self, part: bytes) -> None:
        """Send these bytes as a part."""
        try:
            await self.call.write(part)
        except asyncio.InvalidStateError:
            raise ConnectionResetError("the stream has ended") from None

    async def read(self) -> Upstream | None:
        """The next answer; None at the end of the stream."""
        data = await self.call.read()
        if not isinstance(data, bytes):
            return None
        self.heard = [*self.heard[-4_095:], wire.decode_upstream(data)]
        return self.heard[-1]

    async def until_ready(self, limit_s: float = ANSWER_S) -> bool:
        """Whether the chain stands; False where a hop refused it, or it took too long."""
        with suppress(TimeoutError, grpc.aio.AioRpcError):
            async with asyncio.timeout(limit_s):
                while (answer := await self.read()) is not None:
                    if isinstance(answer, Ready):
                        return True
                    if isinstance(answer, Fault):
                        self.tally.refused += 1
                        return False
        self.tally.refused += 1
        return False

    async def listen(self) -> None:
        """Read until the stream ends."""
        with suppress(grpc.aio.AioRpcError):
            while await self.read() is not None:
                pass


class Kit:
    """What one attack opens; `async with` closes all of it."""

    def __init__(self, ground: Ground, tally: Tally | None = None) -> None:
        self.ground = ground
        self.tally = tally or Tally()
        self._held = AsyncExitStack()
        self._relays: dict[tuple[str, str], int] = {}
        self.scope: TaskScope

    async def __aenter__(self) -> Self:
        """Nothing is opened yet."""
        self.scope = await self._held.enter_async_context(TaskScope())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._held.aclose()

    def hold(self, resource: Any) -> Any:  # noqa: ANN401 (whatever it yields)
        """Enter an asynchronous context that is left when the attack ends; awaitable."""
        return self._held.enter_async_context(resource)

    # Connections

    async def channel(self, node: NodeMark, source: str = SOURCE, **options: int) -> grpc.aio.Channel:
        """A gRPC channel to a node, over a connection of its own from `source`."""
        port = await self._relay(node.address, source)
        chosen = dict(CHANNEL_OPTIONS) | {name.replace("__", "."): value for name, value in options.items()}
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=list(chosen.items()))
        self._held.push_async_callback(channel.close)
        return channel

    async def socket(self, address: str, source: str = SOURCE, *, encrypted: NodeMark | None = None) -> RawSocket:
        """A TCP connection from `source`; encrypted where a node is given whose swarm is.

        Raises:
            OSError: it is not taken.
        """
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
        self.tally.connections += 1
        opened = RawSocket(reader, writer, self.tally)
        self._held.callback(writer.transport.abort)
        return opened

    async def node_socket(
        self, node: NodeMark, source: str = SOURCE, *, settings: Mapping[str, int] | None = None
    ) -> RawSocket:
        """A connection to a node on which HTTP/2 has begun.

        Raises:
            OSError: it is not taken.
        """
        opened = await self.socket(node.address, source, encrypted=node)
        await opened.send(h2.opening(**(settings or {})))
        return opened

    async def _relay(self, address: str, source: str) -> int:
        """The port of a relay to an address: gRPC itself cannot choose where it comes from."""
        key = address, source
        if key not in self._relays:
            host, _, port = address.rpartition(":")

            async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                self.tally.connections += 1
                try:
                    far = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
                except OSError:
                    writer.transport.abort()
                    return
                self.scope.spawn(self._pump(far[0], writer, counts=False))
                self.scope.spawn(self._pump(reader, far[1], counts=True))

            server = await asyncio.start_server(forward, "127.0.0.1", 0)
            self._held.callback(server.close)
            self._relays[key] = server.sockets[0].getsockname()[1]
        return self._relays[key]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool) -> None:
        try:
            while data := await reader.read(CHUNK_BYTES):
                self.tally.sent_bytes += len(data) if counts else 0
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except OSError:
            pass
        finally:
            writer.transport.abort()

    async def dial_as_users_do(self, address: str) -> None:
        """Let the program that users run open a link to an address, and wait a moment for it."""
        dialer: Dialer = await self.hold(Dialer())
        with suppress(grpc.aio.AioRpcError):
            call: Unary = dialer.channel(address).unary_unary(wire.INFO)
            await call(b"", timeout=1.0)

    # Sessions

    @property
    def route(self) -> tuple[RouteHop, ...]:
        """The honest chain."""
        return tuple(RouteHop(node.peer, node.span) for node in self.ground.nodes)

    def opening(self, *, window: int = 64, sweeps: int = 4, nodes: int = 16) -> Open:
        """What a session of an attacker reserves."""
        return Open(self.ground.model.fingerprint, window, sweeps, nodes, Codec.FP32)

    def attach(self, route: tuple[RouteHop, ...] | None = None, index: int = 0, **changes: Any) -> Attach:  # noqa: ANN401
        """The first message of a link of a session of one's own; `changes` are fields of `Attach`."""
        session = SessionId(secrets.token_bytes(16))
        return replace(Attach(session, 0, route or self.route, index, self.opening()), **changes)

    async def link(self, node: NodeMark, source: str = SOURCE, **options: int) -> RawLink:
        """A stream to a node, on which nothing was sent."""
        return self.link_over(await self.channel(node, source, **options))

    def link_over(self, channel: grpc.aio.Channel, compression: grpc.Compression | None = None) -> RawLink:
        """Another stream over the same connection."""
        call: Stream = channel.stream_stream(wire.LINK)(compression=compression)
        self._held.callback(call.cancel)
        return RawLink(call, self.tally)

    async def session(self, attach: Attach, source: str = SOURCE) -> tuple[RawLink, bool]:
        """A session of one's own through the honest chain, and whether it stands."""
        link = await self.link(self.ground.nodes[attach.index], source)
        try:
            await link.send(attach)
        except (grpc.aio.AioRpcError, OSError):
            self.tally.refused += 1
            return link, False
        return link, await link.until_ready()

    def keep_pinging(self, link: RawLink, every_s: float = 2.0) -> None:
        """Keep a stream alive in the background, and read what comes."""

        async def ping() -> None:
            with suppress(grpc.aio.AioRpcError, OSError):
                while True:
                    await asyncio.sleep(every_s)
                    await link.send(Ping(1))

        self.scope.spawn(ping())
        self.scope.spawn(link.listen())

    async def replies(self, node: NodeMark, session: SessionId, source: str = SOURCE, **request: Any) -> Stream:  # noqa: ANN401
        """A reply stream, asked for."""
        channel = await self.channel(node, source)
        call: Stream = channel.stream_stream(wire.REPLIES)()
        self._held.callback(call.cancel)
        await call.write(wire.encode_replies_up(RepliesRequest(session, **request)))
        return call

    async def caller(self, node: NodeMark, method: str) -> Unary:
        """One method of a node, over a connection of its own."""
        channel = await self.channel(node)
        call: Unary = channel.unary_unary(method)
        return call

    async def unary(self, node: NodeMark, method: str, body: bytes = b"", limit_s: float = ANSWER_S) -> bytes:
        """One call's answer.

        Raises:
            grpc.aio.AioRpcError: it was refused, or did not come in time.
        """
        return await (await self.caller(node, method))(body, timeout=limit_s)

    def sweep(self, sequence: int, tokens: Iterable[int] = (1, 2, 3), **changes: Any) -> SweepFrame:  # noqa: ANN401
        """The first sweep of a session, or another one that appends nothing that was kept."""
        given = tuple(tokens)
        parents = (None, *map(TreeNodeId, range(len(given) - 1)))[: len(given)]
        first = Sweep(sequence, 0, TreeNodeId(0), given, parents, TreeNodeId(0), acked=max(sequence - 2, 0))
        return SweepFrame(replace(first, **changes))

    # Identities and records

    def identities(self, count: int) -> list[Identity]:
        """So many identities, from few primes: whoever floods a directory does not search for a prime twice."""
        self.tally.identities += count
        keys: list[rsa.RSAPrivateKey] = []
        primes: list[int] = []
        while len(primes) * (len(primes) - 1) // 2 < count:
            numbers = rsa.generate_private_key(public_exponent=65_537, key_size=HONEST_RSA_BITS).private_numbers()
            primes += [numbers.p, numbers.q]
        for one, other in list(combinations(primes, 2))[:count]:
            keys.append(_key(max(one, other), min(one, other)))
        return [Identity(key) for key in keys]

    def record(self, who: Identity, span: Span, address: str, **claims: Any) -> NodeRecord:  # noqa: ANN401
        """What a stranger says of itself: by default that it is idle, quick and roomy; `claims` are other fields."""
        honest = NodeRecord(
            peer=who.peer_id,
            model=self.ground.model,
            span=span,
            address=address,
            state=NodeState.SERVING,
            numeric_class=self.ground.numeric_class,
            version="0.2.0",
            name=None,
            sweep_ms=((1, 0.02), (16, 0.03), (64, 0.05)),
            kv_tokens_free=1_000_000,
            kv_tokens_total=1_000_000,
            sequence=1,
            expires_at=time.time() + RECORD_S,
        )
        return replace(honest, **claims)

    async def directory(self, who: Identity | None = None) -> DhtRegistry:
        """A membership of the directory, for an identity where one is given.

        Raises:
            RegistryError: nobody answers.
        """
        path = None
        if who is not None:
            path = Path(self.ground.folder) / f"{who.peer_id}.key"
            who.save(path)
        config = DhtConfig(join=(self.ground.join,), client_mode=True, identity_path=path)
        registry: DhtRegistry = await self.hold(DhtRegistry.open(config))
        return registry

    async def announce(self, registry: DhtRegistry, record: NodeRecord, who: Identity, **sealing: Any) -> bool:  # noqa: ANN401
        """Store a record under all its keys, whoever's membership is used; whether the directory took it."""
        return await self.store(registry, record_keys(record), record, seal(record, who, **sealing))

    async def store(self, registry: DhtRegistry, keys: list[str], record: NodeRecord, sealed: bytes) -> bool:
        """Store bytes under keys; whether the directory took them."""
        arguments = {"keys": keys, "subkey": record.peer, "value": sealed, "expires_at": record.expires_at}
        self.tally.acts += 1
        self.tally.sent_bytes += len(keys) * len(sealed)
        try:
            taken = bool(await registry._call("store", arguments))
        except RegistryError:
            taken = False
        self.tally.refused += not taken
        return taken


def other_model(model: ModelIdentity, **changes: Any) -> ModelIdentity:  # noqa: ANN401
    """A model that differs in these fields, with a fingerprint of its own unless one is given."""
    return replace(model, **{"fingerprint": secrets.token_hex(32), **changes})


def _key(one: int, other: int) -> rsa.RSAPrivateKey:
    modulus, exponent = one * other, 65_537
    private = pow(exponent, -1, (one - 1) * (other - 1))
    public = rsa.RSAPublicNumbers(exponent, modulus)
    parts = (private % (one - 1), private % (other - 1), pow(other, -1, one))
    numbers = rsa.RSAPrivateNumbers(one, other, private, *parts, public)
    return numbers.private_key(unsafe_skip_rsa_key_validation=True)
