"""Whatever a broker delivers, the guard raises nothing and believes only what was signed, each message once."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from functools import cache

from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarm.status.guard import AcceptedMessage, Reason, RejectedMessage, TelemetryGuard
from swarm.status.messages import Body, Presence, Will, seal_body
from tests.telemetry_messages import NOW, SECOND_NONCE, event, identity, metrics, status, topic, will

BODIES: tuple[Body, ...] = (
    status(),
    status(seq=4, state=Presence.DRAINING, name="Grüße"),
    metrics(),
    metrics(seq=5),
    event(),
    will(),
    status(NOW + 1, nonce=SECOND_NONCE),
    metrics(NOW + 2, nonce=SECOND_NONCE),
    will(SECOND_NONCE, NOW + 1),
)
ROUNDS, MESSAGES = 80, 150
"""12,000 in all."""

Message = tuple[str, bytes]


@cache
def said() -> dict[Message, tuple[str, Body]]:
    """Every message that two peers signed."""
    return {
        (topic(body, who), seal_body(body, topic(body, who), identity(who))): (identity(who).peer_id, body)
        for who in (0, 1)
        for body in BODIES
    }


def flip(data: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]


def cut(data: bytes, chance: random.Random) -> bytes:
    start, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + data[end:]


def double(data: bytes, chance: random.Random) -> bytes:
    start, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:end] + data[start:]


def digit(data: bytes, chance: random.Random) -> bytes:
    """Another number, state or name in what was signed."""
    old, new = chance.choice([(b"1", b"2"), (b"serving", b"left"), (b"birth", b"status"), (b"null", b'\\"x\\"')])
    return data.replace(old, new, chance.randrange(1, 4))


def splice(data: bytes, chance: random.Random) -> bytes:
    """A part of the envelope out of another message."""
    raw, other = json.loads(data), json.loads(chance.choice(list(said()))[1])
    for field in chance.sample(["v", "body", "key", "sig"], chance.randrange(1, 3)):
        raw[field] = chance.choice([other[field], None, 1, [], other])
    return json.dumps(raw).encode()


def spaced(data: bytes, chance: random.Random) -> bytes:
    """The same, written in another way: still signed."""
    raw = {**json.loads(data), "more": chance.random()}
    return json.dumps(raw, indent=1).encode()


def same(data: bytes, chance: random.Random) -> bytes:
    return data


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (flip, cut, double, digit, splice, spaced, same)


def mutated(chance: random.Random) -> Message:
    place, payload = chance.choice(list(said()))
    payload = chance.choice(MUTATIONS)(payload, chance)
    match chance.randrange(6):
        case 0:
            place = chance.choice(list(said()))[0]
        case 1:
            place = chance.choice((flip, cut, double))(place.encode(), chance).decode(errors="surrogateescape")
    return place, payload


def check(answer: AcceptedMessage | RejectedMessage, believed: Counter[tuple[str, Body]]) -> None:
    if isinstance(answer, RejectedMessage):
        return
    assert (answer.peer, answer.body) in said().values(), "nobody said that"
    believed[answer.peer, answer.body] += 1
    assert believed[answer.peer, answer.body] == 1 or isinstance(answer.body, Will), "believed twice"


def test_only_what_was_signed_is_believed_and_once() -> None:
    total: Counter[Reason | None] = Counter()

    @settings(max_examples=ROUNDS)
    @given(seed=st.integers(0, 2**64))
    def play(seed: int) -> None:
        chance, guard, believed = random.Random(seed), TelemetryGuard(), Counter[tuple[str, Body]]()
        for _ in range(MESSAGES):
            place, payload = mutated(chance)
            answer = guard.accept(place, payload, chance.random() < 0.2, NOW + chance.uniform(-10, 30))
            check(answer, believed)
            total[answer.reason if isinstance(answer, RejectedMessage) else None] += 1
        assert sum(guard.rejected.values()) + sum(believed.values()) == MESSAGES
        assert len(guard) <= 2

    play()
    assert sum(total.values()) >= 10_000
    met = {Reason.MALFORMED, Reason.FORGED, Reason.REPLAYED, Reason.REPEATED, Reason.FOREIGN_WILL, Reason.UNBORN}
    assert all(total[reason] > 50 for reason in met), total
    assert total[None] > 200, "some of it was true"


@settings(max_examples=100)
@given(place=st.text(max_size=200), payload=st.binary(max_size=300), now=st.floats(allow_nan=False))
@example("canopy/v1/" + "a" * 64 + "/x/status", b"{}", NOW)
def test_noise_is_refused(place: str, payload: bytes, now: float) -> None:
    assert isinstance(TelemetryGuard().accept(place, payload, False, now), RejectedMessage)


@settings(max_examples=200)
@given(now=st.floats(allow_nan=False), retained=st.booleans(), which=st.integers(0, 2 * len(BODIES) - 1))
def test_no_time_confuses_the_guard(now: float, retained: bool, which: int) -> None:
    (place, payload), (_, body) = list(said().items())[which]
    answer = TelemetryGuard().accept(place, payload, retained, now)
    assert isinstance(answer, RejectedMessage) or abs(now - body.stamp.at) <= 180
