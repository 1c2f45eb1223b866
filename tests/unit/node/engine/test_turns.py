"""Turns of owners and of their sessions, whatever comes and goes."""

from __future__ import annotations

from dataclasses import dataclass

from node.engine.turns import MAX_DEBTORS, Turns


@dataclass(eq=False)
class Owed:
    """A session of an owner."""

    owner: str


def test_owners_alternate_and_sessions_of_one_too() -> None:
    turns: Turns[Owed] = Turns(10.0)
    sessions = [Owed(owner) for owner in "aaab"]
    for session in sessions:
        turns.submit(session)
        turns.submit(session)
    order = []
    for _ in range(8):
        session = turns.begin()
        assert turns.left_ms(session) == 10.0
        turns.charge(session, 10.0, is_lead=True)
        turns.end(session, has_work=True)
        order.append(sessions.index(session))
    assert order == [0, 3, 1, 3, 2, 3, 0, 3]


def test_who_joins_is_taken_from_all_owners_in_turn_and_no_crowd_of_another() -> None:
    turns: Turns[Owed] = Turns(10.0, lambda owner: 2 if owner == "b" else 1)
    sessions = [Owed(owner) for owner in "aaabbbccc"]
    for session in sessions:
        turns.submit(session)
    leader = turns.begin()
    assert leader is sessions[0]
    assert [sessions.index(session) for session in turns.joining(leader)] == [1, 3, 6, 2, 4]


def test_what_an_owner_owes_outlives_its_sessions_and_is_forgotten_in_the_end() -> None:
    turns: Turns[Owed] = Turns(10.0)
    for number in range(MAX_DEBTORS + 100):
        joined, lead = Owed(f"joined {number}"), Owed("lead")
        turns.submit(lead)
        turns.submit(joined)
        session = turns.begin()
        turns.charge(session, 1.0, is_lead=True)
        turns.charge(joined, 100.0, is_lead=False)
        turns.end(session, has_work=False)
        while turns:
            turns.end(turns.begin(), has_work=False)
    assert len(turns._owners_ms) <= MAX_DEBTORS + 1
    assert not turns._queues
