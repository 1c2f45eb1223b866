"""A client that follows no rules: it sends any message, or any bytes, to any hop and records every answer.

It knows the keys of sessions that `attach` named and the identities of nodes that `route_of` put into routes. So
what it sends is signed and introduced rightly, unless a test says otherwise.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import grpc.aio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.life.serve import Node
from swarm.base.ids import PeerId, SessionId, TreeNodeId
from swarm.base.layers import Span
from swarm.link.dial import open_channel
from swarm.link.link import Metadata, Signer, Stream, introduce
from swarm.protocol import wire
from swarm.protocol.authority import SessionKey
from swarm.protocol.frames import FrameAssembler, split
from swarm.protocol.messages import (
    Ack,
    Attach,
    Codec,
    Counters,
    Frame,
    NodeInfo,
    Open,
    RepliesRequest,
    Reply,
    RouteHop,
    Sampling,
    Sweep,
    Upstream,
)

M = TypeVar("M", bound=Upstream)
Unary = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]

ANSWER_S = 10.0
"""The longest wait for an answer."""

_keys: dict[SessionId, SessionKey] = {}
_identities: dict[PeerId, Signer] = {}


@dataclass(slots=True)
class RawLink:
    """One stream to one hop.

    Attributes:
        call: the gRPC stream.
        heard: every answer so far.
    """

    call: Stream
    heard: list[Upstream] = field(default_factory=list)

    async def send(self, *messages: Frame) -> None:
        """Send messages as frames in parts, an attach with the signature of its session's key."""
        for message in messages:
            for part in split(signed(message) if isinstance(message, Attach) else message):
                await self.call.write(part)

    async def send_bytes(self, part: bytes) -> None:
        """Send these bytes as a frame part."""
        await self.call.write(part)

    async def read(self) -> Upstream | None:
        """The next answer; None at the end of the stream."""
        async with asyncio.timeout(ANSWER_S):
            data = await self.call.read()
        if not isinstance(data, bytes):
            return None
        self.heard.append(wire.decode_upstream(data))
        return self.heard[-1]

    async def until(self, kind: type[M]) -> M:
        """The next answer of a kind; earlier ones are recorded only."""
        while (answer := await self.read()) is not None:
            if isinstance(answer, kind):
                return answer
        raise AssertionError(f"the stream ended without {kind.__name__}; heard {self.heard}")

    async def receipt(self, parts: int) -> Ack:
        """The receipt of this number of parts; the attach is the first."""
        while (ack := await self.until(Ack)).parts < parts:
            pass
        return ack

    async def status(self) -> grpc.StatusCode:
        """How the call ended."""
        async with asyncio.timeout(ANSWER_S):
            return await self.call.code()


@dataclass(slots=True)
class RawReplies:
    """A reply stream.

    Attributes:
        call: the stream.
        joiner: puts parts together.
        first: what the stream began with, if that was a reply which nobody has read yet.
    """

    call: Stream
    joiner: FrameAssembler = field(default_factory=FrameAssembler)
    first: Reply | None = None

    async def opened(self) -> None:
        """Wait until the stream is open: the tail begins with a ping, or with a reply that waited for the stream."""
        async with asyncio.timeout(ANSWER_S):
            message = self.joiner.feed(_bytes(await self.call.read()))
        self.first = message if isinstance(message, Reply) else None

    async def read(self) -> Reply:
        """The next reply."""
        if self.first is not None:
            reply, self.first = self.first, None
            return reply
        async with asyncio.timeout(ANSWER_S):
            while True:
                message = self.joiner.feed(_bytes(await self.call.read()))
                if isinstance(message, Reply):
                    return message


def _bytes(data: object) -> bytes:
    assert isinstance(data, bytes), "the stream ended"
    return data


@asynccontextmanager
async def dial(
    node: Node, method: str, options: Sequence[tuple[str, int]] = (), metadata: Metadata = ()
) -> AsyncIterator[Stream]:
    """A stream to a node over a connection of its own, cancelled at the end."""
    async with open_channel(node.endpoint, list(options)) as channel:
        call: Stream = channel.stream_stream(method)(metadata=metadata)
        try:
            yield call
        finally:
            call.cancel()


@asynccontextmanager
async def raw_link(node: Node, *first: Frame, opens: Attach | None = None) -> AsyncIterator[RawLink]:
    """A link to a node that begins with these messages, by the client or the hop before.

    Args:
        node: whom to call.
        first: messages.
        opens: the attach that the caller introduces itself for, if it is not the first of them.
    """
    attach = opens or next((message for message in first if isinstance(message, Attach)), None)
    metadata = () if attach is None else opening_of(node, attach)
    async with dial(node, wire.LINK, metadata=metadata) as call:
        link = RawLink(call)
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # refused before: the status says why
            await link.send(*first)
        yield link


@asynccontextmanager
async def raw_replies(
    node: Node, session: SessionId, options: Sequence[tuple[str, int]] = (), acked: int = 0
) -> AsyncIterator[RawReplies]:
    """A reply stream from a node; `options` are its channel's."""
    first = wire.encode_replies_up(RepliesRequest(session, acked=acked))
    async with dial(node, wire.REPLIES, options, introduced(node, wire.REPLIES, _keys[session], first)) as call:
        await call.write(first)
        replies = RawReplies(call)
        await replies.opened()
        yield replies


def introduced(node: Node, method: str, signer: Signer, subject: bytes) -> Metadata:
    """A caller's introduction to a node."""
    return introduce(signer, node.endpoint, method, subject)


@cache
def key_of(name: bytes) -> SessionKey:
    """The key of the session that tests call by this name; the same at each call."""
    key = SessionKey(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name).digest()))
    _keys[key.session] = key
    return key


def signed(attach: Attach) -> Attach:
    """The attach with its client's signature, if that is known."""
    key = _keys.get(attach.session)
    return attach if key is None else key.command(attach)


def opening_of(node: Node, attach: Attach) -> Metadata:
    """The introduction of whoever may open a stream with this attach: its client, or the hop before."""
    before = _identities.get(attach.route[attach.index - 1].peer) if attach.index else None
    signer = before or _keys.get(attach.session, key_of(b"nobody's"))
    return introduced(node, wire.LINK, signer, signed(attach).signature)


async def info(node: Node) -> NodeInfo:
    """The answer of the node's Info call."""
    async with open_channel(node.endpoint, []) as channel:
        call: Unary = channel.unary_unary(wire.INFO)
        return wire.decode_info(await call(b"", timeout=ANSWER_S))


async def counters(nodes: Iterable[Node]) -> list[Counters]:
    """Every node's counters, over Info."""
    return [(await info(node)).counters for node in nodes]


def route_of(nodes: Sequence[Node], spans: Sequence[str]) -> tuple[RouteHop, ...]:
    """The chain of these nodes over these layers."""
    _identities.update((node.peer_id, node.registry.identity) for node in nodes)
    return tuple(RouteHop(node.peer_id, Span.parse(span)) for node, span in zip(nodes, spans, strict=True))


def attach(route: tuple[RouteHop, ...], open_: Open, session: bytes, index: int = 0, generation: int = 0) -> Attach:
    """The first message of a link, of the session that tests call by this name."""
    key = key_of(session)
    return key.command(Attach(key.session, generation, route, index, open_))


def opening(node: Node, *, window: int = 256, sweeps: int = 4, nodes: int = 256) -> Open:
    """An `Open` with these limits."""
    return Open(node.identity.fingerprint, window, sweeps, nodes, Codec.FP32)


class SweepNumbering:
    """Numbers a session's sweeps as a client does; the test chooses tokens, parents and commits."""

    def __init__(self, sampling: Sampling | None = None) -> None:
        self.sequence = 0
        self.next_id = 0
        self.committed = 0
        self._sampling = sampling

    def next(
        self, tokens: Sequence[int], parents: Sequence[int | None], commit: Sequence[int] = (), acked: int = 0
    ) -> Sweep:
        """The next sweep: commits the path `commit` (its last node is `commit_to`), appends tokens under parents."""
        self.sequence += 1
        self.committed += len(commit)
        sweep = Sweep(
            sequence=self.sequence,
            committed=self.committed,
            first_id=TreeNodeId(self.next_id),
            tokens=tuple(tokens),
            parents=tuple(None if parent is None else TreeNodeId(parent) for parent in parents),
            picks_from=TreeNodeId(self.next_id),
            acked=acked,
            commit_to=TreeNodeId(commit[-1]) if commit else None,
            sampling=self._sampling,
        )
        self.next_id += len(tokens)
        self._sampling = None
        return sweep

    def chain(self, tokens: Sequence[int], commit: Sequence[int] = (), acked: int = 0) -> Sweep:
        """The next sweep with a chain of tokens below the tip."""
        parents = [None, *range(self.next_id, self.next_id + len(tokens) - 1)]
        return self.next(tokens, parents, commit, acked)
