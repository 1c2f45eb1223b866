"""A plain link to one successor: what cannot be sent is reported, and never thrown at whoever sends it."""

from __future__ import annotations

from typing import Any, cast

from swarm.errors import HopClosed
from swarm.ids import PeerId, SessionId
from swarm.layers import Span
from swarm.protocol.messages import Attach, Codec, Open, RouteHop
from swarm.transport.successor import SuccessorLink, SuccessorStream

ROUTE = tuple(RouteHop(PeerId(name), Span(4 * place, 4 * place + 4)) for place, name in enumerate("AB"))


class FullLink:
    """A running stream whose peer reads nothing any more."""

    def send(self, message: object) -> None:
        raise HopClosed(ROUTE[0].peer, str(ROUTE[0].span), f"reads too slowly for {type(message).__name__}")


class Listener:
    """Notes the trouble that it is told of."""

    def __init__(self) -> None:
        self.trouble: list[object] = []

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
