"""Sends garbage to a live node in sessions side by side and judges the answers. Starts no node and measures none."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc
import grpc.aio

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import SessionId
from swarm.base.layers import Span
from swarm.directory.identity import Identity
from swarm.link.dial import CHANNEL_OPTIONS, open_channel
from swarm.link.endpoint import Endpoint
from swarm.link.link import Stream, introduce
from swarm.protocol import wire
from swarm.protocol.frames import FrameAssembler, split
from swarm.protocol.messages import Close, Fault, FaultKind, Ready, RepliesRequest, Reply, RouteHop
from tests.net.node.session.garbage import ENDING, GOING_ON, WEIGHTS, FrameKind, GarbageWriter, Role, ServedModel

WORKERS = 6
PATIENCE_S = 30.0
"""An episode that is not over by then has met a node that does not answer."""
REPLY_S = 3.0
"""Of a reply that does not come by then: the node refused what this side took for right."""


class Broken(Exception):
    """A node did not do what it must do under garbage."""


@dataclass(frozen=True, slots=True)
class FloodTarget:
    """The node under attack, and one behind it.

    Attributes:
        node: The node, which holds all layers.
        behind: The node behind it, which holds the second half.
        pretended: The hop before the node, where there is one: this program.
    """

    node: Endpoint
    behind: Endpoint
    behind_span: Span
    model: ServedModel
    num_layers: int
    pretended: Identity = field(default_factory=Identity.ephemeral)

    def roles(self) -> list[tuple[Role, Endpoint]]:
        """Every place that the node can have in a chain, and the chain's tail."""
        quarter, half = self.num_layers // 4, self.behind_span.start
        pretended, behind = self.pretended.peer_id, RouteHop(self.behind.peer, self.behind_span)

        def own(start: int, end: int) -> RouteHop:
            return RouteHop(self.node.peer, Span(start, end))

        return [
            (Role((own(0, self.num_layers),), 0), self.node),
            (Role((own(0, half), behind), 0), self.behind),
            (Role((RouteHop(pretended, Span(0, quarter)), own(quarter, half), behind), 1), self.behind),
            (Role((RouteHop(pretended, Span(0, half)), own(half, self.num_layers)), 1), self.node),
        ]


@dataclass(slots=True)
class FloodCounts:
    """What was sent, and what came back."""

    sent: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)

    @property
    def frames(self) -> int:
        return self.sent.total()

    def hear(self, message: object) -> None:
        """Count an answer; a fault that names an accident in the node is one answer too many."""
        match message:
            case Fault(kind=FaultKind.INTERNAL, reason=reason) if "ArithmeticError" not in reason:
                raise Broken(f"an accident in the node: {reason}")
            case Fault(kind=kind, field=part):
                self.answers[f"fault {kind.value} {part}".strip()] += 1
            case _:
                self.answers[type(message).__name__.lower()] += 1

    def end(self, code: grpc.StatusCode) -> None:
        """Count how a stream ended; a handler that raised would say UNKNOWN."""
        self.endings[code.name.lower()] += 1
        if code in {grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}:
            raise Broken(f"a stream ended with {code.name}")


class Episode:
    """One session with one stream, from its attach to its end."""

    def __init__(self, writer: GarbageWriter, target: FloodTarget, tail: Endpoint, counts: FloodCounts) -> None:
        self._writer = writer
        self._target = target
        self._tail = tail
        self._rng = writer.rng
        self._counts = counts
        self._changed = asyncio.Event()
        self._is_ready = False
        self._is_over = False
        self._has_replies = False
        self._is_deaf = writer.rng.random() < 0.03

    async def run(self, to_node: grpc.aio.Channel, to_tail: grpc.aio.Channel) -> None:
        """Attach, talk, and end in one of many ways."""
        attach = self._writer.attach(right=self._is_deaf)
        signer = self._target.pretended if attach.index else self._writer.key
        metadata = introduce(signer, self._target.node, wire.LINK, attach.signature)
        call: Stream = to_node.stream_stream(wire.LINK)(metadata=metadata)
        async with asyncio.TaskGroup() as group:
            reader = None if self._is_deaf else group.create_task(self._hear(call))
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._write(call, FrameKind.ATTACH, list(split(attach)))
                    if not self._is_deaf and self._rng.random() < 0.9:
                        await self._until(lambda: self._is_ready)
                    async with self._replies(to_tail):
                        await self._talk(call)
                    if reader is None:
                        await self._half_close(call)
                        await self._hear(call)
                    else:
                        await self._finish(call)
                        await reader
            except TimeoutError:
                raise Broken(f"a session was not over within {PATIENCE_S:.0f} s") from None
            finally:
                call.cancel()

    async def _talk(self, call: Stream) -> None:
        for _ in range(self._rng.randint(1, 60)):
            if self._is_over or call.done():
                return
            # A write to an unread stream that the node has ended leaves a task of gRPC's behind, and a ping ends none.
            kind = FrameKind.PING if self._is_deaf else self._rng.choices(GOING_ON, WEIGHTS)[0]
            if self._has_replies and self._writer.must_wait and self._rng.random() < 0.9:
                try:
                    async with asyncio.timeout(REPLY_S):
                        await self._until(lambda: not self._writer.must_wait or not self._has_replies)
                except TimeoutError:
                    return
            await self._write(call, kind, self._writer.say(kind))

    async def _finish(self, call: Stream) -> None:
        if self._rng.random() < 0.5:
            kind = self._rng.choice(ENDING)
            await self._write(call, kind, self._writer.say(kind))
        match self._rng.randrange(3):
            case 0:
                await self._write(call, FrameKind.VALID, list(split(Close("done"))))
                await self._half_close(call)
            case 1:
                await self._half_close(call)
            case _:
                call.cancel()

    async def _half_close(self, call: Stream) -> None:
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await call.done_writing()

    async def _write(self, call: Stream, kind: FrameKind, parts: Sequence[bytes]) -> None:
        try:
            for part in parts:
                self._counts.sent[kind] += 1
                await call.write(part)
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            self._over()  # the node ended the stream meanwhile; the reader counts how

    async def _hear(self, call: Stream) -> None:
        try:
            while isinstance(data := await call.read(), bytes):
                message = wire.decode_upstream(data)
                self._counts.hear(message)
                self._is_ready = self._is_ready or isinstance(message, Ready)
                self._changed.set()
        except grpc.aio.AioRpcError:
            pass
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
        self._over()
        self._counts.end(await call.code())

    @asynccontextmanager
    async def _replies(self, to_tail: grpc.aio.Channel) -> AsyncIterator[None]:
        """A reply stream beside the talk: usually the session's own, sometimes for a guessed id, sometimes unread."""
        session = self._writer.key.session
        chance, acked = self._rng.random(), 0
        if chance < 0.05:
            session = SessionId(self._rng.randbytes(16))
        elif chance < 0.10:
            acked = self._rng.choice((5, 2**62))
        request = wire.encode_replies_up(RepliesRequest(session, acked=acked))
        if chance > 0.97:
            request = self._rng.randbytes(self._rng.choice((0, 3, 40)))
        metadata = introduce(self._writer.key, self._tail, wire.REPLIES, request)
        call: Stream = to_tail.stream_stream(wire.REPLIES)(metadata=metadata)
        async with asyncio.TaskGroup() as group:
            self._counts.sent["reply request"] += 1
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(request)
            if chance < 0.94 or chance > 0.97:
                self._has_replies = acked == 0
                group.create_task(self._collect(call))
            try:
                yield
                if 0.94 <= chance <= 0.97:  # deaf until now
                    with suppress(TimeoutError, grpc.aio.AioRpcError):
                        async with asyncio.timeout(REPLY_S):
                            await call.read()
            finally:
                call.cancel()

    async def _collect(self, call: Stream) -> None:
        joiner = FrameAssembler()
        try:
            while isinstance(part := await call.read(), bytes):
                message = joiner.feed(part)
                if isinstance(message, Reply):
                    self._counts.answers["reply"] += 1
                    self._writer.answered = max(self._writer.answered, message.sequence)
                    self._changed.set()
        except grpc.aio.AioRpcError as error:
            self._counts.end(error.code())
        except RemoteProtocolError as error:
            raise Broken(f"a reply breaks the protocol: {error}") from None
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
        finally:
            self._has_replies = False
            self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self._is_over:
            self._changed.clear()
            await self._changed.wait()

    def _over(self) -> None:
        self._is_over = True
        self._changed.set()


async def fuzz(target: FloodTarget, frames: int, seed: int, counts: FloodCounts) -> None:
    """Send so many frames in sessions side by side; the same seed says the same things.

    Raises:
        Broken: a node answered as it must not, or not at all.
    """
    roles = target.roles()

    async def work(number: int) -> None:
        rng = random.Random(f"{seed}/{number}")
        async with (
            open_channel(target.node, CHANNEL_OPTIONS) as node,
            open_channel(target.behind, CHANNEL_OPTIONS) as behind,
        ):
            while counts.frames < frames:
                role, tail = rng.choice(roles)
                episode = Episode(GarbageWriter(rng, target.model, role), target, tail, counts)
                await episode.run(node, node if tail == target.node else behind)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(WORKERS):
                group.create_task(work(number))
    except* Broken as broken:
        raise _first(broken) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
