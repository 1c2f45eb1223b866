"""Whatever is changed in what a client signed, or in how a caller introduced itself, is refused; nothing else is."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from node.session.admission import CallerCheck
from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId, SessionId
from swarm.base.layers import Span
from swarm.directory.identity import Identity
from swarm.link.endpoint import Endpoint
from swarm.link.link import introduce
from swarm.protocol import wire
from swarm.protocol.authority import SessionKey, check_command
from swarm.protocol.messages import Attach, Codec, Hedge, Open, Reroute, RouteHop

KEY = SessionKey.fresh()
IDENTITY = Identity.ephemeral()
NAMELESS = SessionId(bytes(16))

words = st.integers(1, 2**32 - 1)
texts = st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=5)
spans = st.tuples(st.integers(0, 9), st.integers(1, 9)).map(lambda pair: Span(pair[0], sum(pair)))
peers = texts.filter(bool).map(PeerId)
routes = st.lists(st.builds(RouteHop, peers, spans), min_size=1, max_size=3).map(tuple)
hedges = st.none() | st.builds(
    Hedge, st.just(0), st.integers(0, 99).map(lambda number: PeerId(f"replica {number:0>9}"))
)
records = st.lists(st.binary(max_size=8), max_size=2).map(tuple)
aux_layers = st.sets(st.integers(1, 511), max_size=4).map(lambda layers: tuple(sorted(layers)))
opens = st.builds(Open, texts, *[words.filter(bool)] * 3, st.sampled_from(Codec), aux_layers=aux_layers)
attaches = st.builds(
    Attach, st.just(NAMELESS), st.integers(0, 2**63 - 1), routes, st.just(0), opens, hedges, records
).map(KEY.command)


def reroute_of(attach: Attach) -> Reroute:
    return Reroute(attach.generation, attach.route, attach.open, attach.hedge, attach.records, attach.signature)


def is_refused(session: SessionId, message: Attach | Reroute) -> bool:
    try:
        check_command(session, message)
    except RemoteProtocolError:
        return True
    return False


@given(attaches, attaches, st.integers(0, 511), st.integers(0, 9))
def test_a_route_with_any_field_changed_is_refused(one: Attach, other: Attach, bit: int, place: int) -> None:
    for message in (one, reroute_of(one)):
        sent: Any = wire.decode_frame(wire.encode_frame(message))
        assert not is_refused(KEY.session, sent), "it passes as it was signed, over any number of hops"
        for field in ("generation", "route", "hedge", "records", "signature"):
            if getattr(one, field) != getattr(other, field):
                assert is_refused(KEY.session, replace(message, **{field: getattr(other, field)})), field
        for part in fields(Open):
            changed: Any = {part.name: getattr(other.open, part.name)}
            if replace(one.open, **changed) != one.open:
                assert is_refused(KEY.session, replace(message, open=replace(one.open, **changed))), part.name
        assert is_refused(KEY.session, replace(message, signature=flipped(one.signature, bit)))
        key = flipped(one.open.session_key, bit % 256)
        assert is_refused(KEY.session, replace(message, open=replace(one.open, session_key=key)))
        assert is_refused(SessionId(flipped(KEY.session, bit % 128)), message)
    assert not is_refused(KEY.session, replace(one, index=place)), "each receiver has a place of its own"


parts_of_a_call = st.tuples(peers, st.binary(max_size=4), texts, st.binary(max_size=4))


@given(st.sampled_from([KEY, IDENTITY]), parts_of_a_call, parts_of_a_call, st.integers(0, 255))
def test_an_introduction_with_any_part_changed_is_refused(
    signer: SessionKey | Identity, mine: tuple[Any, ...], other: tuple[Any, ...], bit: int
) -> None:
    def identify(parts: tuple[Any, ...], metadata: Any) -> object:  # noqa: ANN401
        peer, certificate, method, subject = parts
        check = CallerCheck(peer, Endpoint(peer, "", certificate).digest)
        try:
            return check.identify(metadata, method, subject)
        except RemoteProtocolError:
            return None

    peer, certificate, method, subject = mine
    metadata = introduce(signer, Endpoint(peer, "", certificate), method, subject)
    caller = KEY.session if signer is KEY else IDENTITY.peer_id
    assert identify(mine, metadata) == caller
    for place in range(4):
        changed = (*mine[:place], other[place], *mine[place + 1 :])
        assert identify(changed, metadata) == (caller if changed == mine else None)
    for place in range(3):
        name, value = metadata[place]
        spoilt = (*metadata[:place], (name, flipped(value, bit % (8 * len(value)))), *metadata[place + 1 :])
        assert identify(mine, spoilt) is None
        assert identify(mine, (*metadata[:place], *metadata[place + 1 :])) is None
        assert identify(mine, (*metadata, metadata[place])) is None


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
