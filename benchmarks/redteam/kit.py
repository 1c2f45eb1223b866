"""The attackers' tool kit: every channel, socket, record and session of an attack is made here, and only here.

An attacker is a stranger: it has identities and session keys of its own, and introduces itself truthfully where a swarm
asks for that. It comes from addresses of its own on loopback, so that a bound per address tells it from honest users.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc.aio

from benchmarks.redteam import h2
from benchmarks.redteam.ground import Ground, NodeMark, Tally
from benchmarks.redteam.membership import Membership
from benchmarks.redteam.sealing import filings_of, quick_identities
from swarm.base.ids import SessionId, TreeNodeId
from swarm.base.layers import Span
from swarm.base.quota import STAND_INS
from swarm.base.tasks import TaskScope, spawn_on
from swarm.directory.dht.registry import DhtConfig, DhtRegistry
from swarm.directory.identity import Identity
from swarm.directory.model_pointer import Filing
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.link.certificate import ServerCertificate, server_name
from swarm.link.dial import CHANNEL_OPTIONS, Connection, Dialer, open_channel
from swarm.link.endpoint import Endpoint
from swarm.link.link import Metadata, Signer, introduce
from swarm.protocol import wire
from swarm.protocol.authority import SessionKey
from swarm.protocol.frames import split
from swarm.protocol.messages import (
    Attach,
    Codec,
    Downstream,
    Fault,
    Open,
    Ping,
    Ready,
    RepliesRequest,
    Reroute,
    RouteHop,
    Sweep,
    SweepFrame,
    Upstream,
)

MANY = 1 << 12
"""Addresses of one attacker, at most."""


class Strangers:
    """Addresses of one attacker; nobody came from there before, so nothing is held against them."""

    def __init__(self, rng: random.Random | None = None) -> None:
        """Choose them.

        Args:
            rng: chooses; a real one by default.
        """
        rng = rng or random.SystemRandom()
        self._first = rng.randrange(1, STAND_INS.num_addresses - MANY - 1)

    def __getitem__(self, number: int) -> str:
        assert 0 <= number < MANY, "an attacker has no more"
        return str(STAND_INS[self._first + number])


CHUNK_BYTES = 1 << 16
ANSWER_S = 10.0
RECORD_S = 45.0
"""For how long an attacker's records are valid, unless it says otherwise."""

OPTIONS = [option for option in CHANNEL_OPTIONS if "compression" not in option[0]]
"""Of an attacker's channels: it compresses what it likes."""

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
    """One stream to one hop; it opens with the first message, whose sender introduces himself where that is an Attach.

    Attributes:
        signer: Who introduces himself; None: the session's key, or the attacker's own identity behind hop 0.
        heard: Every answer so far, the newest 4,096.
    """

    kit: Kit
    connection: Connection
    signer: Signer | None = None
    compression: grpc.Compression | None = None
    heard: list[Upstream] = field(default_factory=list)
    _call: Stream | None = None

    @property
    def call(self) -> Stream:
        return self._call if self._call is not None else self._open(None)

    @property
    def tally(self) -> Tally:
        return self.kit.tally

    def _open(self, first: Downstream | None) -> Stream:
        metadata: Metadata = ()
        if isinstance(first, Attach):
            signer = self.signer or self.kit.signer(first.session, first.index)
            metadata = introduce(signer, self.connection.endpoint, wire.LINK, first.signature)
        call: Stream = self.connection.channel.stream_stream(wire.LINK)(metadata=metadata, compression=self.compression)
        self._call = call
        self.kit.cancel_at_end(call)
        return call

    async def send(self, *messages: Downstream) -> None:
        """Send messages as frames in parts.

        Raises:
            grpc.aio.AioRpcError: the stream has ended.
            OSError: it ended before.
        """
        for message in messages:
            if self._call is None:
                self._open(message)
            for part in split(message):
                await self.send_bytes(part)

    async def send_bytes(self, part: bytes) -> None:
        """Send these bytes as a part.

        Raises:
            grpc.aio.AioRpcError: the stream has ended.
            OSError: it ended before.
        """
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
        with suppress(grpc.aio.AioRpcError):
            while await self.read() is not None:
                pass


class Kit:
    """What one attack opens; `async with` closes all of it.

    Attributes:
        strangers: addresses that it may come from; it comes from the first one unless told otherwise.
    """

    def __init__(self, ground: Ground, tally: Tally | None = None) -> None:
        self.ground = ground
        self.tally = tally or Tally()
        self.strangers = Strangers()
        self._held = AsyncExitStack()
        self._relays: dict[tuple[str, str], int] = {}
        self._keys: dict[SessionId, SessionKey] = {}
        self._joining = asyncio.Lock()
        self._membership: Membership | None = None
        self.scope: TaskScope

    async def __aenter__(self) -> Self:
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

    async def connection(self, node: NodeMark, source: str | None = None) -> Connection:
        """A gRPC connection of its own to a node, which must prove that it is the one; see `socket` for `source`."""
        port = await self._relay(node.address, source or self.strangers[0])
        endpoint = Endpoint(node.peer, f"127.0.0.1:{port}", bytes.fromhex(node.certificate))
        channel = open_channel(endpoint, OPTIONS, insecure=True)
        self._held.push_async_callback(channel.close)
        return Connection(channel, endpoint)

    async def socket(self, address: str, source: str | None = None, *, encrypted: NodeMark | None = None) -> RawSocket:
        """A TCP connection, from a stranger's address or `source`; encrypted where a node is given whose swarm is.

        Raises:
            OSError: it is not taken.
        """
        host, _, port = address.rpartition(":")
        context = _any_certificate() if encrypted is not None and encrypted.certificate else None
        self.tally.connections += 1
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(
                host,
                int(port),
                local_addr=(source or self.strangers[0], 0),
                ssl=context,
                server_hostname="" if context else None,
            )
        self._held.callback(_abort, writer)  # a writer that nobody holds closes its connection
        name = server_name(encrypted.peer) if encrypted is not None else "localhost"
        return RawSocket(reader, writer, self.tally, is_tls=context is not None, authority=name)

    async def node_socket(
        self, node: NodeMark, source: str | None = None, *, settings: Mapping[str, int] | None = None
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
                spawn_on(self.scope, writer, self._pump(far[0], writer, counts=False))
                spawn_on(self.scope, far[1], self._pump(reader, far[1], counts=True))

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
        node = self.ground.nodes[0]
        dialer: Dialer = await self.hold(Dialer(insecure=not node.certificate))
        with suppress(grpc.aio.AioRpcError):
            channel = dialer.channel(Endpoint(node.peer, address, bytes.fromhex(node.certificate)))
            call: Unary = channel.unary_unary(wire.INFO)
            await call(b"", timeout=1.0)

    # Sessions

    @cached_property
    def me(self) -> Identity:
        """Who the attacker is, where a hop must say so."""
        self.tally.identities += 1
        return Identity.ephemeral()

    def signer(self, session: SessionId, index: int = 0) -> Signer:
        """Who speaks to a hop of a session: its key to hop 0, and to the others the attacker as the hop before."""
        return self._keys.get(session, SessionKey.fresh()) if index == 0 else self.me

    def cancel_at_end(self, call: Any) -> None:  # noqa: ANN401 (any of gRPC's calls)
        """Cancel a call when the attack ends."""
        self._held.callback(call.cancel)

    @property
    def route(self) -> tuple[RouteHop, ...]:
        return tuple(RouteHop(node.peer, node.span) for node in self.ground.nodes)

    @property
    def own_route(self) -> tuple[RouteHop, ...]:
        """A route of which the attacker itself is the first hop, so that it may speak to the last one."""
        last = self.ground.nodes[-1]
        return RouteHop(self.me.peer_id, Span(0, last.span.start)), RouteHop(last.peer, last.span)

    def opening(self, *, window: int = 64, sweeps: int = 4, nodes: int = 16) -> Open:
        """What a session of an attacker reserves."""
        return Open(self.ground.model.fingerprint, window, sweeps, nodes, Codec.FP32)

    def attach(self, route: tuple[RouteHop, ...] | None = None, index: int = 0, **changes: Any) -> Attach:  # noqa: ANN401
        """The first message of a link of a session of one's own; `changes` are fields of `Attach`."""
        key = SessionKey.fresh()
        self._keys[key.session] = key
        return self.signed(replace(Attach(key.session, 0, route or self.route, index, self.opening()), **changes))

    def signed(self, attach: Attach) -> Attach:
        """A command for a session of one's own, signed by its key."""
        return self._keys[attach.session].command(attach)

    def reroute(self, attach: Attach, generation: int, route: tuple[RouteHop, ...], *records: bytes) -> Reroute:
        """Another route for a session of one's own."""
        new = self.signed(replace(attach, generation=generation, route=route, index=0, records=records))
        return Reroute(generation, route, new.open, None, records, signature=new.signature)

    async def link(self, node: NodeMark, source: str | None = None, signer: Signer | None = None) -> RawLink:
        """A stream to a node, on which nothing was sent."""
        return self.link_over(await self.connection(node, source), signer)

    def link_over(
        self, connection: Connection, signer: Signer | None = None, compression: grpc.Compression | None = None
    ) -> RawLink:
        """Another stream over the same connection."""
        return RawLink(self, connection, signer, compression)

    async def session(self, attach: Attach, source: str | None = None) -> tuple[RawLink, bool]:
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

    async def replies(
        self, connection: Connection, request: RepliesRequest, signer: Signer | None = None
    ) -> tuple[Stream, bytes]:
        """A reply stream, asked for; and what it was asked with."""
        body = wire.encode_replies_up(request)
        metadata = introduce(signer or self.signer(request.session), connection.endpoint, wire.REPLIES, body)
        call: Stream = connection.channel.stream_stream(wire.REPLIES)(metadata=metadata)
        self.cancel_at_end(call)
        await call.write(body)
        return call, body

    async def unary(
        self, connection: Connection, method: str, body: bytes = b"", signer: Signer | None = None
    ) -> bytes:
        """One call's answer.

        Raises:
            grpc.aio.AioRpcError: it was refused, or did not come in time.
        """
        call: Unary = connection.channel.unary_unary(method)
        metadata = introduce(signer, connection.endpoint, method, body) if signer is not None else None
        return await call(body, timeout=ANSWER_S, metadata=metadata)

    def sweep(self, sequence: int, tokens: Iterable[int] = (1, 2, 3), **changes: Any) -> SweepFrame:  # noqa: ANN401
        """The first sweep of a session, or another one that appends nothing that was kept."""
        given = tuple(tokens)
        parents = (None, *map(TreeNodeId, range(len(given) - 1)))[: len(given)]
        first = Sweep(sequence, 0, TreeNodeId(0), given, parents, TreeNodeId(0), acked=max(sequence - 2, 0))
        return SweepFrame(replace(first, **changes))

    # Identities and records

    def identities(self, count: int) -> list[Identity]:
        """So many identities, which cost next to nothing."""
        self.tally.identities += count
        return quick_identities(count)

    def record(self, who: Identity, span: Span, address: str, **claims: Any) -> NodeRecord:  # noqa: ANN401
        """What a stranger says of itself: by default that it is idle, quick and near; `claims` are others."""
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
            delays_ms=tuple((node.peer, 0.01) for node in self.ground.nodes),
            uplink_mbit_per_s=10_000.0,
            row_bytes=4 * self.ground.hidden_size,
            certificate=ServerCertificate.fresh(who.peer_id).der,
        )
        return replace(honest, **claims)

    async def directory(self) -> DhtRegistry:
        """A membership of the directory that asks as the program does.

        Raises:
            RegistryError: nobody answers.
        """
        config = DhtConfig(join=(self.ground.join,), client_mode=True)
        registry: DhtRegistry = await self.hold(DhtRegistry.open(config))
        return registry

    async def join(self, *everybody: Identity) -> None:
        """Let these identities join the directory, so that each may file what it signs."""
        await asyncio.gather(*(self.file(who, (), 0.0) for who in everybody))

    async def announce(self, record: NodeRecord, who: Identity) -> bool:
        """List a machine; whether the directory took all of it. What this program does not sign is signed by hand."""
        filings, is_usual = filings_of(record, who)
        if not is_usual and "our own program does not sign it; it was signed by hand" not in self.tally.notes:
            self.tally.notes.append("our own program does not sign it; it was signed by hand")
        return all(await self.file(who, filings, record.expires_at))

    async def file(self, who: Identity, filings: Sequence[Filing], expires_at: float) -> list[bool]:
        """File items over an identity's own membership, whosever they are; which of them the directory took."""
        async with self._joining:
            if self._membership is None:
                membership = Membership(self.ground.join, Path(self.ground.folder), self.tally, self.scope)
                self._membership = await self.hold(membership)
        assert self._membership is not None
        taken = await self._membership.file(who, filings, expires_at)
        self.tally.acts += bool(filings)
        self.tally.refused += bool(filings) and not all(taken)
        return taken


def _any_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def _abort(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
