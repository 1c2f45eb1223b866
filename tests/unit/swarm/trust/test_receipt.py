"""Receipts: what their clients did not sign, or what makes no sense, is refused with the field at fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from swarm.base.errors import RemoteProtocolError
from swarm.protocol.authority import SessionKey
from swarm.protocol.limits import MAX_RECEIPT_BYTES
from swarm.protocol.succession import opened_succession, seal_succession
from swarm.status.messages import MAX_PAYLOAD_BYTES, MAX_RECEIPTS, RECEIPTS_BYTES, Receipts, Stamp, seal_body, topic_of
from swarm.trust.receipt import FORM, FRESH_S, MAX_RECEIPT_HOPS, MAX_SESSION_S, RECEIPT, Receipt, opened, seal
from tests.receipts import A, B, receipt, route
from tests.telemetry_messages import FINGERPRINT, FIRST_NONCE, NOW, identity

KEY, OTHER = SessionKey.fresh(), SessionKey.fresh()
GOOD = receipt(KEY, 100, since=40)


def test_what_was_sealed_is_opened() -> None:
    assert opened(seal(GOOD, KEY)) == GOOD
    assert GOOD.session == KEY.session
    assert GOOD.num_layers == 12


def altered(change: Callable[[list[Any]], object]) -> bytes:
    """The receipt with another body, and the signature of the old one."""
    body, signature = msgpack.unpackb(seal(GOOD, KEY))
    values = msgpack.unpackb(body)
    change(values)
    return msgpack.packb([msgpack.packb(values), signature])  # type: ignore[no-any-return]


def resigned(values: list[Any]) -> bytes:
    """A body of whatever form that the session's key signed."""
    body = msgpack.packb(values)
    return msgpack.packb([body, KEY.sign(RECEIPT + body)])  # type: ignore[no-any-return]


def put(place: int, value: object) -> Callable[[list[Any]], object]:
    return lambda values: values.__setitem__(place, value)


def other_peer(values: list[Any]) -> None:
    values[2][0][0] = B


def other_span(values: list[Any]) -> None:
    values[2][0][1] = [0, 3]


@pytest.mark.parametrize(
    ("sealed", "field"),
    [
        (altered(put(0, OTHER.public_key)), "signature"),
        (altered(put(1, "f" * 64)), "signature"),
        (altered(other_peer), "route"),
        (altered(other_span), "route"),
        (altered(lambda values: values[2].pop()), "signature"),
        (altered(put(3, 0)), "signature"),
        (altered(put(4, 1_000)), "signature"),
        (altered(put(5, GOOD.began_at - 1)), "signature"),
        (altered(put(6, GOOD.issued_at + 1)), "signature"),
        (altered(put(4, -1)), "tokens"),
        (altered(put(4, 40)), "since"),
        (altered(put(4, 2**60)), "tokens"),
        (altered(put(4, "many")), "tokens"),
        (altered(put(2, [])), "route"),
        (altered(put(5, GOOD.issued_at + 1)), "began_at"),
        (resigned([*FORM.encode(GOOD), "more"]), "receipt"),
        (seal(GOOD, OTHER), "signature"),
        (seal(replace(GOOD, session_key=OTHER.public_key), KEY), "signature"),
        (seal(replace(GOOD, route=route((A, 0, 4), (A, 4, 12))), KEY), "route"),
        (seal(replace(GOOD, route=route((A, 1, 4), (B, 4, 12))), KEY), "route"),
        (seal(replace(GOOD, route=route((A, 0, 4), (B, 5, 12))), KEY), "route"),
        (b"", "receipt"),
        (msgpack.packb([b"", b""]), "receipt"),
        (msgpack.packb("text"), "receipt"),
        (seal(GOOD, KEY) + b"x", "receipt"),
        (bytes(MAX_RECEIPT_BYTES + 1), "receipt"),
    ],
)
def test_what_the_session_did_not_sign_is_refused(sealed: bytes, field: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        opened(sealed)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({}, None),
        ({"issued_at": int(NOW - FRESH_S) - 1, "began_at": int(NOW - FRESH_S) - 1}, "issued_at"),
        ({"issued_at": int(NOW) + 61}, "issued_at"),
        ({"began_at": int(NOW - MAX_SESSION_S) - 1}, "began_at"),
    ],
)
def test_old_receipts_and_those_of_the_future_do_not_count(other: dict[str, int], field: str | None) -> None:
    assert receipt(KEY, 5, **other).untimely(NOW) == field


def test_the_largest_receipt_fits_into_a_message_and_so_do_as_many_as_a_message_may_have() -> None:
    hops = route(*((A, 65_000 + one, 65_001 + one) for one in range(MAX_RECEIPT_HOPS)))
    largest = Receipt(KEY.public_key, "f" * 256, hops, (1 << 53) - 2, (1 << 53) - 1, (1 << 40) - 1, (1 << 40) - 1)
    body = msgpack.packb(FORM.encode(largest))
    sealed = msgpack.packb([body, KEY.sign(body)])
    assert len(sealed) <= MAX_RECEIPT_BYTES
    topic = topic_of("canopy", FINGERPRINT, identity(0).peer_id, "receipts")
    size = len(seal(GOOD, KEY))
    for receipts in ((bytes(MAX_RECEIPT_BYTES),), (bytes(size),) * min(RECEIPTS_BYTES // (size + 6), MAX_RECEIPTS)):
        message = Receipts(Stamp(FIRST_NONCE, 2, NOW), receipts)
        assert len(seal_body(message, topic, identity(0))) + 700 <= MAX_PAYLOAD_BYTES  # what a key of 4,096 bits adds


def test_a_succession_is_the_old_keys_alone() -> None:
    old, new, stranger = (identity(number) for number in range(3))
    sealed = seal_succession(old.public_key, old.sign, new.peer_id)
    assert opened_succession(sealed) == (old.peer_id, new.peer_id)
    public_key, heir, signature = msgpack.unpackb(sealed)
    for forged in (
        msgpack.packb([public_key, stranger.peer_id, signature]),
        msgpack.packb([stranger.public_key, heir, signature]),
        msgpack.packb([public_key, "nobody", signature]),
        msgpack.packb([public_key, heir]),
        seal_succession(old.public_key, stranger.sign, new.peer_id),
        b"",
    ):
        with pytest.raises(RemoteProtocolError):
            opened_succession(forged)
