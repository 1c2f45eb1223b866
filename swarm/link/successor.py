"""One session's link to the machine that comes next, whichever machine that is: used by the client and by every hop.

`follow` takes a new route (R2): the same machine with the same layers over a living stream gets the Reroute in band;
any other one gets a stream of its own, an Attach, and a replay of what it lacks (R4). Messages of streams that were
left are not heard any more. Owns no journal and makes no decision.

A link outlives the streams that it opens (`swarm.link.link`), and the machines that they lead to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, Self

import grpc.aio

from swarm.base.errors import HopError, HopMisbehaved, HopTimeout, LocalProtocolError, SwarmError, Unreachable
from swarm.base.tasks import TaskScope
from swarm.link.dial import Connection
from swarm.link.link import Link, Signer, Uplink, open_link
from swarm.protocol.authority import place_in
from swarm.protocol.messages import (
    Attach,
    Attached,
    Close,
    Fault,
    Ready,
    Reroute,
    RouteHop,
    Snapshot,
    SweepFrame,
    Upstream,
)

ATTACH_S = 3.0
"""How long a machine may take to be dialled and to take the stream."""
FIRST_TRY_S = 1.0
"""The same while a chain is repaired; doubled after each machine in a row that took longer, up to `ATTACH_S`."""
MAX_DOUBLINGS = 4
MAX_OPEN = 4
"""Streams of one session that are opened or left at a time: routes may change faster than machines answer."""
MAX_FAULTS = 256
"""Faults that a stream may bring in one generation. An honest machine passes on `node.session.hop_session.MAX_FAULTS`
of those behind it."""
TELLS_TOO_MUCH = "reports one fault after another"
DISMISSED = Close("the chain goes on without this machine", dismissed=True)

logger = logging.getLogger(__name__)

Dial = Callable[[RouteHop, grpc.aio.Channel | None], Awaitable[Connection]]
"""The connection to a hop; not the one on which nothing comes through.

Raises:
    SwarmError: nobody knows where it listens.
"""


class SessionLink(Protocol):
    """What a session needs of whatever comes next: one machine, or two (`swarm.link.hedged_link`)."""

    @property
    def rtt_ms(self) -> float:
        """Round trip to the machine that stands in the route: the shortest that was measured lately."""

    @property
    def channel(self) -> grpc.aio.Channel | None:
        """Leads to the machine that stands in the route; None before it is dialled."""

    @property
    def delivered(self) -> int | None:
        """The last sequence that the successor has; None while it is attached, or waits for a replay."""

    @property
    def is_sending(self) -> bool:
        """Whether the successor does not have yet all that was pushed."""

    def follow(self, attach: Attach) -> None:
        """Go on with this route, where the successor stands at `attach.index`."""

    def push(self, frame: SweepFrame) -> None:
        """Send a sweep that the journal holds already; a successor that still needs a replay gets it with that."""

    def sync(self) -> None:
        """Send what the successor lacks, if it is attached and the listener is able to replay."""

    def desync(self) -> None:
        """The session begins again from a snapshot: what that holds beyond what was sent here is to be sent yet."""

    def close(self, reason: str | None) -> None:
        """Leave, and say that the session is over; say nothing where the chain goes on elsewhere (None)."""

    async def gone(self) -> None:
        """Wait until every stream that was left has ended."""


class SuccessorListener(Protocol):
    """The session that owns a link: it replays to the successor, and hears what the successor reports."""

    def replay(self, received: int | None) -> Sequence[SweepFrame | Snapshot] | None:
        """What the successor lacks, which has received so much; None: not now, `SessionLink.sync` follows."""

    def on_sent(self, hop: RouteHop, since: int, message: SweepFrame | Snapshot) -> None:
        """A message is on its way to the successor, by the stream that was attached in that generation."""

    def on_ready(self, ready: Ready) -> None:
        """The successor and all behind it are attached."""

    def on_fault(self, fault: Fault, via: RouteHop) -> None:
        """A machine behind this one reports trouble; the successor that passed it on is `via`."""

    def on_trouble(self, error: HopError | LocalProtocolError) -> None:
        """The successor itself is lost, or cannot be reached; or what was to be sent to it cannot be said."""


@dataclass(slots=True)
class SuccessorStream:
    """One stream to one machine.

    Attributes:
        is_attached: the machine took the stream.
        is_synced: it lacks nothing; what is new is sent to it at once.
        is_broken: the stream is lost, and that was reported.
        received: the last sequence that the machine has or that is on its way, once `is_attached`; None: nothing.
        faults: how many it brought in this generation.
        farewell: what to say at the end, if anything.
        attached: set when the machine took the stream, and when the stream broke first.
        left: set when nothing more is sent or heard.
        since: generation in which it is attached.
    """

    hop: RouteHop
    link: Link | None = None
    channel: grpc.aio.Channel | None = None
    is_attached: bool = False
    is_synced: bool = False
    is_broken: bool = False
    received: int | None = None
    faults: int = 0
    farewell: Close | None = None
    attached: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    since: int = 0


class SuccessorLink:
    """A `SessionLink` to one machine."""

    def __init__(
        self,
        scope: TaskScope,
        dial: Dial,
        signer: Signer,
        listener: SuccessorListener,
        uplink: Uplink | None = None,
    ) -> None:
        self._scope = scope
        self._dial = dial
        self._signer = signer
        self._uplink = uplink or Uplink()
        self._listener = listener
        self._stream: SuccessorStream | None = None
        self._late_attaches = 0
        self._stuck: grpc.aio.Channel | None = None
        self._open: dict[asyncio.Task[None], SuccessorStream] = {}  # oldest first

    def beside(self) -> Self:
        """Another link of the same session, for a second machine; `gone` waits for the streams of both."""
        other = type(self)(self._scope, self._dial, self._signer, self._listener, self._uplink)
        other._open = self._open
        return other

    @property
    def rtt_ms(self) -> float:
        """Round trip to the machine: the shortest that was measured lately."""
        if self._stream is None or self._stream.link is None:
            return 0.0
        return self._stream.link.shortest_ms

    @property
    def delivered(self) -> int | None:
        """The last sequence that the successor has; None while it is attached, or waits for a replay."""
        stream = self._stream
        return None if stream is None or stream.link is None or not stream.is_synced else stream.link.delivered

    @property
    def is_sending(self) -> bool:
        stream = self._stream
        return stream is None or stream.link is None or not stream.is_synced or stream.link.is_sending

    @property
    def channel(self) -> grpc.aio.Channel | None:
        """Leads to the successor; None before it is dialled."""
        return None if self._stream is None else self._stream.channel

    @property
    def hop(self) -> RouteHop | None:
        """Where it leads; None before the first route and after `leave`."""
        return None if self._stream is None else self._stream.hop

    def follow(self, attach: Attach, hop: RouteHop | None = None) -> None:
        """Go on with this route.

        Args:
            attach: the route; the successor stands at `attach.index`.
            hop: the successor where it is the replica of the hop at that place.
        """
        hop, stream = hop or attach.route[attach.index], self._stream
        is_usable = stream is not None and stream.is_attached and not stream.is_broken
        if stream is not None and stream.link is not None and stream.hop == hop and is_usable:
            stream.faults = 0
            try:
                stream.link.send(_reroute(attach))
            except HopError as error:
                self._lost(stream, error)
            return
        if stream is not None:
            stays = place_in(attach, stream.hop.peer) is not None
            self._leave(stream, None if stays else DISMISSED)
        self._stream = SuccessorStream(hop, since=attach.generation)
        task = self._scope.spawn(self._hold(self._stream, attach))
        self._open[task] = self._stream
        task.add_done_callback(lambda done: self._open.pop(done, None))
        left = [task for task, stream in self._open.items() if stream.left.is_set()]
        for oldest in left[: max(len(self._open) - MAX_OPEN, 0)]:
            oldest.cancel()

    def push(self, frame: SweepFrame) -> None:
        """Send a sweep that the journal holds already; a successor that still needs a replay gets it with that."""
        stream = self._stream
        if stream is None or stream.link is None or not stream.is_synced:
            self.sync()
            return
        try:
            stream.link.send(frame)
            stream.received = frame.sweep.sequence
            self._listener.on_sent(stream.hop, stream.since, frame)
        except HopError as error:
            self._lost(stream, error)

    def desync(self) -> None:
        """The session begins again from a snapshot: what that holds beyond what was sent here is to be sent yet."""
        if self._stream is not None:
            self._stream.is_synced = False

    def sync(self) -> None:
        """Send what the successor lacks, if it is attached and the listener is able to replay."""
        stream = self._stream
        if stream is None or stream.link is None or stream.is_broken or not stream.is_attached or stream.is_synced:
            return
        messages = self._listener.replay(stream.received)
        if messages is None:
            return
        stream.is_synced = True
        try:
            for message in messages:
                stream.link.send(message)
                stream.received = message.sequence if isinstance(message, Snapshot) else message.sweep.sequence
                self._listener.on_sent(stream.hop, stream.since, message)
        except HopError as error:
            self._lost(stream, error)

    def leave(self) -> None:
        """The chain goes on without this machine."""
        if self._stream is not None:
            self._leave(self._stream, DISMISSED)
            self._stream = None

    def close(self, reason: str | None) -> None:
        """Leave, and say that the session is over; say nothing where the chain goes on elsewhere (None)."""
        if self._stream is not None:
            self._leave(self._stream, None if reason is None else Close(reason))

    async def gone(self) -> None:
        if self._open:
            await asyncio.wait(self._open)

    @staticmethod
    def _leave(stream: SuccessorStream, farewell: Close | None) -> None:
        stream.farewell = farewell
        stream.left.set()

    async def _hold(self, stream: SuccessorStream, attach: Attach) -> None:
        try:
            connection = await self._dial(stream.hop, self._stuck)
            stream.channel = connection.channel
            hear = partial(self._hear, stream)
            async with open_link(connection, self._signer, attach, hear, self._uplink) as link:
                stream.link = link
                if not stream.left.is_set():
                    limit_s = min(FIRST_TRY_S * 2**self._late_attaches, ATTACH_S) if attach.generation else ATTACH_S
                    self._scope.spawn(self._limit(stream, limit_s))
                await stream.left.wait()
                if stream.farewell is not None:
                    link.send(stream.farewell)
        except (HopError, LocalProtocolError) as error:
            self._lost(stream, error)
        except SwarmError as error:
            self._lost(stream, Unreachable(stream.hop.peer, str(stream.hop.span), str(error)))

    async def _limit(self, stream: SuccessorStream, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await stream.attached.wait()
        except TimeoutError:
            self._late_attaches = min(self._late_attaches + 1, MAX_DOUBLINGS)
            hop = stream.hop
            self._lost(stream, HopTimeout(hop.peer, str(hop.span), f"did not attach within {limit_s:.0f} s"))

    def _hear(self, stream: SuccessorStream, message: Upstream | HopError) -> None:
        if stream is not self._stream or stream.left.is_set():
            return
        match message:
            case Attached(received=received):
                stream.received, stream.is_attached, stream.is_synced = received, True, False
                self._late_attaches = 0
                stream.attached.set()
                self.sync()
            case Ready():
                self._listener.on_ready(message)
            case Fault():
                self._hear_fault(stream, message)
            case HopError():
                self._lost(stream, message)
            case _:
                pass

    def _hear_fault(self, stream: SuccessorStream, fault: Fault) -> None:
        """Pass a fault on; whoever sends one after another is left, or reading them all would cost too much."""
        stream.faults += 1
        if stream.faults <= MAX_FAULTS:
            self._listener.on_fault(fault, stream.hop)
            return
        self._lost(stream, HopMisbehaved(stream.hop.peer, str(stream.hop.span), TELLS_TOO_MUCH))
        stream.left.set()

    def _lost(self, stream: SuccessorStream, error: HopError | LocalProtocolError) -> None:
        stream.is_synced = False
        if not stream.is_broken:
            stream.is_broken = True
            self._stuck = stream.channel if isinstance(error, HopTimeout) else None
            stream.attached.set()
            if stream is self._stream and not stream.left.is_set():
                logger.info("%s", error)
                self._listener.on_trouble(error)


def _reroute(attach: Attach) -> Reroute:
    """The same route for a machine that has the session already."""
    return Reroute(
        attach.generation, attach.route, attach.open, attach.hedge, attach.records, signature=attach.signature
    )
