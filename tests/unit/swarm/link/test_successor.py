"""A plain link to one successor: what cannot be sent is reported, and never thrown at whoever sends it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

from swarm.base.errors import HopClosed, HopMisbehaved
from swarm.base.ids import PeerId, SessionId
from swarm.base.layers import Span
from swarm.base.tasks import TaskScope
from swarm.link.successor import MAX_FAULTS, MAX_OPEN, SuccessorLink, SuccessorStream
from swarm.protocol.authority import SessionKey
from swarm.protocol.messages import Attach, Codec, Fault, FaultKind, Open, RouteHop

ROUTE = tuple(RouteHop(PeerId(name), Span(4 * place, 4 * place + 4)) for place, name in enumerate("AB"))


class FullLink:
    """A running stream whose peer reads nothing any more."""

    def send(self, message: object) -> None:
        raise HopClosed(ROUTE[0].peer, str(ROUTE[0].span), f"reads too slowly for {type(message).__name__}")


class Listener:
    """Notes the trouble that it is told of."""

    def __init__(self) -> None:
        self.trouble: list[object] = []
        self.faults = 0

    def on_fault(self, _fault: object, _via: object) -> None:
        self.faults += 1

    def on_trouble(self, error: object) -> None:
        self.trouble.append(error)


def test_a_new_route_that_cannot_be_sent_is_reported_as_the_machines_loss() -> None:
    """Else the error ended the session, which another machine could have saved."""
    listener, unused = Listener(), cast("Any", None)
    link = SuccessorLink(unused, unused, unused, cast("Any", listener))
    link._stream = SuccessorStream(ROUTE[0], link=cast("Any", FullLink()), is_attached=True)
    link.follow(Attach(SessionId(bytes(16)), 1, ROUTE, 0, Open("f" * 64, 64, 4, 64, Codec.FP32)))
    (error,) = listener.trouble
    assert isinstance(error, HopClosed)
    assert link._stream.is_broken


async def test_routes_that_change_faster_than_machines_are_found_leave_a_bounded_number_of_tasks() -> None:
    """Only the newest goes on, whoever it waits for; a stream that is in use is never the one that is cancelled."""
    asked: list[str] = []

    async def dial(hop: RouteHop, _stuck: object) -> Any:  # noqa: ANN401
        asked.append(hop.peer)
        await asyncio.Event().wait()

    async with TaskScope() as scope:
        link = SuccessorLink(scope, dial, SessionKey.fresh(), cast("Any", Listener()))
        replica = link.beside()
        attach = Attach(SessionId(bytes(16)), 1, ROUTE, 1, Open("f" * 64, 64, 4, 64, Codec.FP32))
        replica.follow(attach)
        for number in range(500):
            hop = RouteHop(PeerId(str(number)), ROUTE[1].span)
            link.follow(replace(attach, route=(ROUTE[0], hop)))
            await asyncio.sleep(0)
            assert len(link._open) <= MAX_OPEN + 1
        await asyncio.sleep(0)
        assert replica._stream in link._open.values()
        assert link._stream in link._open.values()
    assert asked[-1] == "499"


def test_a_machine_that_reports_one_fault_after_another_is_left() -> None:
    """Else reading 20,000 of them took half a second of each client that met it, for every text."""
    listener, unused = Listener(), cast("Any", None)
    link = SuccessorLink(unused, unused, unused, cast("Any", listener))
    link._stream = stream = SuccessorStream(ROUTE[0], link=cast("Any", object()), is_attached=True)
    fault = Fault(0, ROUTE[0].peer, FaultKind.DIFFERENT, "", "picked another token")
    for _ in range(MAX_FAULTS):
        link._hear(stream, fault)
    assert (listener.faults, listener.trouble, stream.left.is_set()) == (MAX_FAULTS, [], False)
    for _ in range(9):
        link._hear(stream, fault)
    (error,) = listener.trouble
    assert isinstance(error, HopMisbehaved)
    assert (listener.faults, stream.left.is_set(), stream.is_broken) == (MAX_FAULTS, True, True)
