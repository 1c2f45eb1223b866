"""A session is named after its key, and its client's commands have one form for every hop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId, SessionId
from swarm.base.layers import Span
from swarm.protocol.authority import SessionKey, check_command, is_signed, session_of
from swarm.protocol.messages import Attach, Codec, Hedge, Open, RouteHop

A, B, X = (PeerId(name) for name in "ABX")
ROUTE = (RouteHop(A, Span(0, 4)), RouteHop(B, Span(4, 8)))
ATTACH = Attach(SessionId(bytes(16)), 3, ROUTE, 0, Open("f", 64, 4, 64, Codec.FP32), Hedge(1, X))


def test_a_name_seen_elsewhere_is_no_use_with_another_key() -> None:
    """Not even at a machine that has never heard of the session."""
    client, thief = SessionKey.fresh(), SessionKey.fresh()
    assert client.session == session_of(client.public_key) != thief.session
    check_command(client.session, client.command(ATTACH))
    stolen = replace(thief.command(ATTACH), session=client.session)
    with pytest.raises(RemoteProtocolError) as refused:
        check_command(stolen.session, stolen)
    assert refused.value.field == "session_key"


def test_who_stands_where_is_signed() -> None:
    """The two replicas of a hop cannot be exchanged, nor two neighbours with each other."""
    key = SessionKey.fresh()
    signed = key.command(ATTACH)
    exchanged = (ROUTE[0], RouteHop(X, Span(4, 8)))
    shifted = (RouteHop(A, Span(0, 5)), RouteHop(B, Span(5, 8)))
    for changed in (
        replace(signed, route=exchanged, hedge=Hedge(1, B)),
        replace(signed, route=shifted),
        replace(signed, route=ROUTE[::-1]),
        replace(signed, hedge=None),
        replace(signed, hedge=Hedge(0, X)),
        replace(signed, records=(b"",)),
        replace(signed, open=replace(signed.open, aux_layers=(2,))),
        replace(signed, open=replace(signed.open, ends_only=True)),
    ):
        with pytest.raises(RemoteProtocolError) as refused:
            check_command(key.session, changed)
        assert refused.value.field == "signature"


@pytest.mark.parametrize("size", [0, 31, 33, 1_024])
def test_a_key_of_another_size_signs_nothing(size: int) -> None:
    assert not is_signed(bytes(size), b"", bytes(64))
