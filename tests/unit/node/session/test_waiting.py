"""Who waits for room at a full node, and who comes first. Time is counted here."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from node.session.admission import OwnerStanding, standing_of
from node.session.waiting import (
    CLAIM_S,
    LEAST_RETRY_S,
    MAX_WAITING,
    MOST_RETRY_S,
    SILENT_S,
    WAIT_S,
    Turn,
    WaitingList,
    WaitingPlace,
)

NOBODY: Mapping[str, int] = {}


class Waiters:
    """A waiting list on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.list = WaitingList(standing_of, lambda: self.now_s)

    def ask(self, owner: str, number: int = 0, sessions: Mapping[str, int] = NOBODY) -> Turn | None:
        self.now_s += 0.001
        return self.list.join(WaitingPlace(owner, bytes([number])), 10, sessions)

    def position(self, owner: str, number: int = 0, sessions: Mapping[str, int] = NOBODY) -> int:
        turn = self.ask(owner, number, sessions)
        assert turn is not None
        return turn.position


def test_who_came_first_stands_first_and_keeps_its_place_while_it_asks() -> None:
    waiters = Waiters()
    assert [waiters.position(owner) for owner in ("1.0.0.1", "2.0.0.1", "3.0.0.1")] == [1, 2, 3]
    assert [waiters.position(owner) for owner in ("3.0.0.1", "1.0.0.1", "2.0.0.1")] == [3, 1, 2]
    waiters.list.leave(WaitingPlace("1.0.0.1", b"\0"))
    assert waiters.position("3.0.0.1") == 2


def test_an_owners_second_place_comes_after_every_others_first() -> None:
    waiters = Waiters()
    for number in range(5):
        waiters.ask("1.0.0.1", number)
    assert waiters.position("2.0.0.1") == 2
    assert waiters.position("3.0.0.1", sessions={"3.0.0.1": 9}) == 7, "sessions that it has count too"


def test_many_names_of_one_network_gain_nothing() -> None:
    waiters = Waiters()
    for number in range(40):
        waiters.ask(f"9.9.9.{number}")
    assert waiters.position("2.0.0.1") == 2
    assert waiters.position("3.0.0.1", sessions={f"3.0.0.{n}": 1 for n in range(2, 10)}) > 2


def test_those_who_stand_before_have_the_first_claim_to_room() -> None:
    waiters = Waiters()
    waiters.ask("1.0.0.1")
    waiters.ask("2.0.0.1")
    assert waiters.list.ahead_of(WaitingPlace("2.0.0.1", b"\0"), NOBODY) == [10]
    assert waiters.list.ahead_of(WaitingPlace("3.0.0.1", b"\0"), NOBODY) == [10, 10], "whoever comes new, too"
    assert waiters.list.ahead_of(WaitingPlace("1.0.0.1", b"\0"), NOBODY) == []


def test_room_is_kept_for_a_moment_alone() -> None:
    waiters = Waiters()
    waiters.list.ended(7)
    assert (waiters.list.kept([10, 10]), waiters.list.kept([5]), waiters.list.kept([])) == (7, 5, 0)
    waiters.now_s += CLAIM_S / 2
    waiters.list.ended(4)
    assert waiters.list.kept([10, 10]) == 11
    waiters.now_s += CLAIM_S / 2 + 0.01
    assert waiters.list.kept([10, 10]) == 4


@pytest.mark.parametrize(("step_s", "steps"), [(SILENT_S + 0.1, 1), (SILENT_S - 1, int(WAIT_S / (SILENT_S - 1)) + 1)])
def test_a_place_is_lost_by_silence_and_by_time(step_s: float, steps: int) -> None:
    waiters = Waiters()
    waiters.ask("1.0.0.1")
    for step in range(steps):
        waiters.now_s += step_s
        if step + 1 < steps:
            waiters.ask("1.0.0.1")
    waiters.ask("2.0.0.1")
    assert waiters.list.ahead_of(WaitingPlace("2.0.0.1", b"\0"), NOBODY) == []


def test_places_are_bounded_and_who_has_most_loses_one() -> None:
    waiters = Waiters()
    for number in range(MAX_WAITING):
        assert waiters.ask("1.0.0.1", number) is not None
    assert waiters.ask("1.0.0.1", MAX_WAITING) is None
    assert waiters.position("2.0.0.1") == 2
    assert len(waiters.list) == MAX_WAITING


def test_the_expected_time_follows_how_often_sessions_end() -> None:
    waiters = Waiters()
    for _ in range(60):
        waiters.now_s += 0.5
        waiters.list.ended(1)
    turns = [waiters.ask(f"{owner}.0.0.1") for owner in range(1, 31)]
    assert all(turn is not None for turn in turns)
    expected = [turn.expected_s for turn in turns if turn is not None]
    assert expected[:3] == pytest.approx([0.5, 1.0, 1.5], rel=0.02)
    asked = [turn.retry_after_s for turn in turns if turn is not None]
    assert (asked[0], asked[-1]) == (LEAST_RETRY_S, MOST_RETRY_S)
    assert asked == sorted(asked)


def test_whom_the_operator_prefers_stands_before_strangers_who_came_earlier() -> None:
    now = [0.0]
    waiting = WaitingList(lambda owner: OwnerStanding(shares=8 if owner == "own" else 1), lambda: now[0])
    places = [WaitingPlace("stranger", b"a"), WaitingPlace("own", b"a"), WaitingPlace("own", b"b")]
    for place in places:
        now[0] += 1.0
        waiting.join(place, 1, {"stranger": 1, "own": 1})
    assert waiting.ahead_of(places[0], {"stranger": 1, "own": 1}) == [1, 1]
