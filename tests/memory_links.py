"""Links between machines of one process: what nodes and clients use of gRPC, in memory and without TLS.

Messages take a link's delay and keep their order. By plan a machine dies (`MemoryServer.stop`), says and hears nothing
more (`MemoryLinks.mute`), or loses one caller (`MemoryLinks.lose`). Windows are bounded as HTTP/2's are:
who does not read is not written to. It knows nothing of certificates, of frames on a wire and of gRPC's own pauses
before it dials again; what depends on them is tested over gRPC.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NoReturn

import grpc
import grpc.aio
import pytest
from grpc import ChannelConnectivity, StatusCode

from swarm.link.link import KEY, Metadata

WINDOW_BYTES = 64 << 10
"""Of one direction of a call, that were not read yet; a channel's option for gRPC's window narrows it."""
ROUNDING_S = 1e-9
"""By so much a loop may call earlier than it was asked to."""
CONNECT_ROUND_TRIPS = 2
"""Before the first message of a channel: TCP's and TLS's."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ended."""

    code: StatusCode
    details: str = ""

    def error(self) -> grpc.aio.AioRpcError:
        none = grpc.aio.Metadata()
        return grpc.aio.AioRpcError(self.code, none, none, details=self.details)


@dataclass(frozen=True, slots=True)
class _Details(grpc.HandlerCallDetails):
    """What a generic handler is asked by."""

    method: str
    invocation_metadata: Metadata


class _Pipe:
    """One direction of a call: what was written arrives in order, after the machine's delay; None is the end."""

    def __init__(self, call: MemoryCall, opened_s: float, window_bytes: int, arrived: Callable[[Any], None]) -> None:
        self._call = call
        self._window_bytes = window_bytes
        self._arrived = arrived
        self._last_s = opened_s
        self._coming: deque[tuple[float, Any]] = deque()
        self._here: deque[Any] = deque()
        self._unread = 0
        self._changed = asyncio.Event()
        self.broken: Status | None = None

    async def put(self, item: bytes | Status | None) -> None:
        """Send something, once the window has room."""
        while self._unread >= self._window_bytes and isinstance(item, bytes) and self.broken is None:
            await self._change()
        if self.broken is None:
            self.put_now(item)

    def put_now(self, item: bytes | Status | None) -> None:
        """Send something that needs no room."""
        loop = asyncio.get_running_loop()
        self._unread += len(item) if isinstance(item, bytes) else 0
        self._last_s = max(self._last_s, loop.time() + self._call.machine.delay_s)
        self._coming.append((self._last_s, item))
        loop.call_at(self._last_s, self.arrive)

    def arrive(self) -> None:
        """Whatever is due is here, unless the machine is mute."""
        now_s = asyncio.get_running_loop().time() + ROUNDING_S
        while self._coming and self._coming[0][0] <= now_s and not self._call.is_mute:
            item = self._coming.popleft()[1]
            self._here.append(item)
            self._arrived(item)
            self._changed.set()

    async def get(self) -> bytes | Status | None:
        """What came next; the end stays."""
        while not self._here:
            if self.broken is not None:
                return self.broken
            await self._change()
        if not isinstance(self._here[0], bytes):
            end: Status | None = self._here[0]
            return end
        item: bytes = self._here.popleft()
        self._unread -= len(item)
        self._changed.set()
        return item

    def break_off(self, status: Status) -> None:
        """Nothing arrives any more."""
        self.broken = self.broken or status
        self._coming.clear()
        self._here.clear()
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class MemoryCall:
    """A stream, as its caller has it."""

    def __init__(self, channel: MemoryChannel, machine: MemoryServer, method: str, metadata: Metadata) -> None:
        opened_s = channel.connect(machine)
        self.method, self.metadata, self.peer = method, metadata, channel.peer
        self.machine = machine
        self.requests = _Pipe(self, opened_s, WINDOW_BYTES, lambda _: None)
        self.responses = _Pipe(self, opened_s, channel.window_bytes, self._note)
        self.handler: asyncio.Task[None] | None = None
        self._status: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._is_half_closed = False

    @property
    def caller(self) -> bytes:
        """The public key of whoever introduced itself; empty for who did not."""
        return dict(self.metadata).get(KEY, b"")

    @property
    def is_mute(self) -> bool:
        """Whether one of both ends says and hears nothing."""
        return not self.machine.links.muted.isdisjoint((self.machine, self.caller))

    def _note(self, item: object) -> None:
        if isinstance(item, Status) and not self._status.done():
            self._status.set_result(item)

    async def write(self, message: bytes) -> None:
        if self._is_half_closed:
            raise asyncio.InvalidStateError("the caller said that it is done")
        await self.requests.put(message)
        if self._status.done():
            raise self._status.result().error()

    async def done_writing(self) -> None:
        self._is_half_closed = True
        await self.requests.put(None)

    async def read(self) -> bytes | Any:  # noqa: ANN401 - gRPC's end of a stream has no type
        item = await self.responses.get()
        if not isinstance(item, Status):
            return item
        if item.code is StatusCode.OK:
            return grpc.aio.EOF
        if item.code is StatusCode.CANCELLED and item is _CANCELLED:
            raise asyncio.CancelledError
        raise item.error()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[bytes]:
        while isinstance(message := await self.read(), bytes):
            yield message

    async def code(self) -> StatusCode:
        return (await asyncio.shield(self._status)).code

    async def details(self) -> str:
        return (await asyncio.shield(self._status)).details

    def done(self) -> bool:
        return self._status.done()

    def cancel(self) -> bool:
        """End the call on this side; the other one hears of it."""
        was_running = not self.done()
        self.end(_CANCELLED)
        return was_running

    def end(self, status: Status) -> None:
        """The call is over at once, for both sides."""
        if not self._status.done():
            self._status.set_result(status)
            self.responses.break_off(status)
        self.requests.break_off(status)
        if self.handler is not None:
            self.handler.cancel()


_CANCELLED = Status(StatusCode.CANCELLED, "the caller cancelled it")
_KILLED = Status(StatusCode.UNAVAILABLE, "Socket closed")
_NOBODY = Status(StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: connection refused")
_LATE = Status(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


class _Context:
    """A stream, as its handler has it."""

    def __init__(self, call: MemoryCall) -> None:
        self._call = call

    def peer(self) -> str:
        return self._call.peer

    def invocation_metadata(self) -> Metadata:
        return self._call.metadata

    async def send_initial_metadata(self, _: object) -> None:
        """Drop what gRPC would send when the call ends: no test reads it."""

    async def write(self, message: bytes) -> None:
        await self._call.responses.put(message)

    async def abort(self, code: StatusCode, details: str = "") -> NoReturn:
        self._call.responses.put_now(Status(code, details))
        raise grpc.aio.AbortError(details)


@dataclass(eq=False)
class MemoryServer:
    """A machine's server, as `grpc.aio.server` makes one.

    Attributes:
        delay_s: one way, of every link to it.
        calls: that run here.
    """

    links: MemoryLinks
    delay_s: float
    calls: set[MemoryCall] = field(default_factory=set)
    _handlers: list[grpc.GenericRpcHandler] = field(default_factory=list)
    _is_closed: bool = False

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._handlers += handlers

    def add_secure_port(self, address: str, _: object = None) -> int:
        return self.links.bind(self, address)

    add_insecure_port = add_secure_port

    async def start(self) -> None:
        """It answers from the moment it has a port."""

    async def stop(self, grace: float | None) -> None:
        """Take no more calls, and end those that run after a while; None: at once, as if the machine died."""
        self._is_closed = True
        self.links.release(self)
        running = [call.handler for call in self.calls if call.handler is not None]
        if grace and running:
            await asyncio.wait(running, timeout=grace)
        for call in list(self.calls):
            call.end(_KILLED)
        while self.calls:
            await asyncio.wait([call.handler for call in self.calls if call.handler is not None])

    def begin(self, call: MemoryCall) -> None:
        """Answer a call, when it has arrived."""
        self.calls.add(call)
        call.handler = asyncio.get_running_loop().create_task(self._answer(call))
        call.handler.add_done_callback(lambda _: self.calls.discard(call))

    async def _answer(self, call: MemoryCall) -> None:
        details = _Details(call.method, call.metadata)
        handler: Any = next(filter(None, (one.service(details) for one in self._handlers)), None)
        if handler is None:
            call.responses.put_now(Status(StatusCode.UNIMPLEMENTED, "Method not found!"))
            return
        context = _Context(call)
        try:
            if handler.response_streaming:
                await handler.stream_stream(_requests(call), context)
            else:
                call.responses.put_now(await handler.unary_unary(await call.requests.get(), context))
            call.responses.put_now(Status(StatusCode.OK))
        except grpc.aio.AbortError:
            pass  # the caller was told

    @property
    def is_closed(self) -> bool:
        return self._is_closed


async def _requests(call: MemoryCall) -> AsyncIterator[bytes]:
    while isinstance(message := await call.requests.get(), bytes):
        yield message


class MemoryChannel:
    """A way to a machine, as `grpc.aio.secure_channel` makes one."""

    def __init__(self, links: MemoryLinks, address: str, number: int, window_bytes: int) -> None:
        self._links, self._address = links, address
        self.window_bytes = window_bytes
        self.peer = f"ipv4:127.0.0.1:{number}"
        self._ready: tuple[MemoryServer, float] | None = None
        self._calls: list[MemoryCall] = []

    def stream_stream(self, method: str) -> Callable[..., MemoryCall]:
        def call(metadata: Metadata = ()) -> MemoryCall:
            return self._begin(method, metadata)

        return call

    def unary_unary(self, method: str) -> Callable[..., Awaitable[bytes]]:
        async def call(request: bytes, timeout: float | None = None, metadata: Metadata = ()) -> bytes:  # noqa: ASYNC109
            begun = self._begin(method, metadata)
            try:
                async with asyncio.timeout(timeout):
                    await begun.requests.put(request)
                    answer = await begun.read()
                    assert isinstance(answer, bytes)
                    return answer
            except TimeoutError:
                raise _LATE.error() from None
            finally:
                begun.cancel()

        return call

    def connect(self, machine: MemoryServer) -> float:
        """When the first message of a call can leave."""
        now_s = asyncio.get_running_loop().time()
        if self._ready is None or self._ready[0] is not machine:
            self._ready = machine, now_s + CONNECT_ROUND_TRIPS * 2 * machine.delay_s
        return max(now_s, self._ready[1]) + machine.delay_s

    def _begin(self, method: str, metadata: Metadata) -> MemoryCall:
        machine = self._links.at(self._address)
        call = MemoryCall(self, machine or self._links.nobody, method, metadata)
        self._calls = [one for one in self._calls if not one.done()] + [call]
        if machine is None:
            call.responses.put_now(_NOBODY)
        elif (machine, call.caller) not in self._links.lost:
            machine.begin(call)
        return call

    def get_state(self, try_to_connect: bool = False) -> ChannelConnectivity:
        is_ready = self._ready is not None and not self._ready[0].is_closed
        return ChannelConnectivity.READY if is_ready else ChannelConnectivity.IDLE

    async def close(self, grace: float | None = None) -> None:
        for call in self._calls:
            call.cancel()
        self._calls.clear()

    async def __aenter__(self) -> MemoryChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class MemoryLinks:
    """All machines, and the links between them.

    Attributes:
        delay_s: one way, of links to machines that are started from now on.
        muted: machines, and public keys of callers, of whom nothing arrives and who hear nothing; nobody is told.
        lost: (machine, public key of a caller): what that caller sends there from now on never arrives.
        nobody: whoever dials an address where no machine is.
    """

    def __init__(self, delay_s: float = 0.0005) -> None:
        self.delay_s = delay_s
        self.muted: set[MemoryServer | bytes] = set()
        self.lost: set[tuple[MemoryServer, bytes]] = set()
        self.nobody = MemoryServer(self, delay_s)
        self._machines: dict[str, MemoryServer] = {}
        self._numbers = count(20_000)

    def server(self, **_: object) -> MemoryServer:
        return MemoryServer(self, self.delay_s)

    def channel(self, address: str, _: object = None, options: Sequence[tuple[str, int | str]] = ()) -> MemoryChannel:
        window_bytes = dict(options).get("grpc.http2.lookahead_bytes", WINDOW_BYTES)
        return MemoryChannel(self, address, next(self._numbers), int(window_bytes))

    def bind(self, machine: MemoryServer, address: str) -> int:
        host, _, port = address.rpartition(":")
        number = int(port) or next(self._numbers)
        if f"{host}:{number}" in self._machines:
            raise RuntimeError("the port is taken")
        self._machines[f"{host}:{number}"] = machine
        return number

    def release(self, machine: MemoryServer) -> None:
        self._machines = {address: other for address, other in self._machines.items() if other is not machine}

    def at(self, address: str) -> MemoryServer | None:
        return self._machines.get(address)

    def mute(self, *ends: MemoryServer | bytes) -> None:
        """Let nothing through from and to these alone; what waited for others goes on."""
        self.muted = set(ends)
        for machine in set(self._machines.values()):
            for call in list(machine.calls):
                call.requests.arrive()
                call.responses.arrive()

    def lose(self, machine: MemoryServer, caller: bytes) -> None:
        """What a caller has open at a machine breaks, and whatever it dials there later is never answered."""
        self.lost.add((machine, caller))
        for call in list(machine.calls):
            if call.caller == caller:
                call.end(_KILLED)

    @contextmanager
    def in_place_of_grpc(self) -> Iterator[MemoryLinks]:
        """Whoever asks gRPC for a server or a channel gets one of these."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grpc.aio, "server", self.server)
            patch.setattr(grpc.aio, "secure_channel", self.channel)
            patch.setattr(grpc.aio, "insecure_channel", self.channel)
            yield self
