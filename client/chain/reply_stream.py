"""The stream on which one tail sends its replies. Read by a task of its own, so no tail waits for a client (F1)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc
import grpc.aio

from swarm.errors import HopClosed, HopError, HopMisbehaved, HopTimeout, RemoteProtocolError, SwarmError, Unreachable
from swarm.protocol import wire
from swarm.protocol.authority import SessionKey
from swarm.protocol.frames import FrameAssembler, FrameLimits
from swarm.protocol.messages import Ping, Pong, RepliesRequest, Reply, RouteHop
from swarm.runtime.tasks import TaskScope
from swarm.transport.dial import Connection, plain_reason
from swarm.transport.introduction import introduce
from swarm.transport.link import Stream
from swarm.transport.liveness import ROUND_TRIPS, SILENCE_S, pause

OPEN_S = 8.0
"""How long a tail may take to be dialled and to begin, its session's attach included."""
FAULT_GRACE_S = 0.5
"""When the tail ends the stream itself, its reason comes up the chain a little later."""
PINGS_S = 0.5
"""Between the tail's pings."""
CHECK_S = 0.1
"""Between looks at the clock."""
MAX_RTT_S = 4.0
"""A tail's claim of a longer round trip is taken as this one: it would only be waited for in silence for longer."""


class ReplyStream:
    """The replies of one session from one tail, from `run` until it is cancelled or broken.

    Attributes:
        tail: the machine, and its layers.
        is_broken: nothing comes any more.
        stuck: the connection, if nothing came on it any more.
        opened: set when the tail's first message came.
        heard_s: when a part of a reply last came, by `time.monotonic`; 0 before.
    """

    def __init__(
        self,
        tail: RouteHop,
        key: SessionKey,
        listener: Callable[[ReplyStream, Reply | SwarmError], None],
        rows_bytes: int = 0,
    ) -> None:
        """Ask for nothing yet.

        Args:
            tail: whose replies they are.
            key: of the session.
            listener: called with this stream and every reply, and once with the error that ended it.
            rows_bytes: of the hidden rows that one reply may bring.
        """
        self.tail = tail
        self.is_broken = False
        self.stuck: grpc.aio.Channel | None = None
        self.opened = asyncio.Event()
        self.heard_s = 0.0
        self._key = key
        self._listener = listener
        self._rows_bytes = rows_bytes
        self._rtt_s = 0.5
        self._patient_until = 0.0

    async def run(self, dial: Callable[[], Connection], request: RepliesRequest) -> None:
        """Ask for the replies and give each to the listener, and at the end the error that ended them.

        Args:
            dial: gives the connection to the tail; raises SwarmError where it cannot be dialled.
            request: whose replies.
        """
        span = str(self.tail.span)
        try:
            connection = dial()
        except SwarmError as reason:
            self._end(Unreachable(self.tail.peer, span, str(reason)))
            return
        first = wire.encode_replies_up(request)
        metadata = introduce(self._key, connection.endpoint, wire.REPLIES, first)
        call: Stream = connection.channel.stream_stream(wire.REPLIES)(metadata=metadata)
        error: SwarmError
        try:
            await self._read(call, first)
            await asyncio.sleep(FAULT_GRACE_S)
            error = HopClosed(self.tail.peer, span, "ended the reply stream")
        except TimeoutError:
            error = HopTimeout(self.tail.peer, span, "is silent: nothing came on the reply stream")
            self.stuck = connection.channel
        except grpc.aio.AioRpcError as failure:
            why = plain_reason(failure, is_member=connection.is_member)
            error = Unreachable(self.tail.peer, span, f"the reply stream broke ({why})")
            if failure.code() is grpc.StatusCode.NOT_FOUND:
                error = HopClosed(self.tail.peer, span, "no longer holds this session")
        except RemoteProtocolError as failure:
            error = HopMisbehaved(self.tail.peer, span, f"sent what breaks the protocol ({failure})")
        except HopError as failure:
            error = failure
        finally:
            call.cancel()
        self._end(error)

    def _end(self, error: SwarmError) -> None:
        self.is_broken = True
        self._listener(self, error)

    async def _read(self, call: Stream, request: bytes) -> None:
        assembler = FrameAssembler(FrameLimits(rows_bytes=self._rows_bytes))
        async with TaskScope() as scope:
            self._patient_until = time.monotonic() + OPEN_S
            scope.spawn(self._watch())
            await call.write(request)
            while isinstance(part := await call.read(), bytes):
                self._patient_until = time.monotonic() + PINGS_S + SILENCE_S + ROUND_TRIPS * self._rtt_s
                self.opened.set()
                message = assembler.feed(part)
                if not isinstance(message, Ping):
                    self.heard_s = time.monotonic()
                match message:
                    case Reply() as reply:
                        if reply.times:
                            self._rtt_s = min(2e-3 * reply.times[-1].link_ms, MAX_RTT_S)
                        self._listener(self, reply)
                    case Ping(nonce=nonce):
                        await call.write(wire.encode_replies_up(Pong(nonce)))
                    case _:
                        pass

    async def _watch(self) -> None:
        """Raise TimeoutError when nothing came for too long; time in which this program did not run is excused."""
        while (left_s := self._patient_until - time.monotonic()) > 0:
            late_s = await pause(min(left_s, CHECK_S))  # replies move the limit meanwhile
            self._patient_until += late_s
        raise TimeoutError
