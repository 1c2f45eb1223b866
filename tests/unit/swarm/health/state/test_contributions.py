"""Who contributed: receipts count once all of a route showed them, once each, and within what a machine can do."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

import swarm.health.state.contributions
from node.session.receipts import ReceiptBook
from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.health.state.contributions import ContributionBook, tokens_per_s
from swarm.health.state.model import Knowledge
from swarm.protocol.authority import SessionKey
from swarm.protocol.succession import seal_succession
from swarm.status.messages import Receipts, ServedModel, Stamp
from swarm.trust.receipt import FRESH_S, Receipt, seal
from tests.receipts import TWO, A, B, C, attach, receipt, route
from tests.telemetry_messages import FINGERPRINT, FIRST_NONCE, NOW, identity, status

KEY = SessionKey.fresh()
SPANS = {A: Span(0, 4), B: Span(4, 12), C: Span(0, 12)}
DAY_S = 86_400.0


def knowing(*peers: PeerId) -> Knowledge:
    """A service that has heard these for an hour."""
    knowledge = Knowledge()
    for peer in peers or (A, B, C):
        knowledge.apply_telemetry(peer, FINGERPRINT, status(span=SPANS[peer]), NOW - 3_600)
    return knowledge


def show(knowledge: Knowledge, peer: PeerId, *shown: Receipt, key: SessionKey = KEY, now: float = NOW) -> None:
    sealed = tuple(seal(one, key) for one in shown)
    knowledge.apply_telemetry(peer, FINGERPRINT, Receipts(Stamp(FIRST_NONCE, 2, now), sealed), now)


def sums(knowledge: Knowledge) -> dict[PeerId, int]:
    return {peer: one.layer_tokens for peer, one in knowledge.contributions.peers.items() if one.layer_tokens}


def test_a_receipt_counts_once_all_machines_of_its_route_showed_it() -> None:
    knowledge = knowing()
    show(knowledge, A, receipt(KEY, 100))
    assert sums(knowledge) == {}
    show(knowledge, B, receipt(KEY, 60))
    assert sums(knowledge) == {A: 4 * 60, B: 8 * 60}
    show(knowledge, B, receipt(KEY, 100))
    for peer in (A, B, A, B):
        show(knowledge, peer, receipt(KEY, 100), receipt(KEY, 60))
    assert sums(knowledge) == {A: 4 * 100, B: 8 * 100}, "each token once"


def test_a_new_route_counts_from_where_the_one_before_had_come_to() -> None:
    knowledge = knowing()
    alone = route((C, 0, 12))
    for peer in (A, B):
        show(knowledge, peer, receipt(KEY, 100))
    show(knowledge, C, receipt(KEY, 150, since=120, route=alone))
    show(knowledge, C, receipt(KEY, 160, since=0, route=alone))
    assert sums(knowledge) == {A: 400, B: 800, C: 12 * 40}


def test_tokens_that_counted_in_one_route_count_in_no_other() -> None:
    knowledge = knowing()
    for peer in (A, B):
        show(knowledge, peer, receipt(KEY, 100))
    for peer in (B, C):
        show(knowledge, peer, receipt(KEY, 150, route=route((C, 0, 4), (B, 4, 12))))
    assert sums(knowledge) == {A: 400, B: 8 * 150, C: 4 * 50}


@pytest.mark.parametrize(
    "made",
    [
        receipt(KEY, 100, issued_at=int(NOW - FRESH_S) - 1, began_at=int(NOW - FRESH_S) - 1),
        receipt(KEY, 100, issued_at=int(NOW) + 61),
        receipt(KEY, 100, began_at=int(NOW - DAY_S) - 1),
        receipt(KEY, 100, fingerprint="0" * 64),
        receipt(KEY, 100, route=route((A, 0, 5), (B, 5, 12))),
        receipt(KEY, 100, route=route((A, 0, 4), (B, 4, 11))),
        receipt(KEY, 100, route=route((B, 0, 4), (A, 4, 12))),
    ],
    ids=["old", "of the future", "of an old session", "of another model", "of others' layers", "too short", "turned"],
)
def test_what_does_not_fit_counts_for_nobody(made: Receipt) -> None:
    knowledge = knowing()
    for peer in (A, B):
        show(knowledge, peer, made)
    assert sums(knowledge).get(A, 0) == 0


def test_what_a_stranger_shows_or_signs_counts_for_nobody() -> None:
    knowledge = knowing()
    for peer in (A, B, C):
        show(knowledge, peer, receipt(KEY, 100), key=SessionKey.fresh())
    show(knowledge, C, receipt(KEY, 100))
    show(knowledge, A, receipt(KEY, 100))
    assert sums(knowledge) == {}


def test_a_machine_of_which_nothing_is_heard_lets_nothing_count() -> None:
    knowledge = knowing(A)
    show(knowledge, A, receipt(KEY, 100))
    show(knowledge, B, receipt(KEY, 100))
    assert B not in knowledge.contributions.peers or not knowledge.contributions.peers[B].layer_tokens


def test_nothing_counts_of_a_machine_whose_answers_differ_while_they_do() -> None:
    knowledge = knowing()
    knowledge.record_comparison(FINGERPRINT, A, agrees=False)
    for peer in (A, B):
        show(knowledge, peer, receipt(KEY, 100))
    assert sums(knowledge) == {B: 800}
    knowledge.record_comparison(FINGERPRINT, A, agrees=True)
    for peer in (A, B):
        show(knowledge, peer, receipt(KEY, 110))
    assert sums(knowledge) == {A: 40, B: 880}


@pytest.mark.parametrize(("probed_ms", "most"), [(None, 50_000.0), (10.0, 50_000.0), (1_000.0, 1_024.0)])
def test_nobody_gains_more_than_a_machine_can_do_in_the_time(probed_ms: float | None, most: float) -> None:
    knowledge = Knowledge()
    knowledge.apply_telemetry(C, FINGERPRINT, status(span=SPANS[C]), NOW - 10)
    if probed_ms is not None:
        knowledge.record_probe(FINGERPRINT, C, probed_ms)
    for number in range(50):  # made-up sessions of one who holds all layers
        key = SessionKey.fresh()
        show(knowledge, C, receipt(key, 10**9, route=route((C, 0, 12))), key=key, now=NOW + number)
    assert tokens_per_s(probed_ms) == most
    assert sums(knowledge)[C] == pytest.approx(12 * most * (10 + 49), rel=0.01)


def test_a_group_that_lacks_layers_gains_only_what_honest_machines_computed_for_it() -> None:
    """A and C and their client sign and show whatever they like; B shows what its own node accepts."""
    rng = random.Random(7)
    knowledge = knowing()
    honest = ReceiptBook(B, lambda: NOW)
    computed = 0

    def ability(peer: PeerId, made: Receipt) -> float:
        return knowledge._ability(B, made) if peer == B else 1e12  # they say that they hold what they like

    for _ in range(60):
        key = SessionKey.fresh()
        claim = honest.begin(attach(key, index=1), lambda: None)
        for _ in range(12):
            if rng.random() < 0.5:
                done = rng.randrange(1, 50)
                claim.tokens, computed = claim.tokens + done, computed + done
            since = rng.choice([0, 0, rng.randrange(200)])
            first = rng.choice([A, C])
            hops = [(first, 0, 4), (B, 4, 12), *rng.choice([(), (), ((C if first == A else A, 12, 900),)])]
            made = receipt(key, since + rng.randrange(1, 200), since=since, route=route(*hops))
            made = replace(made, began_at=made.began_at - rng.choice([0, 0, 0, 5]))
            sealed = seal(made, key)
            try:
                if honest.take(made, sealed) is not None and rng.random() < 0.8:
                    knowledge.contributions.show(B, made, ability, NOW)
            except RemoteProtocolError:
                pass
            for liar in (A, C):
                knowledge.contributions.show(liar, made, ability, NOW)
    found = sums(knowledge)
    assert 0 < found[B] <= honest.layer_tokens <= 8 * computed
    assert found.get(A, 0) + found.get(C, 0) == found[B] // 2, "4 layers beside 8"


def test_a_session_that_was_forgotten_counts_no_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm.health.state.contributions, "MAX_SESSIONS", 4)
    knowledge = knowing()
    for peer in (A, B):
        show(knowledge, peer, receipt(KEY, 100))
    for _ in range(4):
        key = SessionKey.fresh()
        show(knowledge, C, receipt(key, 1, route=route((C, 0, 12))), key=key)
    assert len(knowledge.contributions._sessions) == 4
    for peer in (A, B):
        show(knowledge, peer, receipt(KEY, 100))
    assert sums(knowledge) == {A: 400, B: 800, C: 48}


def test_routes_and_machines_of_one_session_are_bounded() -> None:
    knowledge = knowing()
    for number in range(40):
        show(knowledge, C, receipt(KEY, 100 + number, since=number, route=route((C, 0, 12))))
    (session,) = knowledge.contributions._sessions.values()
    assert len(session.legs) == 8
    assert sums(knowledge) == {C: 12 * 139}


def kept(knowledge: Knowledge) -> Knowledge:
    """Another run of the service, which heard the same nodes."""
    again = knowing()
    again.contributions = ContributionBook()
    again.contributions.load([*json.loads(json.dumps(knowledge.contributions.dump())), ["half a row"]])
    return again


def test_sums_outlive_the_service_its_old_form_and_a_month_away() -> None:
    book = ContributionBook()
    book.load([[A, "old", 500, 1.0, 40, NOW], [B, None, 7, NOW]])
    assert {peer: one.layer_tokens for peer, one in book.peers.items()} == {A: 500, B: 7}
    knowledge = knowing()
    for peer in (A, B):
        show(knowledge, peer, receipt(KEY, 100))
    again = kept(knowledge)
    for peer in (A, B):
        show(again, peer, receipt(KEY, 100), now=NOW + 60)
        show(again, peer, receipt(KEY, 120), now=NOW + 60)
    assert sums(again) == {A: 480, B: 960}, "what was counted before counts no second time"
    later, month = SessionKey.fresh(), NOW + 30 * DAY_S
    again.forget(month)
    for peer in (A, B):
        again.apply_telemetry(peer, FINGERPRINT, status(at=month, span=SPANS[peer]), month)
    for peer in (A, B):
        made = receipt(later, 10, began_at=int(month), issued_at=int(month))
        show(again, peer, made, key=later, now=month + 5)
    assert sums(again) == {A: 520, B: 1_040}


def succeed(knowledge: Knowledge, old: int, new: int, shown_by: PeerId | None = None) -> None:
    sealed = seal_succession(identity(old).public_key, identity(old).sign, identity(new).peer_id)
    body = Receipts(Stamp(FIRST_NONCE, 3, NOW), (), (sealed,))
    knowledge.apply_telemetry(shown_by or identity(new).peer_id, FINGERPRINT, body, NOW)


def test_a_new_key_has_the_old_ones_sum_and_what_still_comes_of_it() -> None:
    knowledge = knowing()
    for peer in (A, B):
        show(knowledge, peer, receipt(KEY, 100))
    succeed(knowledge, 0, 2, shown_by=B)
    assert sums(knowledge) == {A: 400, B: 800}, "shown by another one"
    succeed(knowledge, 0, 2)
    assert sums(knowledge) == {C: 400, B: 800}
    succeed(knowledge, 0, 2)
    succeed(knowledge, 0, 1)
    succeed(knowledge, 2, 0)
    assert sums(knowledge) == {C: 400, B: 800}, "once"
    again = kept(knowledge)
    for peer in (A, B):
        show(again, peer, receipt(KEY, 110), now=NOW + 60)
    assert sums(again) == {C: 440, B: 880}
    succeed(again, 2, 3)
    assert sums(again) == {identity(3).peer_id: 440, B: 880}
    assert again.contributions.heir_of(A) == identity(3).peer_id


def test_a_model_that_is_described_otherwise_lets_nothing_count() -> None:
    knowledge = knowing(A)
    other = ServedModel("demo-target", FINGERPRINT, 16)
    knowledge.apply_telemetry(B, FINGERPRINT, status(span=SPANS[B], model=other), NOW - 60)
    for peer in (A, B):
        show(knowledge, peer, receipt(KEY, 100, route=TWO))
    assert sums(knowledge) == {A: 400}
