"""A link to a hop with two machines: the same sweeps go to both, and the first answer counts (PROTOCOL H1–H4).

Which of two is heard: both, always. Both get the route as the client signed it, and each finds its own place in it.
Whoever comes behind them hears both streams and takes the first of two equal sweeps (`node.session.upstreams`), so
which one is faster may change with every sweep.

When one dies, nothing is replayed: the other one has had every sweep. The session goes on without a pause.

How a new route keeps, replaces or drops the second: `follow` gives a link as the route wants it. The machine that the
route names keeps its stream, whichever of the two it was. An unhedged route has a plain `SuccessorLink`.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from swarm.link.successor import SessionLink, SuccessorLink
from swarm.protocol.authority import replica_of
from swarm.protocol.messages import Attach, Hedge, RouteHop, SweepFrame

CLIENT = ""
"""In place of a peer id."""


def senders(route: Sequence[RouteHop], index: int, hedge: Hedge | None) -> tuple[str, ...]:
    """Who may send a hop its sweeps: the hop before it and, where that is hedged, its replica; or `CLIENT`."""
    before = CLIENT if index == 0 else route[index - 1].peer
    return (before, hedge.replica) if hedge is not None and hedge.index == index - 1 else (before,)


def follow(link: SessionLink, attach: Attach) -> SessionLink:
    """Go on with a new route; returns the link to use from now on."""
    is_hedged = attach.hedge is not None and attach.hedge.index == attach.index
    match link:
        case SuccessorLink() if is_hedged:
            link = HedgedLink(link, link.beside())
        case HedgedLink() if not is_hedged:
            link = link.only(attach.route[attach.index])
        case _:
            pass
    link.follow(attach)
    return link


class HedgedLink:
    """A `SessionLink` over two: to the machine that stands in the route, and to its replica."""

    def __init__(self, first: SuccessorLink, second: SuccessorLink) -> None:
        self._first = first
        self._second = second

    def only(self, hop: RouteHop) -> SuccessorLink:
        """Drop one of the two; the link that leads to `hop` stays, the first one if neither does."""
        self._keep_as_first(hop)
        self._second.leave()
        return self._first

    @property
    def rtt_ms(self) -> float:
        """Round trip to the machine that stands in the route: the shortest that was measured lately."""
        return self._first.rtt_ms

    @property
    def channel(self) -> grpc.aio.Channel | None:
        """Leads to the machine that stands in the route; None before it is dialled."""
        return self._first.channel

    @property
    def delivered(self) -> int | None:
        """The last sequence that one of the two has; None while neither is attached and replayed to."""
        return max((one for one in (self._first.delivered, self._second.delivered) if one is not None), default=None)

    @property
    def is_sending(self) -> bool:
        """Whether neither of the two has yet all that was pushed."""
        return self._first.is_sending and self._second.is_sending

    def follow(self, attach: Attach) -> None:
        """Go on with this route, which is hedged at `attach.index`."""
        self._keep_as_first(attach.route[attach.index])
        self._first.follow(attach)
        self._second.follow(attach, replica_of(attach))

    def push(self, frame: SweepFrame) -> None:
        """Send both a sweep that the journal holds already."""
        self._first.push(frame)
        self._second.push(frame)

    def sync(self) -> None:
        self._first.sync()
        self._second.sync()

    def desync(self) -> None:
        self._first.desync()
        self._second.desync()

    def close(self, reason: str | None) -> None:
        """Leave both, and say that the session is over; say nothing where the chain goes on elsewhere (None)."""
        self._first.close(reason)
        self._second.close(reason)

    async def gone(self) -> None:
        await self._first.gone()
        await self._second.gone()

    def _keep_as_first(self, hop: RouteHop) -> None:
        """A replica that stands in the route now takes the first place: its stream and what it received stay."""
        if self._second.hop == hop:
            self._first, self._second = self._second, self._first
