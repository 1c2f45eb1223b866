"""A clock that jumps by weeks and comes back leaves the guard as it was: who is honest is heard, replays are not."""

from __future__ import annotations

import pytest

from swarm.status.guard import BURST_MESSAGES, FORGET_AFTER_S, AcceptedMessage, Reason, TelemetryGuard
from swarm.status.messages import Body, part_of, seal_body, topic_of
from tests.telemetry_messages import FINGERPRINT, FIRST_NONCE, NOW, SECOND_NONCE, identity, metrics, status

JUMP_S = 40 * 86_400.0
THIRD_NONCE = "2" * 32


def accept(guard: TelemetryGuard, body: Body, now: float, number: int = 0) -> Reason | None:
    """Why the guard rejects a message of the peer with this number; None where it does not."""
    topic = topic_of("canopy", FINGERPRINT, identity(number).peer_id, part_of(body))
    verdict = guard.accept(topic, seal_body(body, topic, identity(number)), False, now)
    return None if isinstance(verdict, AcceptedMessage) else verdict.reason


@pytest.mark.parametrize("jump_s", [JUMP_S, -JUMP_S])
def test_who_is_heard_while_the_clock_is_wrong_is_heard_when_it_is_right_again(jump_s: float) -> None:
    guard, wrong = TelemetryGuard(), NOW + jump_s
    assert accept(guard, status(NOW, 1, FIRST_NONCE), NOW) is None
    assert accept(guard, status(wrong, 1, SECOND_NONCE), wrong) is None
    for number in range(2, 2 * int(BURST_MESSAGES)):  # the node's clock and this one are right again
        at = NOW + 5.0 * number
        body = status(at, 1, THIRD_NONCE) if number == 2 else metrics(at, number, THIRD_NONCE)
        assert accept(guard, body, at) is None
    assert accept(guard, status(NOW, 1, FIRST_NONCE), at) in (Reason.REPLAYED, Reason.SKEWED)


def test_a_guard_that_is_full_makes_room_after_its_clock_was_wrong() -> None:
    guard = TelemetryGuard(max_peers=1)
    assert accept(guard, status(NOW + JUMP_S), NOW + JUMP_S) is None
    assert accept(guard, status(NOW + JUMP_S), NOW + JUMP_S, 1) is Reason.CROWDED
    later = NOW + FORGET_AFTER_S
    assert accept(guard, status(later), later, 1) is None
