"""Turns of owners and of their sessions, whatever comes and goes."""

from __future__ import annotations

from dataclasses import dataclass

from node.engine.scheduler import MAX_IDLE_OWNERS, Turns


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


def test_what_an_owner_used_outlives_its_sessions_and_is_forgotten_in_the_end() -> None:
    turns: Turns[Owed] = Turns(10.0)
    for number in range(MAX_IDLE_OWNERS + 100):
        joined, lead = Owed(f"joined {number}"), Owed("lead")
        turns.submit(lead)
        turns.submit(joined)
        session = turns.begin()
        turns.charge(session, 1.0, is_lead=True)
        turns.charge(joined, 100.0, is_lead=False)
        turns.end(session, has_work=False)
        while turns:
            turns.end(turns.begin(), has_work=False)
    assert len(turns._owners) <= MAX_IDLE_OWNERS + 1
    assert not turns._queues


BUSY, TURN_MS, SMALL_MS = "busy", 10.0, 1.0


def serve(turns: Turns[Owed]) -> str:
    """One turn; whose it was. Who is busy uses all of it and has more to do, others use a part and have not."""
    session = turns.begin()
    is_busy = session.owner.startswith(BUSY)
    turns.charge(session, TURN_MS if is_busy else SMALL_MS, is_lead=True)
    turns.end(session, has_work=is_busy)
    return session.owner


def always_busy(count: int) -> Turns[Owed]:
    """Owners of whom each has had a turn, and has more to do."""
    turns: Turns[Owed] = Turns(TURN_MS)
    for number in range(count):
        turns.submit(Owed(f"{BUSY} {number}"))
    for _ in range(count):
        serve(turns)
    return turns


def test_who_waits_for_its_answers_does_not_wait_for_all_who_never_stop() -> None:
    turns, session = always_busy(8), Owed("a")
    for _ in range(8 * int(TURN_MS / SMALL_MS)):  # while it uses less than they do
        turns.submit(session)
        assert serve(turns) == "a"
        assert serve(turns).startswith(BUSY)


def test_who_comes_back_at_once_has_no_more_time_than_those_that_never_stop() -> None:
    turns, session, used = always_busy(3), Owed("a"), dict[str, float]()
    for _ in range(2_000):
        turns.submit(session)
        owner = serve(turns)
        used[owner] = used.get(owner, 0.0) + (TURN_MS if owner.startswith(BUSY) else SMALL_MS)
    assert len(used) == 4
    assert max(used.values()) - min(used.values()) <= 2 * TURN_MS


def test_nobody_saves_time_while_it_is_idle() -> None:
    turns, idle = always_busy(2), Owed("busy late")
    turns.submit(idle)
    assert turns.begin() is idle
    turns.end(idle, has_work=False)
    for _ in range(100):
        serve(turns)
    turns.submit(idle)
    served = [serve(turns) for _ in range(9)]
    assert served.count("busy late") <= 4


def test_what_an_owner_used_in_turns_of_others_keeps_it_waiting_for_a_quantum_at_most() -> None:
    turns, joined = always_busy(1), Owed("busy joined")
    turns.submit(joined)
    for _ in range(100):
        session = turns.begin()
        turns.charge(session, 1.0, is_lead=True)
        if session is not joined:
            turns.charge(joined, 9.0, is_lead=False)
        turns.end(session, has_work=True)
    while (session := turns.begin()) is joined:
        turns.charge(session, TURN_MS, is_lead=True)
        turns.end(session, has_work=True)
    turns.end(session, has_work=False)  # the other one stops
    turns.submit(Owed("busy late"))
    assert "busy joined" in [serve(turns) for _ in range(6)]
