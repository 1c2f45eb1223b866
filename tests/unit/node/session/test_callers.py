"""Each introduction is believed once, for two minutes around its time, and what is remembered is bounded."""

from __future__ import annotations

import pytest

import node.session.admission
from node.session.admission import MAX_REMEMBERED, CallerCheck
from swarm.discovery.identity import Identity
from swarm.errors import RemoteProtocolError
from swarm.ids import PeerId
from swarm.protocol.authority import SessionKey
from swarm.protocol.limits import MAX_KEY_BYTES
from swarm.transport.endpoint import Endpoint
from swarm.transport.introduction import KEY, NONCE, Metadata, introduce

HERE = Endpoint(PeerId("here"), "192.0.2.1:1", b"certificate")
METHOD, SUBJECT = "/Node/Link", b"what it begins with"


class Clock:
    """Moved by the test.

    Attributes:
        now_s: seconds since 1970.
    """

    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


def made(signer: SessionKey | Identity, at_s: float) -> Metadata:
    return introduce(signer, HERE, METHOD, SUBJECT, lambda: at_s)


def test_machines_and_clients_are_known_by_their_names() -> None:
    clock, key, identity = Clock(), SessionKey.fresh(), Identity.ephemeral()
    check = CallerCheck(HERE.peer, HERE.digest, clock)
    assert check.identify(made(key, clock.now_s), METHOD, SUBJECT) == key.session
    assert check.identify(made(identity, clock.now_s), METHOD, SUBJECT) == identity.peer_id


@pytest.mark.parametrize("away_s", [-61.0, 61.0])
def test_clocks_that_differ_too_much_are_told_by_how_much(away_s: float) -> None:
    clock = Clock()
    check = CallerCheck(HERE.peer, HERE.digest, clock)
    with pytest.raises(RemoteProtocolError, match=f"clock is 61 s {'behind' if away_s < 0 else 'ahead'}; set it"):
        check.identify(made(SessionKey.fresh(), clock.now_s + away_s), METHOD, SUBJECT)


@pytest.mark.parametrize("away_s", [-59.0, 0.0, 59.0])
@pytest.mark.parametrize("later_s", [0.0, 59.0, 119.0, 121.0, 1e6])
def test_nothing_is_believed_twice_at_any_time(away_s: float, later_s: float) -> None:
    clock, key = Clock(), SessionKey.fresh()
    check = CallerCheck(HERE.peer, HERE.digest, clock)
    metadata = made(key, clock.now_s + away_s)
    assert check.identify(metadata, METHOD, SUBJECT) == key.session
    clock.now_s += later_s
    check.identify(made(key, clock.now_s), METHOD, SUBJECT)  # by now the old ones may be forgotten
    with pytest.raises(RemoteProtocolError):
        check.identify(metadata, METHOD, SUBJECT)


def test_what_is_remembered_is_bounded_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_REMEMBERED == 65_536
    monkeypatch.setattr(node.session.admission, "MAX_REMEMBERED", 8)
    clock, key = Clock(), SessionKey.fresh()
    check = CallerCheck(HERE.peer, HERE.digest, clock)
    for _ in range(20):
        check.identify(made(key, clock.now_s), METHOD, SUBJECT)
    assert len(check._seen) == 8
    clock.now_s += 120
    check.identify(made(key, clock.now_s), METHOD, SUBJECT)
    assert len(check._seen) == 1


def test_what_is_no_introduction_is_not_remembered() -> None:
    clock, key = Clock(), SessionKey.fresh()
    check = CallerCheck(HERE.peer, HERE.digest, clock)
    (_, public), signature, nonce = made(key, clock.now_s)
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
