"""Whom a reported fault counts against. Pure.

A hop speaks of itself and of the machine that comes next in the route, and its signature says that it was it who spoke.
A fault that nobody signed is the doing of whoever passed it on: an honest hop passes none on.
"""

from __future__ import annotations

from swarm.discovery.signed_faults import is_signed
from swarm.errors import HopError, HopMisbehaved, HopRefused, RemoteProtocolError
from swarm.ids import SessionId
from swarm.protocol.faults import error_of
from swarm.protocol.messages import Fault, FaultKind, RouteHop
from swarm.routing.route import Route
from swarm.runtime.version import which_side

OF_OTHERS = {FaultKind.UNREACHABLE, FaultKind.TIMEOUT, FaultKind.CLOSED}
"""What a hop may say of the one that comes next."""


def blamed(fault: Fault, via: RouteHop, session: SessionId, route: Route) -> HopError:
    """The trouble that a fault is, with the machines that carry it.

    Args:
        fault: as it arrived.
        via: the first hop, or its replica, on whose stream it came.
        session: whose fault it is.
        route: over which the session goes now.
    """
    if not is_signed(fault, session, route.sealed):
        if fault.peer == via.peer:  # its own stream vouches for what it says of itself
            return error_of(fault, str(via.span))
        return HopMisbehaved(via.peer, str(via.span), "passed on a fault that nobody signed")
    places: dict[str, int] = {hop.peer: index for index, hop in enumerate(route.hops)}
    if route.hedge is not None:
        places[route.hedge.replica] = route.hedge.index
    reporter, index = fault.reporter, places.get(fault.reporter or "")
    if reporter is None or index is None:
        return HopMisbehaved(via.peer, str(via.span), "passed on a fault of a machine outside the route")
    span = str(route.hops[index].span)
    if fault.peer == fault.reporter:
        if fault.kind is FaultKind.DIFFERENT:
            return HopMisbehaved(reporter, span, "says that it differs from itself")
        error = error_of(fault, span)
        if fault.kind is FaultKind.PROTOCOL and index:  # what it refuses came from the hop before
            error.on_link(route.hops[index - 1].peer, is_even=True)
        return error
    accused = places.get(fault.peer)
    is_replica = route.hedge is not None and accused == route.hedge.index == index - 1
    may_say = {FaultKind.DIFFERENT, FaultKind.CLOSED} if is_replica else OF_OTHERS if accused == index + 1 else set()
    if accused is None or fault.kind not in may_say:
        return HopMisbehaved(reporter, span, f"says what it cannot know: {fault.kind.value} at {fault.peer}")
    return error_of(fault, str(route.hops[accused].span)).on_link(reporter)


def advised(error: HopError, route: Route) -> HopError:
    """The trouble, and which side is to be updated where two releases may not understand each other.

    Args:
        error: what a machine of the route said, or did.
        route: whose records say which release each machine runs.
    """
    records = route.records if route.replica is None else (*route.records, route.replica)
    release = next((record.version for record in records if record.peer == error.peer), None)
    advice = None if release is None else which_side(release)
    match error:
        case HopRefused(cause=RemoteProtocolError() as cause) if advice is not None:
            said = RemoteProtocolError(cause.field, f"{cause.reason}; {advice}")
            return HopRefused(error.peer, error.span, said).on_link(error.other, is_even=error.is_even)
        case HopMisbehaved() if advice is not None:
            told = HopMisbehaved(error.peer, error.span, f"{error.reason}; {advice}")
            return told.on_link(error.other, is_even=error.is_even)
        case _:
            return error
