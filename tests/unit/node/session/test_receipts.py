"""A node's receipts: they count as far as what it computed itself covers them, and each token once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import node.session.receipts
from node.life.receipt_file import ReceiptFile
from node.session.receipts import CLAIM_S, ReceiptBook, SessionClaim
from swarm.base.errors import RemoteProtocolError
from swarm.protocol.authority import SessionKey
from swarm.trust.receipt import FRESH_S, Receipt, seal
from tests.receipts import A, B, C, attach, receipt, route
from tests.telemetry_messages import FINGERPRINT, NOW

KEY = SessionKey.fresh()


class Clock:
    now_s = NOW

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def book() -> ReceiptBook:
    return ReceiptBook(A, Clock())


def begun(book: ReceiptBook, tokens: int = 100, key: SessionKey = KEY) -> SessionClaim:
    claim = book.begin(attach(key), lambda: None)
    claim.tokens = tokens
    return claim


def take(book: ReceiptBook, made: Receipt, key: SessionKey = KEY) -> bool:
    return book.take(made, seal(made, key)) is not None


def test_only_the_growth_counts_and_the_newest_waits(book: ReceiptBook) -> None:
    begun(book)
    assert take(book, receipt(KEY, 40))
    assert take(book, receipt(KEY, 100))
    assert not take(book, receipt(KEY, 100))
    assert not take(book, receipt(KEY, 40)), "an older one is no news"
    assert book.layer_tokens == 4 * 100
    assert book.batch(10_000, 64) == (seal(receipt(KEY, 100), KEY),)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"tokens": 101}, "tokens"),
        ({"tokens": 151, "since": 50}, "tokens"),
        ({"fingerprint": "0" * 64}, "fingerprint"),
        ({"route": route((A, 0, 5), (B, 5, 12))}, "route"),
        ({"route": route((B, 0, 4), (A, 4, 12))}, "route"),
        ({"route": route((B, 0, 4), (C, 4, 12))}, "route"),
        ({"route": route((A, 0, 4), (B, 4, 12), (C, 12, 900))}, "route"),
        ({"session_key": SessionKey.fresh().public_key}, "session"),
        ({"issued_at": int(NOW) + 90}, "issued_at"),
        ({"began_at": int(NOW) - 90_000}, "began_at"),
        ({"began_at": int(NOW) + 61, "issued_at": int(NOW) + 60}, "began_at"),
    ],
)
def test_what_this_node_did_not_compute_changes_nothing(book: ReceiptBook, other: dict[str, Any], field: str) -> None:
    begun(book)
    with pytest.raises(RemoteProtocolError) as caught:
        book.take(replace(receipt(KEY, 100), **other), b"sealed")
    assert caught.value.field == field
    assert (book.layer_tokens, len(book.waiting)) == (0, 0)


def test_no_token_is_counted_twice_however_routes_are_cut(book: ReceiptBook) -> None:
    claim = begun(book, tokens=60)
    assert take(book, receipt(KEY, 40))
    assert take(book, receipt(KEY, 220, since=200)), "20 tokens of a later route"
    for tokens, since in ((221, 200), (230, 0), (300, 260)):
        with pytest.raises(RemoteProtocolError):
            take(book, receipt(KEY, tokens, since=since))
    claim.tokens = 100
    with pytest.raises(RemoteProtocolError, match="before this node had a part"):
        take(book, receipt(KEY, 230, since=40))
    assert take(book, receipt(KEY, 230, since=210))
    assert book.layer_tokens == 4 * (40 + 20 + 10)


def test_all_receipts_of_a_session_say_the_same_beginning(book: ReceiptBook) -> None:
    begun(book)
    assert take(book, receipt(KEY, 40))
    with pytest.raises(RemoteProtocolError, match="began_at"):
        take(book, receipt(KEY, 50, began_at=int(NOW) - 1))


def test_a_receipt_may_come_a_while_after_its_session(book: ReceiptBook) -> None:
    clock = book.clock
    assert isinstance(clock, Clock)
    book.end(KEY.session, begun(book))
    clock.now_s += CLAIM_S
    assert take(book, receipt(KEY, 40))
    clock.now_s += 1
    with pytest.raises(RemoteProtocolError, match="no longer"):
        take(book, receipt(KEY, 50))


def test_claims_and_what_waits_are_bounded(book: ReceiptBook, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_CLAIMS", "MAX_WAITING"):
        monkeypatch.setattr(node.session.receipts, name, 3)
    keys = [SessionKey.fresh() for _ in range(5)]
    for key in keys:
        claim = begun(book, key=key)
        take(book, receipt(key, 40), key)
        book.end(key.session, claim)
    assert list(book.waiting) == [key.session for key in keys[2:]]
    assert book.dropped == 2
    assert list(book._over) == [key.session for key in keys[2:]]


def test_what_was_published_waits_no_more_but_a_newer_one_does(book: ReceiptBook) -> None:
    begun(book)
    take(book, receipt(KEY, 40))
    leaving = book.batch(10_000, 64)
    take(book, receipt(KEY, 50))
    book.published(leaving)
    assert book.batch(10_000, 64) == (seal(receipt(KEY, 50), KEY),)
    assert book.batch(100, 64) == ()
    book.published(book.batch(10_000, 64))
    assert not book.waiting


def test_what_is_too_old_to_count_is_not_published(book: ReceiptBook) -> None:
    begun(book)
    take(book, receipt(KEY, 40))
    clock = book.clock
    assert isinstance(clock, Clock)
    clock.now_s += FRESH_S + 1
    assert book.batch(10_000, 64) == ()
    assert not book.waiting


async def test_what_waits_outlives_a_restart(book: ReceiptBook, tmp_path: Path) -> None:
    begun(book)
    take(book, receipt(KEY, 40))
    file = ReceiptFile.of(A, FINGERPRINT, tmp_path)
    keeping = asyncio.get_running_loop().create_task(file.keep(book))
    await asyncio.sleep(0)
    keeping.cancel()
    await asyncio.wait([keeping])
    again = ReceiptBook(A, Clock())
    ReceiptFile.of(A, FINGERPRINT, tmp_path).load(again)
    assert again.waiting == book.waiting
    file.path.write_bytes(b"\xc1 damaged")
    damaged = ReceiptBook(A, Clock())
    ReceiptFile.of(A, FINGERPRINT, tmp_path).load(damaged)
    assert not damaged.waiting
    other = ReceiptBook(B, Clock())
    ReceiptFile.of(B, FINGERPRINT, tmp_path).load(other)
    assert not other.waiting
