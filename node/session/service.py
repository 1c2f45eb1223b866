"""The node's gRPC service: bytes in, messages to sessions, bytes out. Owns no session state.

Garbage ends the stream that carried it with a typed status; the node and its other sessions go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import NoReturn

import grpc
import grpc.aio

from node.session.admission import AddressRefused, CallerCheck, OwnerClass, who_erred
from node.session.context import NodeContext
from node.session.hop_session import FrameRefused, HopSession
from node.session.refute import checked, received
from node.session.spans import MODEL, ServedSpans
from node.session.tail import ReplyBuffer
from node.session.upstreams import UpstreamStream
from swarm.base.errors import Busy, RemoteProtocolError, SwarmError
from swarm.base.ids import SessionId
from swarm.base.quota import OverQuota, address_key
from swarm.base.tasks import TaskScope
from swarm.link.link import Uplink, packed, unpacked
from swarm.protocol import wire
from swarm.protocol.faults import fault_of, sign_fault
from swarm.protocol.frames import FrameAssembler, FrameLimits, split
from swarm.protocol.limits import OPENING_HEAD_BYTES
from swarm.protocol.messages import (
    Attach,
    Close,
    Frame,
    Held,
    Ping,
    Pong,
    RepliesRequest,
    Reroute,
    Settled,
    Snapshot,
    SweepFrame,
    Tell,
)

FIRST_MESSAGE_S = 2.0
"""How long a stream may be silent at first: its message leaves with the stream, without a round trip in between, and
whoever attaches gives a machine up after 3 s from dialling on."""
MAX_REFUSED = 3
"""Refused frames that end their stream and its session: who keeps to the protocol sends none."""
LARGE_HEAD_BYTES = 64 << 10
"""A larger head is decoded on a thread, so that nobody else waits for it."""
REPAIR_S = 5.0
"""How long a reply stream waits for its session to be attached here."""
REPLY_PING_S = 0.5
"""Between pings on a reply stream, by which the client knows that its tail is there."""
UPSTREAM_S = 5.0
"""Silence of an upstream neighbour after which it counts as gone; its pings come more often."""
WRITE_S = 30.0
"""How long one message waits for a peer that does not read, before its stream is ended."""

logger = logging.getLogger(__name__)

RpcContext = grpc.aio.ServicerContext[bytes, bytes]
UnaryMethod = Callable[[bytes, RpcContext], Awaitable[bytes]]


StreamMethod = Callable[[AsyncIterator[bytes], RpcContext, str, ExitStack], Awaitable[None]]
"""Gets the address that pays for the stream, and its place among those without a session."""


class NodeService:
    """What one node answers: Hello, Info, Manifest, Link, Replies, and what is asked of texts."""

    def __init__(self, context: NodeContext, spans: ServedSpans, hello: Callable[[bytes], bytes]) -> None:
        """Answer for a node.

        Args:
            context: of any of its spans: what they have in common is read.
            hello: proves over a caller's nonce that this node answers; ValueError where that is none.
        """
        self._context = context
        self._spans = spans
        self._hello = hello
        self._callers = CallerCheck(context.peer, context.digest)
        self._admission = context.admission
        self._decoding = asyncio.Semaphore(1)

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a gRPC server needs to route calls here; messages stay bytes until `swarm.protocol.wire` reads them."""
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            wire.HELLO: grpc.unary_unary_rpc_method_handler(self._unary(self.hello)),
            wire.INFO: grpc.unary_unary_rpc_method_handler(self._unary(self.info)),
            wire.MANIFEST: grpc.unary_unary_rpc_method_handler(self._unary(self.manifest)),
            wire.LINK: grpc.stream_stream_rpc_method_handler(self._streamed(self.link)),
            wire.HOLD: grpc.unary_unary_rpc_method_handler(self._unary(self.hold)),
            wire.SETTLE: grpc.unary_unary_rpc_method_handler(self._unary(self.settle)),
            wire.RECEIPT: grpc.unary_unary_rpc_method_handler(self._unary(self.receipt)),
            wire.SHOW: grpc.unary_unary_rpc_method_handler(self._unary(self.show)),
            wire.REPLIES: grpc.stream_stream_rpc_method_handler(self._streamed(self.replies)),
            wire.REPORT: grpc.stream_stream_rpc_method_handler(self._streamed(self.report)),
        }
        by_name = {path.rsplit("/", 1)[1]: handler for path, handler in methods.items()}
        return grpc.method_handlers_generic_handler(wire.SERVICE, by_name)

    def _unary(self, method: UnaryMethod) -> UnaryMethod:
        """The method for as many calls as its caller may make."""

        async def call(request: bytes, context: RpcContext) -> bytes:
            address = address_key(context.peer())
            async with self._refusing(address, context):
                self._admission.check_call(address)
                return await method(request, context)
            raise AssertionError("refusing aborts")

        return call

    def _streamed(self, method: StreamMethod) -> Callable[[AsyncIterator[bytes], RpcContext], Awaitable[None]]:
        """The method for as many streams as its caller may open."""

        async def call(requests: AsyncIterator[bytes], context: RpcContext) -> None:
            address = address_key(context.peer())
            async with self._refusing(address, context):
                with self._admission.stream(address) as waiting:
                    await method(requests, context, address, waiting)

        return call

    @asynccontextmanager
    async def _refusing(self, address: str, context: RpcContext) -> AsyncIterator[None]:
        """End a call that its caller may not make, and tell a stranger nothing of what else goes wrong here."""
        try:
            yield
        except (OverQuota, AddressRefused) as error:
            self._admission.refused(address, error)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except (grpc.aio.BaseError, grpc.RpcError):
            raise  # an abort, or a peer that is gone
        except Exception as error:
            logger.error("a call failed", exc_info=error)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")

    async def hello(self, request: bytes, context: RpcContext) -> bytes:
        """Prove that this address belongs to this identity."""
        try:
            return self._hello(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def info(self, request: bytes, context: RpcContext) -> bytes:
        """What this node serves and has done, of the model that the call names."""
        return wire.encode_info(self._spans.table(_model(context)).info())

    async def manifest(self, request: bytes, context: RpcContext) -> bytes:
        """All weight files of the model; the answer is large, so it waits for its turn like rows."""
        self._admission.check_manifest(address_key(context.peer()))
        manifest = self._spans.manifest(_model(context))
        await self._context.uplink.turn(len(manifest))
        self._context.uplink.sent(len(manifest))
        return manifest

    async def hold(self, request: bytes, context: RpcContext) -> bytes:
        """Keep a session whose upstream is lost, or release it (R9), and say how far it is; only its client may ask."""
        try:
            hold = wire.decode_hold(request)
        except RemoteProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        await self._check_client(hold.session, context, wire.HOLD, request)
        hop = self._spans.find(hold.session)
        if hop is not None:
            hop.hold(hold)
        return wire.encode_held(Held(held=False) if hop is None else hop.standing())

    async def settle(self, request: bytes, context: RpcContext) -> bytes:
        """Sign what a session received and sent here (S4); only its client may ask."""
        try:
            session = wire.decode_settle(request).session
        except RemoteProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        await self._check_client(session, context, wire.SETTLE, request)
        hop = self._spans.find(session)
        sealed = await hop.settle() if hop is not None else self._spans.settled(session)
        return wire.encode_settled(Settled(sealed is not None, sealed or b""))

    async def receipt(self, request: bytes, context: RpcContext) -> bytes:
        """Take what a session's client signed for (S7), whoever brings it, and pass it on."""
        try:
            self._spans.receipt(request)
        except RemoteProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return b""

    async def show(self, request: bytes, context: RpcContext) -> bytes:
        """Leaves or rows of what was settled (S5); answers are large, so they wait for their turn like rows."""
        try:
            asked = wire.decode_show(request)
        except RemoteProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        await self._check_client(asked.session, context, wire.SHOW, request)
        self._admission.check_show(address_key(context.peer()))
        answer = wire.encode_shown(self._spans.show(asked))
        await self._context.uplink.turn(len(answer))
        self._context.uplink.sent(len(answer))
        return answer

    async def replies(
        self, requests: AsyncIterator[bytes], context: RpcContext, address: str, waiting: ExitStack
    ) -> None:
        """The picks of one session, for its client."""
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                first = await anext(requests, b"")
            request = wire.decode_replies_up(first)
        except (RemoteProtocolError, TimeoutError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error) or "no request came in time")
        hop = None
        if isinstance(request, RepliesRequest):
            await self._check_client(request.session, context, wire.REPLIES, first)
            hop = await self._spans.find_tail(request.session, REPAIR_S if request.may_wait else 0.0)
        if hop is None or not isinstance(request, RepliesRequest):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such session ends here")
        waiting.close()
        try:
            async with TaskScope() as scope:
                scope.spawn(self._hear(requests, hop, address))
                scope.spawn(_send_pings(hop.replies))
                out = TimedWriter(context, self._context.uplink)
                async for message in hop.replies.stream(request.acked):
                    if request.reads_packed:
                        message = await packed(message, 2 * hop.replies.link_ms, self._context.uplink)
                    for part in split(message, self._context.uplink.part_bytes):
                        await out.write(part)
        except TimeoutError:
            await _give_up(context)

    async def report(
        self, requests: AsyncIterator[bytes], context: RpcContext, address: str, waiting: ExitStack
    ) -> None:
        """Evidence of another machine (S6), which is computed again here some time; anybody may send it."""
        waiting.close()
        with self._admission.report(address):
            try:
                data = await received(requests)
                report = await checked(data)
                self._spans.table(report.settlement.fingerprint).refuter.take(data, report)
            except RemoteProtocolError as error:
                self._admission.refused(address, error)
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except Busy as error:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            await TimedWriter(context, self._context.uplink).write(b"")

    async def _check_client(self, session: SessionId, context: RpcContext, method: str, request: bytes) -> None:
        """End a call that does not come from the session's client."""
        try:
            if self._callers.identify(context.invocation_metadata(), method, request) == session:
                return
            refusal = "only the session's client may ask for this"
        except RemoteProtocolError as error:
            refusal = str(error)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal)

    async def _hear(self, requests: AsyncIterator[bytes], hop: HopSession, address: str) -> None:
        """What the client says on a reply stream (P17); each ping comes back with its nonce: when it was sent."""
        try:
            async for data in requests:
                match wire.decode_replies_up(data):
                    case Pong(nonce=nonce):
                        hop.replies.measured(max(time.perf_counter_ns() - nonce, 0) / 1e6)
                    case Tell() as tell:
                        hop.tell(tell, address)
                    case _:
                        pass
        except (RemoteProtocolError, grpc.aio.AioRpcError) as error:
            self._admission.refused("reply streams", error)

    async def link(self, requests: AsyncIterator[bytes], context: RpcContext, address: str, waiting: ExitStack) -> None:
        """One session's stream from its upstream neighbour."""
        upstream = UpstreamStream()
        try:
            async with TaskScope() as scope:
                reader = scope.spawn(self._read(requests, upstream, context, address, waiting))
                reader.add_done_callback(lambda _: upstream.end())
                await upstream.drain(TimedWriter(context, self._context.uplink).write)
        except TimeoutError:
            await _give_up(context)

    async def _read(
        self,
        requests: AsyncIterator[bytes],
        upstream: UpstreamStream,
        context: RpcContext,
        address: str,
        waiting: ExitStack,
    ) -> None:
        hop: HopSession | None = None
        attach: Attach | None = None
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                part = await anext(requests, None)
            if part is None:
                return  # the peer opened it and sent nothing
            attach = self._first(part, address)
            upstream.count_part()
            caller = self._callers.identify(context.invocation_metadata(), wire.LINK, attach.signature)
            hop = self._spans.table(attach.open.fingerprint).attach(attach, caller, upstream, address)
            waiting.close()
            await self._read_session(requests, hop, upstream)
        except TimeoutError:
            silence = RemoteProtocolError("attach", f"did not come within {FIRST_MESSAGE_S:.0f} s")
            self._refuse(upstream, silence, attach, address)
        except grpc.aio.AioRpcError:
            pass  # the neighbour's machine or process is gone
        except Exception as error:
            if not isinstance(error, SwarmError):
                logger.error("a stream failed", exc_info=error)
            self._admission.refused(address, error)
            if hop is None and attach is not None and attach.index == 0:
                self._admission.insisted(address)
            self._refuse(upstream, error, attach, address)
        finally:
            if hop is not None:
                hop.detach(upstream)

    def _refuse(self, upstream: UpstreamStream, error: Exception, attach: Attach | None, address: str) -> None:
        """Say why a stream ends. A hop before passes that on, so it is signed; a client hears it from here itself.

        Who is refused too often hears nothing: the stream just ends.
        """
        peer = self._context.peer
        if attach is None or attach.index == 0:
            upstream.send(fault_of(error, 0 if attach is None else attach.generation, peer))
        elif self._admission.may_sign(address):
            fault = fault_of(error, attach.generation, peer)
            upstream.send(sign_fault(fault, attach.session, peer, self._context.signer.sign))

    async def _read_session(self, requests: AsyncIterator[bytes], hop: HopSession, upstream: UpstreamStream) -> None:
        assembler = FrameAssembler(hop.frame_limits)
        loop = asyncio.get_running_loop()
        refused, owner_class = 0, OwnerClass.of(hop.account)
        try:
            async with asyncio.timeout(UPSTREAM_S) as deadline:
                async for part in requests:
                    deadline.reschedule(None)
                    upstream.count_part()
                    self._context.counters.bytes_in += len(part)
                    self._context.counters.bytes_in_by_class[owner_class] += len(part)
                    try:
                        message = await self._decode(assembler, part, hop.account)
                        if message is not None:
                            self._dispatch(await unpacked(message), hop, upstream)
                    except FrameRefused as error:
                        refused += 1
                        if refused >= MAX_REFUSED:
                            self._strike(hop.account)
                            hop.leave(f"{MAX_REFUSED} frames were refused; the last one: {error}")
                            return
                    except RemoteProtocolError:
                        self._strike(hop.account)
                        raise
                    deadline.reschedule(loop.time() + UPSTREAM_S)
                    if upstream.ended.is_set():
                        break
        except TimeoutError:
            logger.info("a neighbour is silent; its stream was ended")

    async def _decode(self, assembler: FrameAssembler, part: bytes, owner: str) -> Frame | None:
        """The message that a part completes, its rows as they came; the next part is read after it, so order stays."""
        if assembler.take(part) <= LARGE_HEAD_BYTES:
            return assembler.finish()
        async with self._decoding:
            started = time.perf_counter()
            try:
                return await asyncio.to_thread(assembler.finish)
            finally:
                self._admission.decoded(owner, time.perf_counter() - started)

    def _strike(self, owner: str) -> None:
        """Garbage came; where a machine carries it for others, it is not known who made it."""
        if OwnerClass.of(who_erred(owner)) is not OwnerClass.CARRIER:
            self._admission.strike(owner)

    def _first(self, part: bytes, address: str) -> Attach:
        """A stream's first message; no rows are taken before it."""
        try:
            message = FrameAssembler(FrameLimits(OPENING_HEAD_BYTES, rows_bytes=0)).feed(part)
            if not isinstance(message, Attach):
                raise RemoteProtocolError("attach", "must be the first message of a stream")
        except RemoteProtocolError:
            self._admission.strike(address)
            raise
        return message

    def _dispatch(self, message: Frame, hop: HopSession, upstream: UpstreamStream) -> None:
        match message:
            case SweepFrame():
                hop.receive(upstream, message)
            case Ping(nonce=nonce):
                upstream.send(Pong(nonce))
            case Reroute():
                self._admission.check_reroute(hop.account)
                hop.reroute(upstream, message)
            case Snapshot():
                hop.restore(upstream, message)
            case Close():
                hop.closed_by(upstream, message)
            case Attach():
                raise RemoteProtocolError("attach", "a stream carries one session")
            case _:
                raise RemoteProtocolError("kind", f"{type(message).__name__} is not understood by this version")


def _model(context: RpcContext) -> str | None:
    """The model that a call is about; None where it names none."""
    return next((str(value) for key, value in context.invocation_metadata() or () if key == MODEL), None)


async def _send_pings(replies: ReplyBuffer) -> None:
    while True:
        replies.ping(Ping(time.perf_counter_ns()))
        await asyncio.sleep(REPLY_PING_S)


class TimedWriter:
    """A stream's way out: TimeoutError when the peer does not read for `WRITE_S`."""

    def __init__(self, context: RpcContext, uplink: Uplink) -> None:
        self._context = context
        self._uplink = uplink
        self._is_begun = False

    async def write(self, message: bytes) -> None:
        """Send one message, when it is its turn."""
        await self._uplink.turn(len(message))
        async with asyncio.timeout(WRITE_S):
            if not self._is_begun:  # gRPC cannot end a stream whose first write, which begins it, was cancelled
                await self._context.send_initial_metadata(())
                self._is_begun = True
            await self._context.write(message)
        self._uplink.sent(len(message))


async def _give_up(context: RpcContext) -> NoReturn:
    logger.warning("ended the stream of a peer that does not read")
    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing was read here for {WRITE_S:.0f} s")
