"""Who is asked again for a session, and until when."""

from __future__ import annotations

import pytest

from client.chain.blame import (
    ATTEMPTS,
    BUSY_S,
    JITTER,
    MAX_ASKED_S,
    MAX_RETRY_S,
    MAX_TRIES,
    QUEUED_S,
    RETRY_S,
    TRIES_S,
    Refusals,
)
from swarm.base.errors import Busy, ContextFull, HopRefused, HopTimeout, Unreachable


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


def test_who_has_no_room_is_asked_again_for_a_few_seconds_only(clock: Clock) -> None:
    refusals = Refusals(60, clock)
    refusals.add(Busy("a", "0-4", "full"))
    assert refusals.avoided() == (frozenset("a"),)
    clock.now += RETRY_S
    assert refusals.avoided() == (frozenset("a"), frozenset())
    assert refusals.may_wait
    clock.now += BUSY_S
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


def accused(peer: str, by: str) -> Unreachable:
    return Unreachable(peer, "4-8", "gone").on_link(by)


def test_strangers_without_number_that_are_full_are_gone_around_one_by_one(clock: Clock) -> None:
    refusals = Refusals(60, clock)
    for number in range(100):
        assert refusals.add(Busy(f"stranger {number}", "0-4", "full"))
        clock.now += 0.1
    assert len(refusals.avoided()[0]) == 100
    clock.now += 60
    assert not refusals.add(Busy("one more", "0-4", "full")), "no longer than the user waits"


def test_strangers_are_not_tried_for_ever_by_who_does_not_wait(clock: Clock) -> None:
    refusals = Refusals(0, clock)
    assert refusals.add(Busy("a", "0-4", "full"))
    clock.now += TRIES_S + 1
    assert not refusals.add(Busy("b", "0-4", "full"))
    quick = Refusals(0, clock)
    assert [quick.add(Busy(f"{number}", "0-4", "full")) for number in range(MAX_TRIES)].index(False) == MAX_TRIES - 1


def test_who_is_gone_again_and_again_is_asked_more_and_more_rarely(clock: Clock) -> None:
    refusals = Refusals(60, clock)
    for pause_s in (RETRY_S, 2 * RETRY_S, MAX_RETRY_S, MAX_RETRY_S):
        refusals.add(Unreachable("a", "0-4", "gone"))
        clock.now += pause_s - 0.01
        assert frozenset() not in refusals.avoided()
        clock.now += 0.01
        assert frozenset() in refusals.avoided()


def test_who_accuses_is_gone_around_where_the_accused_cannot_be_replaced(clock: Clock) -> None:
    refusals = Refusals(60, clock)
    assert refusals.add(accused("b", by="s"))
    assert refusals.avoided()[:2] == (frozenset("b"), frozenset("s"))
    assert refusals.add(accused("c", by="s"))
    assert refusals.avoided() == (frozenset("bcs"), frozenset("s"), frozenset("bc"))


def test_what_one_machine_says_of_the_session_is_its_own_word(clock: Clock) -> None:
    refusals, full = Refusals(60, clock), ContextFull("no room")
    assert refusals.add(HopRefused("a", "0-4", full), "ab")
    assert refusals.avoided() == (frozenset("a"),)
    assert not refusals.may_wait, "it will say the same"
    error = HopRefused("c", "0-4", full)
    assert refusals.add(error, "cb"), "b may be who makes them say so"
    assert refusals.avoided() == (frozenset("abc"), frozenset("ac"))
    for peer in "defghi":
        assert refusals.add(HopRefused(peer, "0-4", full), peer), "a stranger may stand behind several"
    assert not refusals.add(HopRefused("j", "0-4", full), "jk"), "nobody of these was in another route"
    assert refusals.final(error) is full


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_who_keeps_a_place_is_asked_when_it_said_give_or_take_a_quarter(clock: Clock, chance: float) -> None:
    refusals = Refusals(60, clock, lambda low, high: low + chance * (high - low))
    refusals.add(Busy("a", "0-4", "full").asking_again(2.0, 3, 9.0))
    due_s = 2.0 * (1 - JITTER + chance * 2 * JITTER)
    clock.now += due_s - 0.01
    assert refusals.avoided() == (frozenset("a"),)
    clock.now += 0.02
    assert refusals.avoided() == (frozenset("a"), frozenset())
    clock.now += QUEUED_S - due_s - 0.1
    assert refusals.may_wait
    clock.now += 0.2
    assert not refusals.may_wait


def test_a_machine_cannot_ask_to_be_left_alone_for_long(clock: Clock) -> None:
    refusals = Refusals(60, clock, lambda low, high: high)
    refusals.add(Busy("a", "0-4", "full").asking_again(3_600.0, 1, 3_600.0))
    clock.now += MAX_ASKED_S * (1 + JITTER)
    assert refusals.avoided() == (frozenset("a"), frozenset())


def test_the_user_hears_of_each_other_place_once(clock: Clock) -> None:
    refusals = Refusals(60, clock)
    said = []
    for position in (3, 3, 2):
        refusals.add(Busy("a", "0-4", "full").asking_again(0.5, position, 4.0 * position))
        said.append(refusals.news())
    assert [news and news.partition(":")[0] for news in said] == [
        "number 3 of those that wait for room, about 12 s",
        None,
        "number 2 of those that wait for room, about 8 s",
    ]
