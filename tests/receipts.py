"""Receipts of made-up sessions, for tests."""

from __future__ import annotations

from dataclasses import replace

from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.protocol.authority import SessionKey
from swarm.protocol.messages import Attach, Codec, Open, RouteHop
from swarm.trust.receipt import Receipt
from tests.telemetry_messages import FINGERPRINT, NOW, identity

A, B, C = (identity(number).peer_id for number in range(3))
TWO = (RouteHop(A, Span(0, 4)), RouteHop(B, Span(4, 12)))


def receipt(key: SessionKey, tokens: int, **other: object) -> Receipt:
    """One of a session over A and B that began ten minutes ago."""
    made = Receipt(key.public_key, FINGERPRINT, TWO, 0, tokens, int(NOW) - 600, int(NOW))
    return replace(made, **other)  # type: ignore[arg-type]


def attach(key: SessionKey, hops: tuple[RouteHop, ...] = TWO, index: int = 0) -> Attach:
    """By which a session of `key` comes to a machine."""
    return Attach(key.session, 0, hops, index, Open(FINGERPRINT, 512, 2, 64, Codec.FP32, key.public_key))


def route(*hops: tuple[PeerId, int, int]) -> tuple[RouteHop, ...]:
    """Machines, each with its first layer and the one after its last."""
    return tuple(RouteHop(peer, Span(start, end)) for peer, start, end in hops)
