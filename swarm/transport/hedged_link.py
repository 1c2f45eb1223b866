"""A hop with two machines: the same sweeps go to both, and whoever is first is heard (PROTOCOL H1–H4).

Each of the two sees an ordinary chain in which it stands alone, so it needs to know nothing of the other. Which one is
faster may change with every sweep; when one dies, the session does not stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from swarm.protocol.messages import Attach, Hedge, RouteHop, SweepFrame
from swarm.runtime.tasks import TaskScope
from swarm.transport.link import Sent, uncounted
from swarm.transport.successor import Dial, Successor, SuccessorListener


def replica_route(route: Sequence[RouteHop], hedge: Hedge) -> tuple[RouteHop, ...]:
    """The route in which the replica stands in its hop's place."""
    span = route[hedge.index].span
    return (*route[: hedge.index], RouteHop(hedge.replica, span), *route[hedge.index + 1 :])


def senders(route: Sequence[RouteHop], index: int, hedge: Hedge | None) -> tuple[str, ...]:
    """Who may send a hop its sweeps: the one before it and, where that is hedged, its replica; "" is the client."""
    before = "" if index == 0 else route[index - 1].peer
    return (before, hedge.replica) if hedge is not None and hedge.index == index - 1 else (before,)


class Successors:
    """The machines that come next, one as a rule. What `Successor` says of one machine, this does for all."""

    def __init__(self, scope: TaskScope, dial: Dial, owner: SuccessorListener, sent: Sent = uncounted) -> None:
        self._one = Successor(scope, dial, owner, sent)
        self._replica = Successor(scope, dial, owner, sent)

    @property
    def rtt_ms(self) -> float:
        """Round trip to the machine that stands in the route: the least that was measured lately."""
        return self._one.rtt_ms

    def follow(self, attach: Attach) -> None:
        """Go on with this route, where the successor stands at `attach.index`; who is known keeps the stream."""
        hop, hedge = attach.route[attach.index], attach.hedge
        if self._replica.hop == hop:
            self._one, self._replica = self._replica, self._one
        self._one.follow(attach)
        if hedge is None or hedge.index != attach.index:
            self._replica.leave()
        else:
            other = Hedge(hedge.index, hop.peer)
            self._replica.follow(replace(attach, route=replica_route(attach.route, hedge), hedge=other))

    def push(self, frame: SweepFrame) -> None:
        """Send a sweep that the journal holds already."""
        self._one.push(frame)
        self._replica.push(frame)

    def sync(self) -> None:
        """Send what they lack."""
        self._one.sync()
        self._replica.sync()

    def desync(self) -> None:
        """The owner begins again from a snapshot."""
        self._one.desync()
        self._replica.desync()

    def close(self, reason: str | None) -> None:
        """Leave, and say that the session is over; say nothing where the chain goes on elsewhere."""
        self._one.close(reason)
        self._replica.close(reason)

    async def gone(self) -> None:
        """Wait until every stream that was left has ended."""
        await self._one.gone()
        await self._replica.gone()
