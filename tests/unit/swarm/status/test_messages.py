"""What a node says of itself and what is believed of it: bodies there and back, and the guard case by case."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from swarm.base.errors import ConfigError
from swarm.base.layers import Span
from swarm.status.guard import AcceptedMessage, Reason, RejectedMessage, TelemetryGuard
from swarm.status.messages import (
    Body,
    Presence,
    ServedModel,
    Stamp,
    TelemetryError,
    check_prefix,
    open_payload,
    seal_body,
)
from tests.telemetry_messages import (
    FINGERPRINT,
    FIRST_NONCE,
    NOW,
    SECOND_NONCE,
    event,
    identity,
    metrics,
    status,
    topic,
    will,
)

Hear = Callable[..., Reason | None]


@pytest.fixture
def guard() -> TelemetryGuard:
    return TelemetryGuard()


@pytest.fixture
def hear(guard: TelemetryGuard) -> Hear:
    """Say it, at its own time unless told otherwise; the reason for which it is refused, or None."""

    def said(body: Body, now: float | None = None, *, retained: bool = False, who: int = 0) -> Reason | None:
        payload = seal_body(body, topic(body, who), identity(who))
        before = dict(guard.rejected)
        answer = guard.accept(topic(body, who), payload, retained, body.stamp.at if now is None else now)
        if isinstance(answer, AcceptedMessage):
            assert answer == AcceptedMessage(identity(who).peer_id, FINGERPRINT, body)
            assert guard.rejected == before
            return None
        assert answer.peer == identity(who).peer_id
        assert guard.rejected == before | {answer.reason: before[answer.reason] + 1}
        return answer.reason

    return said


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (status(device="x" * 97), "device"),
        (status(name="x" * 65), "name"),
        (status(version="x" * 33), "version"),
        (status(path="x" * 33), "path"),
        (status(nonce="abc"), "nonce"),
        (status(ttl_s=601.0), "ttl_s"),
        (status(span=Span(8, 16)), "span"),
        (metrics(busy=1.01), "busy"),
        (metrics(queue_ms=1.1e7), "queue_ms"),
        (metrics(sweeps=2**53 + 1), "sweeps"),
        (metrics(device_temperature_c=1_000.1), "device_temperature_c"),
        (metrics(sweep_ms=tuple((size + 1, 1.0) for size in range(9))), "sweep_ms"),
        (metrics(sweep_ms=((4_097, 1.0),)), "sweep_ms"),
        (event(text="x" * 201), "text"),
        (status(at=float("nan")), "at"),
        (status(name="\u202eevil"), "name"),
        (metrics(kv_tokens_free=4_097), "kv_tokens_free"),
        (metrics(sweep_ms=((2, 1.0), (2, 1.0))), "sweep_ms"),
        (replace(will(), stamp=Stamp(FIRST_NONCE, 1, NOW)), "seq"),
    ],
)
def test_a_node_cannot_say_what_nobody_would_believe(body: Body, field: str) -> None:
    with pytest.raises(TelemetryError) as caught:
        seal_body(body, topic(body), identity(0))
    assert caught.value.field == field


def test_a_bridge_may_hang_the_topics_elsewhere() -> None:
    payload = seal_body(status(), topic(status()), identity(0))
    assert open_payload("a/b", topic(status(), prefix="a/b"), payload).body == status()


def test_a_node_speaks_for_itself_only_and_in_its_place() -> None:
    for wrong in (topic(status(), who=1), topic(metrics()), "canopy/nowhere"):
        with pytest.raises(TelemetryError, match="topic"):
            seal_body(status(), wrong, identity(0))


@pytest.mark.parametrize("prefix", ["", "a//b", "/a", "a/", "a/#", "+", "$SYS", "a b", "a/b/c/d/e", "ä"])
def test_a_prefix_is_a_plain_topic(prefix: str) -> None:
    with pytest.raises(ConfigError, match="--mqtt-prefix"):
        check_prefix(prefix)


def test_what_a_node_says_is_believed_in_its_order(hear: Hear) -> None:
    assert hear(status(seq=1)) is None
    assert hear(event(seq=2)) is None
    assert hear(metrics(seq=4)) is None
    assert hear(status(seq=3, state=Presence.DRAINING)) is None, "parts travel beside each other"
    assert hear(metrics(seq=5)) is None
    assert hear(will()) is None


def test_a_will_counts_for_the_connection_that_is_known_whatever_its_age(hear: Hear) -> None:
    assert hear(status()) is None
    assert hear(status(NOW + 86_400, seq=2)) is None
    assert hear(will(), NOW + 86_401) is None
    assert hear(will(), NOW + 86_402) is Reason.REPEATED
    assert hear(status(NOW + 86_403, seq=3)) is None, "a sign of life"
    assert hear(will(), NOW + 86_404, retained=True) is None


def test_a_replayed_will_cannot_mark_a_live_node_dead(hear: Hear) -> None:
    assert hear(will()) is Reason.FOREIGN_WILL, "nobody was born yet"
    assert hear(status()) is None
    assert hear(will()) is None
    assert hear(status(NOW + 10, nonce=SECOND_NONCE)) is None, "it is back"
    assert hear(will(), NOW + 11) is Reason.FOREIGN_WILL
    assert hear(will(), NOW + 11, retained=True) is Reason.FOREIGN_WILL
    assert hear(will(SECOND_NONCE), NOW + 12, who=1) is Reason.FOREIGN_WILL, "another peer's"


def test_what_was_said_before_is_not_believed_again(hear: Hear) -> None:
    assert hear(status(seq=1)) is None
    assert hear(status(seq=5)) is None
    assert hear(status(seq=5)) is Reason.REPEATED, "a broker may say the last thing twice"
    assert hear(status(seq=5), retained=True) is Reason.REPEATED
    assert hear(status(seq=4)) is Reason.REPLAYED
    assert hear(metrics(seq=6)) is None
    assert hear(metrics(seq=6)) is Reason.REPEATED
    assert hear(metrics(seq=2)) is Reason.REPLAYED
    assert hear(metrics(seq=9), retained=True) is Reason.REPLAYED, "no node wants these kept"
    assert hear(event(seq=7)) is None
    assert hear(event(seq=3)) is Reason.REPLAYED
    assert hear(status(NOW + 5, nonce=SECOND_NONCE)) is None
    assert hear(status(NOW + 4, seq=9)) is Reason.REPLAYED, "the connection before"
    assert hear(metrics(NOW + 4, seq=9)) is Reason.REPLAYED
    assert hear(metrics(NOW + 6, seq=2, nonce=SECOND_NONCE)) is None


def test_what_is_said_before_birth_is_not_believed(hear: Hear) -> None:
    assert hear(metrics()) is Reason.UNBORN
    assert hear(status()) is None
    assert hear(metrics(NOW + 1, nonce=SECOND_NONCE)) is Reason.UNBORN
    assert hear(metrics()) is None


@pytest.mark.parametrize(
    ("body", "now", "retained", "reason"),
    [
        (status(), NOW + 59, False, None),
        (status(), NOW + 61, False, Reason.SKEWED),
        (status(), NOW - 59, False, None),
        (status(), NOW - 61, False, Reason.SKEWED),
        (status(), NOW - 61, True, Reason.SKEWED),
        (status(), NOW + 179, True, None),
        (status(), NOW + 181, True, Reason.EXPIRED),
        (status(ttl_s=30.0), NOW + 31, True, Reason.EXPIRED),
        (status(ttl_s=600.0), NOW + 599, True, None),
    ],
)
def test_time(hear: Hear, body: Body, now: float, retained: bool, reason: Reason | None) -> None:
    assert hear(body, now, retained=retained) is reason


def test_late_metrics_are_skewed(hear: Hear) -> None:
    assert hear(status()) is None
    assert hear(metrics(), NOW + 61) is Reason.SKEWED
    assert hear(event(), NOW - 61) is Reason.SKEWED


def test_a_refused_message_changes_nothing(hear: Hear, guard: TelemetryGuard) -> None:
    assert hear(status()) is None
    for body, now in (
        (status(NOW + 500, nonce=SECOND_NONCE), NOW),
        (status(NOW, seq=99), NOW + 400),
        (metrics(), NOW + 400),
    ):
        assert hear(body, now) is Reason.SKEWED
    payload = seal_body(status(NOW + 1, nonce=SECOND_NONCE), topic(status()), identity(0))
    assert guard.accept(topic(status()), payload.replace(b"serving", b"joining"), False, NOW + 1) == RejectedMessage(
        Reason.FORGED
    )
    assert hear(metrics()) is None
    assert hear(will()) is None


def envelope(**other: object) -> bytes:
    payload = seal_body(status(), topic(status()), identity(0))
    return json.dumps({**json.loads(payload), **other}).encode()


def forged(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A body changed after it was signed."""
    raw = json.loads(envelope())
    body = json.loads(raw["body"])
    change(body)
    return json.dumps({**raw, "body": json.dumps(body)}).encode()


def signed_as_told(text: str) -> bytes:
    """Somebody signs a body that no honest node would say."""
    place = topic(status()).removeprefix("canopy/")
    signature = identity(0).sign(f"canopy-telemetry\n{place}\n{text}".encode())
    raw = json.loads(envelope())
    return json.dumps({**raw, "body": text, "sig": base64.b64encode(signature).decode()}).encode()


def odd(**changes: object) -> bytes:
    raw = json.loads(json.loads(envelope())["body"])
    return signed_as_told(json.dumps({**raw, **changes}))


BAD: Mapping[str, tuple[Reason, Callable[[], bytes]]] = {
    "nothing": (Reason.MALFORMED, lambda: b""),
    "no JSON": (Reason.MALFORMED, lambda: b"hello"),
    "no UTF-8": (Reason.MALFORMED, lambda: b"\xff\xfe{}"),
    "UTF-16": (Reason.MALFORMED, lambda: envelope().decode().encode("utf-16")),
    "a list": (Reason.MALFORMED, lambda: b"[1]"),
    "deep": (Reason.MALFORMED, lambda: b"[" * 8_192),
    "a huge number": (Reason.MALFORMED, lambda: b"9" * 8_000),
    "too large": (Reason.OVERSIZED, lambda: envelope(padding="x" * 8_192)),
    "version 2": (Reason.OTHER_VERSION, lambda: envelope(v=2)),
    "version true": (Reason.OTHER_VERSION, lambda: envelope(v=True)),
    "no version": (Reason.OTHER_VERSION, lambda: b"{}"),
    "body no text": (Reason.MALFORMED, lambda: envelope(body={})),
    "body no object": (Reason.MALFORMED, lambda: envelope(body="[]")),
    "body half a character": (Reason.MALFORMED, lambda: envelope(body='{"\ud800":1}')),
    "key no base64": (Reason.MALFORMED, lambda: envelope(key="?")),
    "key not there": (Reason.MALFORMED, lambda: envelope(key=None)),
    "another's key": (Reason.FORGED, lambda: envelope(key=base64.b64encode(identity(1).public_key).decode())),
    "no signature": (Reason.FORGED, lambda: envelope(sig="")),
    "a key of zeros": (Reason.FORGED, lambda: envelope(key="AAAA")),
    "state changed": (Reason.FORGED, lambda: forged(lambda body: body.update(state="left"))),
    "span changed": (Reason.FORGED, lambda: forged(lambda body: body.update(span=[0, 12]))),
    "signed, no JSON": (Reason.MALFORMED, lambda: signed_as_told("{")),
    "signed, deep": (Reason.MALFORMED, lambda: signed_as_told('{"a":' + "[" * 4_000)),
    "signed, NaN": (Reason.MALFORMED, lambda: signed_as_told('{"at":NaN}')),
    "signed, other kind": (Reason.MALFORMED, lambda: odd(kind="metrics")),
    "signed, kind a list": (Reason.MALFORMED, lambda: odd(kind=["birth"])),
    "signed, other model": (
        Reason.MALFORMED,
        lambda: odd(model={"name": "x", "fingerprint": "ff" * 32}),
    ),
    "signed, huge time": (Reason.MALFORMED, lambda: odd(at=10**400)),
}


@pytest.mark.parametrize("case", BAD)
def test_what_no_node_says_is_refused_and_counted(case: str, guard: TelemetryGuard) -> None:
    reason, payload = BAD[case]
    assert guard.accept(topic(status()), payload(), False, NOW) == RejectedMessage(reason)
    assert guard.rejected == dict.fromkeys(Reason, 0) | {reason: 1}
    assert len(guard) == 0


def test_a_later_version_may_add_fields(guard: TelemetryGuard) -> None:
    assert isinstance(guard.accept(topic(status()), odd(humour=3), False, NOW), AcceptedMessage)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("canopy/", ""),
        ("canopy/", "other/"),
        ("canopy/", "canopy/canopy/"),
        ("canopy/", "x" * 70_000),
        ("/v1/", "/v2/"),
        ("/status", "/state"),
        ("/status", ""),
        ("/status", "/status/"),
        (FINGERPRINT, "xyz"),
        (FINGERPRINT, ""),
        ("Qm", "qm"),
        ("Qm", ""),
        ("canopy", "\0\ud800"),
    ],
    ids=lambda part: repr(part[:20]),
)
def test_other_topics_are_refused(old: str, new: str, guard: TelemetryGuard) -> None:
    wrong = topic(status()).replace(old, new, 1)
    assert wrong != topic(status())
    assert guard.accept(wrong, envelope(), False, NOW) == RejectedMessage(Reason.MALFORMED)


def test_a_message_counts_on_its_own_topic_only(guard: TelemetryGuard) -> None:
    assert guard.accept(topic(status(), who=1), envelope(), False, NOW) == RejectedMessage(Reason.FORGED)
    assert guard.accept(topic(status(), fingerprint="cd" * 32), envelope(), False, NOW) == RejectedMessage(
        Reason.FORGED
    )
    assert guard.accept(topic(metrics()), envelope(), False, NOW) == RejectedMessage(Reason.FORGED)


def test_one_peer_cannot_fill_the_memory(guard: TelemetryGuard) -> None:
    def say(number: int) -> AcceptedMessage | RejectedMessage:
        fingerprint = f"{number:064x}"
        body = status(model=ServedModel("m", fingerprint, 12))
        place = topic(body, fingerprint=fingerprint)
        return guard.accept(place, seal_body(body, place, identity(0)), False, NOW)

    answers = [say(number) for number in range(10)]
    assert [isinstance(answer, AcceptedMessage) for answer in answers] == [True] * 8 + [False] * 2
    assert guard.rejected[Reason.CROWDED] == 2


def test_peers_are_bounded_and_the_silent_are_forgotten() -> None:
    guard = TelemetryGuard(max_peers=1)

    def say(body: Body, who: int) -> AcceptedMessage | RejectedMessage:
        return guard.accept(topic(body, who), seal_body(body, topic(body, who), identity(who)), False, body.stamp.at)

    assert isinstance(say(status(), 0), AcceptedMessage)
    assert say(status(NOW + 600), 1) == RejectedMessage(Reason.CROWDED, identity(1).peer_id, FINGERPRINT)
    assert isinstance(say(status(NOW + 800), 1), AcceptedMessage)
    assert len(guard) == 1
    assert say(status(NOW + 801, seq=2), 0) == RejectedMessage(Reason.CROWDED, identity(0).peer_id, FINGERPRINT)


def test_a_flood_is_cut_and_ebbs(hear: Hear) -> None:
    assert hear(status()) is None
    answers = [hear(metrics(seq=2 + number)) for number in range(80)]
    assert answers == [None] * 59 + [Reason.FLOOD] * 21
    assert hear(will()) is None, "bad news passes"
    assert hear(metrics(NOW + 5, seq=99)) is None
