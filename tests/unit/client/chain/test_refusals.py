"""Who is asked again for a session, and until when."""

from __future__ import annotations

import pytest

from client.chain.refusals import ATTEMPTS, RETRY_S, Refusals
from swarm.errors import Busy, HopTimeout, Unreachable


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_before_anybody_refuses_nobody_is_avoided(clock: Clock) -> None:
    refusals = Refusals(60, clock)
    assert refusals.avoided() == (frozenset(),)
    assert refusals.last is None
    assert not refusals.may_wait


def test_who_is_gone_is_gone_around_and_may_be_back_after_a_while(clock: Clock) -> None:
    refusals = Refusals(60, clock)
    assert refusals.add(Unreachable("a", "0-4", "gone"))
    assert refusals.avoided() == (frozenset("a"),)
    clock.now += RETRY_S
    assert refusals.avoided() == (frozenset("a"), frozenset())


def test_who_was_only_slow_is_asked_again_at_once(clock: Clock) -> None:
    refusals = Refusals(60, clock)
    refusals.add(HopTimeout("a", "0-4", "slow"))
    assert refusals.avoided() == (frozenset("a"), frozenset())


def test_who_has_no_room_is_not_asked_again_and_not_waited_for(clock: Clock) -> None:
    refusals = Refusals(60, clock)
    refusals.add(Busy("a", "0-4", "full"))
    clock.now += 10
    assert refusals.avoided() == (frozenset("a"),)
    assert not refusals.may_wait
    refusals.add(Unreachable("b", "4-8", "gone"))
    clock.now += RETRY_S
    assert refusals.avoided() == (frozenset("ab"), frozenset("a"))
    assert refusals.may_wait


@pytest.mark.parametrize(("wait_s", "tries"), [(0, ATTEMPTS - 1), (60, 20)])
def test_attempts_go_on_for_as_long_as_the_user_waits(wait_s: float, tries: int, clock: Clock) -> None:
    refusals = Refusals(wait_s, clock)
    for _ in range(tries):
        assert refusals.add(Unreachable("a", "0-4", "gone"))
        clock.now += 1
    clock.now += wait_s
    assert not refusals.add(Unreachable("a", "0-4", "gone"))
    assert str(refusals.last).endswith("gone")
