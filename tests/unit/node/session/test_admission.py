"""Whom a node lets in, by address."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from ipaddress import ip_network
from types import SimpleNamespace
from typing import cast

import pytest

import node.session.admission
from node.session.admission import (
    CALLS,
    CARRIED,
    DECODED,
    LIMITS,
    MANIFESTS,
    MAX_REMEMBERED,
    OPENED,
    SESSIONS,
    WAITING,
    AddressRefused,
    Admission,
    Caller,
    CallerCheck,
    GrammarsRefused,
    OwnerClass,
    owner_of,
    payer_of,
    standing_of,
    weight_of,
    who_erred,
)
from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId, SessionId
from swarm.base.quota import OverQuota, Preferred
from swarm.directory.identity import Identity
from swarm.link.endpoint import Endpoint
from swarm.link.link import KEY, NONCE, Metadata, introduce
from swarm.protocol.authority import SessionKey, prove_owner
from swarm.protocol.limits import MAX_KEY_BYTES
from swarm.protocol.messages import Attach, OwnerProof
from tests.telemetry_messages import identity

FAR, NEAR = "9.9.9.9", "127.0.0.1"


class Clock:
    """Time that a test moves."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def admission(clock: Clock) -> Admission:
    return Admission(clock=clock)


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(("address", "most"), [(FAR, 64), (NEAR, 1_024)])
def test_streams_without_a_session_are_bounded_and_come_back(
    address: str, most: int, admission: Admission, clock: Clock
) -> None:
    with ExitStack() as stack:
        for _ in range(most):
            stack.enter_context(admission.stream(address))
        with pytest.raises(OverQuota, match=WAITING), admission.stream(address):
            pass
        with admission.stream("8.8.8.8"):
            assert admission.quota.total(WAITING) == most + 1, "another address is let in"
    assert admission.quota.total(WAITING) == 0
    clock.now += 10
    with admission.stream(address) as waiting:
        waiting.close()
        assert admission.quota.total(WAITING) == 0, "it has a session now"


def test_who_has_sessions_may_open_a_stream_for_each_besides(admission: Admission, held: ExitStack) -> None:
    for _ in range(5):
        assert admission.quota.take(SESSIONS, CARRIED + FAR)
    for _ in range(69):
        held.enter_context(admission.stream(FAR))
    with pytest.raises(OverQuota), admission.stream(FAR):
        pass


def test_streams_and_calls_that_come_too_fast_are_refused_for_that_address_alone(admission: Admission) -> None:
    for _ in range(8 + 256):
        with admission.stream(FAR):
            pass
    with pytest.raises(OverQuota, match=OPENED), admission.stream(FAR):
        pass
    for _ in range(200):
        admission.check_call(FAR)
    with pytest.raises(OverQuota, match=CALLS):
        admission.check_call(FAR)
    with admission.stream("8.8.8.8"):
        admission.check_call("8.8.8.8")


def test_a_crowd_that_opens_all_the_time_keeps_no_newcomer_out(admission: Admission) -> None:
    for number in range(64):
        with suppress(OverQuota):
            for _ in range(64):
                with admission.stream(f"9.9.9.{number}"):
                    pass
    with pytest.raises(OverQuota, match=OPENED), admission.stream("9.9.9.1"):
        pass
    for _ in range(8):
        with admission.stream("8.8.8.8"):
            pass


def test_who_goes_on_asking_for_what_is_refused_is_shut_out(admission: Admission, clock: Clock) -> None:
    for address in (NEAR, FAR):
        for _ in range(64 + LIMITS.strikes.allowed):
            admission.insisted(address)
        assert not admission.shut_out()
        admission.insisted(address)
    assert admission.shut_out() == {FAR}, "never a private network"
    with pytest.raises(AddressRefused), admission.stream(FAR):
        pass
    clock.now += 5
    assert not admission.shut_out()


def test_whoever_retries_at_leisure_is_not(admission: Admission, clock: Clock) -> None:
    for _ in range(1_000):
        admission.insisted(FAR)
        clock.now += 0.5
    assert not admission.shut_out()


def test_who_sends_garbage_is_refused_for_a_while_but_never_a_private_network(
    admission: Admission, clock: Clock
) -> None:
    for address in (FAR, NEAR):
        for _ in range(LIMITS.strikes.allowed + 1):
            with admission.stream(address):
                admission.strike(address)
    with pytest.raises(AddressRefused, match="try again in 5 s"), admission.stream(FAR):
        pass
    with pytest.raises(AddressRefused):
        admission.check_call(FAR)
    with admission.stream(NEAR):
        pass
    clock.now += 5
    with admission.stream(FAR):
        pass


def test_who_made_the_node_decode_for_long_opens_no_stream_until_that_is_paid(
    admission: Admission, clock: Clock
) -> None:
    admission.decoded(FAR, 3.0)
    admission.decoded(CARRIED + FAR, 1e3)
    with pytest.raises(OverQuota, match=DECODED), admission.stream(FAR):
        pass
    clock.now += 10.1
    with admission.stream(FAR):
        pass


def test_a_flood_of_refusals_is_a_line_a_minute(
    admission: Admission, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1_000):
        clock.now = number * 0.01
        admission.refused(FAR, OverQuota(CALLS))
    assert caplog.messages == [f"refused what {FAR} sent: too many calls at once"]


def test_lists_of_weight_files_are_asked_for_now_and_then(admission: Admission, clock: Clock) -> None:
    for _ in range(16):
        admission.check_manifest(FAR)
    with pytest.raises(OverQuota, match=MANIFESTS):
        admission.check_manifest(FAR)
    clock.now += 5.0
    admission.check_manifest(FAR)
    for number in range(200):  # a crowd
        with suppress(OverQuota):
            admission.check_manifest(f"9.9.{number}.1")
    with pytest.raises(OverQuota, match=MANIFESTS):
        admission.check_manifest("9.9.250.1")


@pytest.mark.parametrize(("owner", "grammars"), [(FAR, 3), (CARRIED + FAR, 48)])
def test_whose_third_grammar_takes_too_much_is_refused_any(
    owner: str, grammars: int, admission: Admission, clock: Clock
) -> None:
    """A machine that carries others' sessions has 16 times as many: one stranger behind it shuts out nobody else."""
    refused_s = []
    for _ in range(2):
        for _ in range(grammars):
            admission.check_grammar(owner)
            admission.grammar_exceeded(owner)
        with pytest.raises(GrammarsRefused, match="try again in") as refused:
            admission.check_grammar(owner)
        admission.check_grammar("8.8.8.8")
        admission.check_call(FAR)
        refused_s.append(float(re.findall(r"in (\d+) s", str(refused.value))[0]))
        clock.now += refused_s[-1]
    assert refused_s == [5.0, 10.0], "longer each time"


def test_a_private_network_stands_for_many_who_ask_for_grammars(admission: Admission) -> None:
    for owner in (NEAR, CARRIED + NEAR):
        for _ in range(9):
            admission.grammar_exceeded(owner)
        admission.check_grammar(owner)


def test_what_grammars_took_is_paid_for_by_waiting(admission: Admission, clock: Clock) -> None:
    admission.grammar_took(FAR, 3.0)
    assert admission.grammar_wait_s(FAR) == 0, "a burst is everybody's"
    admission.grammar_took(FAR, 1.0)
    assert admission.grammar_wait_s(FAR) == pytest.approx(4.0)
    assert admission.grammar_wait_s("8.8.8.8") == 0
    clock.now += 4
    assert admission.grammar_wait_s(FAR) == 0


# Each introduction is believed once, for two minutes around its time, and what is remembered is bounded.


HERE = Endpoint(PeerId("here"), "192.0.2.1:1", b"certificate")
METHOD, SUBJECT = "/Node/Link", b"what it begins with"


def made(signer: SessionKey | Identity, at_s: float) -> Metadata:
    return introduce(signer, HERE, METHOD, SUBJECT, lambda: at_s)


def test_machines_and_clients_are_known_by_their_names() -> None:
    clock, key, identity = Clock(1e9), SessionKey.fresh(), Identity.ephemeral()
    check = CallerCheck(HERE.peer, HERE.digest, clock)
    assert check.identify(made(key, clock.now), METHOD, SUBJECT) == key.session
    assert check.identify(made(identity, clock.now), METHOD, SUBJECT) == identity.peer_id


@pytest.mark.parametrize("away_s", [-61.0, 61.0])
def test_clocks_that_differ_too_much_are_told_by_how_much(away_s: float) -> None:
    clock = Clock(1e9)
    check = CallerCheck(HERE.peer, HERE.digest, clock)
    with pytest.raises(RemoteProtocolError, match=f"clock is 61 s {'behind' if away_s < 0 else 'ahead'}; set it"):
        check.identify(made(SessionKey.fresh(), clock.now + away_s), METHOD, SUBJECT)


@pytest.mark.parametrize("away_s", [-59.0, 0.0, 59.0])
@pytest.mark.parametrize("later_s", [0.0, 59.0, 119.0, 121.0, 1e6])
def test_nothing_is_believed_twice_at_any_time(away_s: float, later_s: float) -> None:
    clock, key = Clock(1e9), SessionKey.fresh()
    check = CallerCheck(HERE.peer, HERE.digest, clock)
    metadata = made(key, clock.now + away_s)
    assert check.identify(metadata, METHOD, SUBJECT) == key.session
    clock.now += later_s
    check.identify(made(key, clock.now), METHOD, SUBJECT)  # by now the old ones may be forgotten
    with pytest.raises(RemoteProtocolError):
        check.identify(metadata, METHOD, SUBJECT)


def test_what_is_remembered_is_bounded_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_REMEMBERED == 65_536
    monkeypatch.setattr(node.session.admission, "MAX_REMEMBERED", 8)
    clock, key = Clock(1e9), SessionKey.fresh()
    check = CallerCheck(HERE.peer, HERE.digest, clock)
    for _ in range(20):
        check.identify(made(key, clock.now), METHOD, SUBJECT)
    assert len(check._seen) == 8
    clock.now += 120
    check.identify(made(key, clock.now), METHOD, SUBJECT)
    assert len(check._seen) == 1


def test_what_is_no_introduction_is_not_remembered() -> None:
    clock, key = Clock(1e9), SessionKey.fresh()
    check = CallerCheck(HERE.peer, HERE.digest, clock)
    (_, public), signature, nonce = made(key, clock.now)
    wrong: list[Metadata | None] = [
        None,
        (),
        ((KEY, public), signature),
        ((KEY, bytes(MAX_KEY_BYTES + 1)), signature, nonce),
        ((KEY, bytes(MAX_KEY_BYTES)), signature, nonce),
        ((KEY, b""), signature, nonce),
        ((KEY, public), signature, (NONCE, nonce[1][:-1])),
        ((KEY, bytes(32)), signature, nonce),
    ]
    for metadata in wrong:
        with pytest.raises(RemoteProtocolError):
            check.identify(metadata, METHOD, SUBJECT)
    assert len(check._seen) == 0


PEER = PeerId("own")
OWN = Preferred((ip_network("8.8.8.0/24"), ip_network("2001:db8::/32")), frozenset({PEER}))


@pytest.mark.parametrize(
    ("address", "index", "caller", "owner"),
    [
        ("8.8.8.8", 0, SessionId(b"s"), OwnerClass.PREFERRED),
        ("2001:db8:1::/56", 0, SessionId(b"s"), OwnerClass.PREFERRED),
        ("8.8.4.4", 1, PEER, OwnerClass.PREFERRED),
        ("8.8.4.4", 1, PeerId("another"), OwnerClass.CARRIER),
        ("8.8.4.4", 0, SessionId(b"s"), OwnerClass.STRANGER),
        ("10.0.0.1", 0, SessionId(b"s"), OwnerClass.NEAR),
        ("unknown", 0, SessionId(b"s"), OwnerClass.NEAR),
    ],
)
def test_whom_the_operator_prefers_is_known_by_address_or_peer(
    address: str, index: int, caller: Caller, owner: OwnerClass
) -> None:
    attach = cast("Attach", SimpleNamespace(index=index, owner=None))
    key = owner_of(address, attach, caller, OWN)
    assert OwnerClass.of(key) is owner
    assert OwnerClass.of(owner_of(address, attach, caller)) is not OwnerClass.PREFERRED


def owned(index: int, owner: Identity, key: SessionKey | None = None) -> Attach:
    """An attach that an identity says is its own, or another session's."""
    key = key or SessionKey.fresh()
    proof = prove_owner(key.session, owner.public_key, owner.sign)
    return cast("Attach", SimpleNamespace(index=index, owner=proof, session=key.session, payer=b"mine"))


def test_an_owner_is_known_by_its_key_wherever_it_comes_from() -> None:
    friend, giver, other = (identity(number) for number in range(3))
    preferred, gave = Preferred(peers=frozenset({friend.peer_id})), {giver.peer_id: 5, friend.peer_id: 3}
    for index, address in ((0, FAR), (1, FAR), (0, "10.0.0.1")):
        assert owner_of(address, owned(index, friend), PEER, preferred, gave) == f"own {friend.peer_id}"
        key = owner_of(address, owned(index, giver), PEER, preferred, gave)
        assert OwnerClass.of(key) is OwnerClass.CONTRIBUTOR
        found = standing_of(key)
        assert (found.shares, found.sessions, found.network, found.neighbours, found.crowd) == (
            *(5, 1, f"owner {giver.peer_id}", 5),
            None,
        )
        assert payer_of(key, owned(index, giver)) == key
        assert weight_of(key) == 1
    assert owner_of(FAR, owned(0, other), PEER, preferred, gave) == FAR
    assert owner_of(FAR, owned(0, giver), PEER) == FAR, "nobody is preferred here"


def test_what_another_session_was_signed_for_proves_no_owner() -> None:
    giver, stranger = identity(1), identity(2)
    stolen = cast("SimpleNamespace", owned(0, giver))
    stolen.session = SessionKey.fresh().session
    assert owner_of(FAR, cast("Attach", stolen), PEER, contributors={giver.peer_id: 5}) == FAR
    forged = cast("SimpleNamespace", owned(0, stranger))
    forged.owner = OwnerProof(giver.public_key, forged.owner.signature)
    assert owner_of(FAR, cast("Attach", forged), PEER, contributors={giver.peer_id: 5}) == FAR
    forged.owner = OwnerProof(b"no key", b"x")
    assert owner_of(FAR, cast("Attach", forged), PEER, contributors={giver.peer_id: 5}) == FAR


def test_what_a_contributor_does_wrong_counts_against_its_address(admission: Admission) -> None:
    giver = identity(1)
    key = owner_of(FAR, owned(0, giver), PEER, contributors={giver.peer_id: 5})
    for _ in range(4):
        admission.strike(key)
    assert admission.shut_out() == {FAR}
    admission.decoded(key, 5.0)
    assert admission.quota.wait_s(DECODED, FAR, 0.0) > 0
    carried = owner_of(FAR, owned(1, giver), PEER, contributors={giver.peer_id: 5})
    assert OwnerClass.of(who_erred(carried)) is OwnerClass.CARRIER


def test_a_payers_name_says_no_address_and_stays_the_same_here_alone() -> None:
    one, other = Admission(), Admission()
    assert one.payer_tag("8.8.8.8") == one.payer_tag("8.8.8.9"), "one network"
    assert one.payer_tag("8.8.8.8") != one.payer_tag("8.8.4.4")
    assert one.payer_tag("8.8.8.8") != other.payer_tag("8.8.8.8")
    attach = cast("Attach", SimpleNamespace(index=1, payer=one.payer_tag("8.8.8.8")))
    first = payer_of("hop 9.9.9.9", attach)
    second = payer_of("hop 9.9.9.9", cast("Attach", SimpleNamespace(index=1, payer=one.payer_tag("8.8.4.4"))))
    assert first != second
    assert standing_of(first).network == standing_of(second).network == "hop 9.9.9.9"
    assert payer_of("8.8.8.8", cast("Attach", SimpleNamespace(index=0, payer=b"mine"))) == "8.8.8.8"


def test_reports_of_an_address_are_few_and_one_at_a_time() -> None:
    now = 0.0
    admission = Admission(clock=lambda: now)
    for _ in range(4):
        with admission.report("1.1.1.1"), pytest.raises(OverQuota), admission.report("1.1.1.1"):
            pass
    with pytest.raises(OverQuota), admission.report("1.1.1.1"):
        pass
    now += 900.0
    with admission.report("1.1.1.1"):
        pass
    with pytest.raises(OverQuota), admission.report("1.1.1.1"):
        pass
    with admission.report("9.9.9.9"):
        pass
