"""The next machine of one session's chain, whichever that is at the moment: used by the client and by every hop.

`follow` takes a new route (R2): the same machine with the same layers over a living stream gets the Reroute in band;
any other one gets a stream of its own, an Attach, and a replay of what it lacks (R4). Messages of streams that were
left are not heard any more. Owns no journal and makes no decision.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import grpc.aio

from swarm.errors import HopError, HopTimeout, LocalProtocolError, SwarmError, Unreachable
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
from swarm.runtime.tasks import TaskScope
from swarm.transport.link import Link, Sent, open_link, uncounted

ATTACH_S = 3.0
"""How long a machine may take to be dialled and to take the stream."""
FIRST_TRY_S = 1.0
"""The same while a chain is repaired; doubled after each machine in a row that took longer, up to `ATTACH_S`."""

MOST_DOUBLINGS = 4
DISMISSED = Close("the chain goes on without this machine", dismissed=True)

logger = logging.getLogger(__name__)

Dial = Callable[[RouteHop, grpc.aio.Channel | None], Awaitable[tuple[grpc.aio.Channel, bool]]]
"""The connection to a hop, and whether it is cold; not the one on which nothing comes through.

Raises:
    SwarmError: nobody knows where it listens.
"""


class SuccessorListener(Protocol):
    """Whose successor it is."""

    def replay(self, received: int | None) -> Sequence[SweepFrame | Snapshot] | None:
        """What the successor lacks, which has received so much; None: not now, `Successor.sync` follows."""

    def on_ready(self, ready: Ready) -> None:
        """The successor and all behind it are attached."""

    def on_fault(self, fault: Fault) -> None:
        """A machine behind this one reports trouble."""

    def on_trouble(self, error: HopError | LocalProtocolError) -> None:
        """The successor itself is lost, or cannot be reached; or what was to be sent to it cannot be said."""


@dataclass(slots=True)
class SuccessorStream:
    """One stream to one machine.

    received: the last sequence that it has or that is on its way, once `is_attached`. is_synced: it lacks nothing.
    """

    hop: RouteHop
    link: Link | None = None
    channel: grpc.aio.Channel | None = None
    is_attached: bool = False
    is_synced: bool = False
    is_broken: bool = False
    received: int | None = None
    farewell: Close | None = None
    attached: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)


class Successor:
    """Sends one session's messages to the machine that comes next."""

    def __init__(self, scope: TaskScope, dial: Dial, owner: SuccessorListener, sent: Sent = uncounted) -> None:
        self._scope = scope
        self._dial = dial
        self._sent = sent
        self._owner = owner
        self._tie: SuccessorStream | None = None
        self._late = 0
        self._stuck: grpc.aio.Channel | None = None
        self._holding: set[asyncio.Task[None]] = set()

    @property
    def rtt_ms(self) -> float:
        """Round trip to the machine: the least that was measured lately."""
        if self._tie is None or self._tie.link is None:
            return 0.0
        return min(self._tie.link.round_trips, default=self._tie.link.rtt_ms)

    @property
    def hop(self) -> RouteHop | None:
        """Who it is, None before the first route."""
        return None if self._tie is None else self._tie.hop

    def follow(self, attach: Attach) -> None:
        """Go on with this route, where the successor stands at `attach.index`."""
        hop, tie = attach.route[attach.index], self._tie
        if tie is not None and tie.hop == hop and tie.link is not None and tie.is_attached and not tie.is_broken:
            tie.link.send(Reroute(attach.generation, attach.route, attach.hedge, attach.records))
            return
        if tie is not None:
            stays = any(other.peer == tie.hop.peer for other in attach.route)
            self._leave(tie, None if stays else DISMISSED)
        self._tie = SuccessorStream(hop)
        task = self._scope.spawn(self._hold(self._tie, attach))
        self._holding.add(task)
        task.add_done_callback(self._holding.discard)

    def push(self, frame: SweepFrame) -> None:
        """Send a sweep that the journal holds already; a successor that still needs a replay gets it with that."""
        tie = self._tie
        if tie is None or tie.link is None or not tie.is_synced:
            self.sync()
            return
        try:
            tie.link.send(frame)
            tie.received = frame.sweep.sequence
        except HopError as error:
            self._lost(tie, error)

    def desync(self) -> None:
        """The owner begins again from a snapshot: what that holds beyond what was sent here is to be sent yet."""
        if self._tie is not None:
            self._tie.is_synced = False

    def sync(self) -> None:
        """Send what the successor lacks, if it is attached and its owner is able to."""
        tie = self._tie
        if tie is None or tie.link is None or tie.is_broken or not tie.is_attached or tie.is_synced:
            return
        messages = self._owner.replay(tie.received)
        if messages is None:
            return
        tie.is_synced = True
        try:
            for message in messages:
                tie.link.send(message)
                tie.received = message.sequence if isinstance(message, Snapshot) else message.sweep.sequence
        except HopError as error:
            self._lost(tie, error)

    def leave(self) -> None:
        """The chain goes on without this machine."""
        if self._tie is not None:
            self._leave(self._tie, DISMISSED)
            self._tie = None

    def close(self, reason: str | None) -> None:
        """Leave, and say that the session is over; say nothing where the chain goes on elsewhere."""
        if self._tie is not None:
            self._leave(self._tie, None if reason is None else Close(reason))

    async def gone(self) -> None:
        """Wait until every stream that was left has ended."""
        if self._holding:
            await asyncio.wait(self._holding)

    @staticmethod
    def _leave(tie: SuccessorStream, farewell: Close | None) -> None:
        tie.farewell = farewell
        tie.left.set()

    async def _hold(self, tie: SuccessorStream, attach: Attach) -> None:
        try:
            tie.channel, is_cold = await self._dial(tie.hop, self._stuck)
            hear = partial(self._hear, tie)
            async with open_link(tie.channel, attach, hear, is_cold=is_cold, sent=self._sent) as link:
                tie.link = link
                if not tie.left.is_set():
                    limit_s = min(FIRST_TRY_S * 2**self._late, ATTACH_S) if attach.generation else ATTACH_S
                    self._scope.spawn(self._limit(tie, limit_s))
                await tie.left.wait()
                if tie.farewell is not None:
                    link.send(tie.farewell)
        except (HopError, LocalProtocolError) as error:
            self._lost(tie, error)
        except SwarmError as error:
            self._lost(tie, Unreachable(tie.hop.peer, str(tie.hop.span), str(error)))

    async def _limit(self, tie: SuccessorStream, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await tie.attached.wait()
        except TimeoutError:
            self._late = min(self._late + 1, MOST_DOUBLINGS)
            self._lost(tie, HopTimeout(tie.hop.peer, str(tie.hop.span), f"did not attach within {limit_s:.0f} s"))

    def _hear(self, tie: SuccessorStream, said: Upstream | HopError) -> None:
        if tie is not self._tie or tie.left.is_set():
            return
        match said:
            case Attached(received=received):
                tie.received, tie.is_attached, tie.is_synced = received, True, False
                self._late = 0
                tie.attached.set()
                self.sync()
            case Ready():
                self._owner.on_ready(said)
            case Fault():
                self._owner.on_fault(said)
            case HopError():
                self._lost(tie, said)
            case _:
                pass

    def _lost(self, tie: SuccessorStream, error: HopError | LocalProtocolError) -> None:
        tie.is_synced = False
        if not tie.is_broken:
            tie.is_broken = True
            self._stuck = tie.channel if isinstance(error, HopTimeout) else None
            tie.attached.set()
            if tie is self._tie and not tie.left.is_set():
                logger.info("%s", error)
                self._owner.on_trouble(error)
