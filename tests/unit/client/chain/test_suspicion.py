"""Whom trouble counts against, and whose word ends a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.chain.blame import (
    MAX_MARKS,
    MAX_RELAYS,
    SUSPECT_S,
    VERDICT_S,
    Suspicion,
    Verdicts,
    plain_error,
)
from swarm.base.errors import ContextFull, HopClosed, HopMisbehaved, HopRefused, ModelMismatch, Unreachable


def accused(peer: str, by: str) -> Unreachable:
    return Unreachable(peer, "4-8", "gone").on_link(by)


def test_what_another_says_counts_half() -> None:
    suspicion = Suspicion()
    suspicion.add(accused("B", "S"), 0.0)
    suspicion.add(Unreachable("C", "8-12", "gone"), 0.0)
    assert suspicion.avoided(1.0) == {"B", "C"}
    assert suspicion.in_turn(1.0) == (frozenset("BC"), frozenset("SC"))
    assert suspicion.avoided(SUSPECT_S / 2) == {"C"}
    assert suspicion.avoided(SUSPECT_S) == frozenset()


def test_a_relay_behind_which_a_machine_was_lost_is_gone_around_for_a_while() -> None:
    suspicion = Suspicion()
    suspicion.add(Unreachable("B", "4-8", "gone"), 0.0, "198.51.100.1:7")
    suspicion.add(HopMisbehaved("C", "8-12", "lies"), 0.0, "198.51.100.2:7")
    assert suspicion.relays(SUSPECT_S - 1) == {"198.51.100.1:7"}, "who misbehaves does so behind any relay"
    assert suspicion.relays(SUSPECT_S) == frozenset()
    for number in range(3 * MAX_RELAYS):
        suspicion.add(Unreachable("B", "4-8", "gone"), 1.0, f"198.51.100.1:{number + 1}")
    assert len(suspicion.relays(1.0)) == MAX_RELAYS


def test_two_accusers_are_as_good_as_having_seen_it() -> None:
    suspicion = Suspicion()
    suspicion.add(accused("B", "S"), 0.0)
    suspicion.add(accused("B", "T"), 0.0)
    assert suspicion.in_turn(1.0) == (frozenset("B"),)
    assert suspicion.avoided(SUSPECT_S - 1) == {"B"}


def test_who_accuses_one_after_another_is_what_they_have_in_common() -> None:
    suspicion = Suspicion()
    suspicion.add(accused("B", "S"), 0.0)
    suspicion.add(accused("B", "S"), 1.0)
    assert "S" not in suspicion.avoided(2.0), "twice the same is one machine"
    suspicion.add(accused("C", "S"), 2.0)
    assert suspicion.avoided(3.0) == {"B", "C", "S"}
    assert suspicion.offenders(3.0) == {"S"}
    assert suspicion.in_turn(3.0) == (frozenset("BCS"), frozenset("S"), frozenset("BC")), "S may be innocent yet"
    assert suspicion.avoided(2.0 + SUSPECT_S / 2) == {"S"}
    suspicion.add(accused("D", "S"), 3.0)
    assert suspicion.avoided(3.0 + 2 * SUSPECT_S - 1) == {"S"}, "longer each time"
    assert suspicion.avoided(3.0 + 2 * SUSPECT_S) == frozenset()


def test_who_breaks_the_protocol_is_avoided_longer_each_time() -> None:
    suspicion = Suspicion()
    for times, seconds in ((1, SUSPECT_S), (2, 2 * SUSPECT_S), (3, 4 * SUSPECT_S)):
        suspicion.add(HopMisbehaved("T", "8-12", "swallows"), 0.0)
        assert suspicion.avoided(seconds - 1) == {"T"}, times
        assert suspicion.avoided(seconds) == frozenset(), times
    suspicion.add(HopClosed("U", "8-12", "died"), 0.0)
    suspicion.add(HopClosed("U", "8-12", "died"), 0.0)
    assert "U" not in suspicion.avoided(SUSPECT_S), "to die is no misdeed"


@given(st.lists(st.tuples(st.sampled_from("ABC"), st.sampled_from("STU"), st.floats(0, 20)), max_size=40))
def test_no_honest_machine_is_talked_out_of_the_swarm(said: list[tuple[str, str, float]]) -> None:
    """Whatever strangers say, those whom one alone accuses have a route, without that one; and all is forgotten."""
    suspicion = Suspicion()
    for peer, stranger, at_s in sorted(said, key=lambda one: one[2]):
        suspicion.add(accused(peer, stranger), at_s)
    assert not suspicion.seen()
    assert suspicion.offenders(20.0) <= {"S", "T", "U"}
    for peer in suspicion.avoided(20.0) - {"S", "T", "U"}:
        others = {stranger for one, stranger, _ in said if one == peer}
        assert len(others) > 1 or any(peer not in turn and others <= turn for turn in suspicion.in_turn(20.0))
    assert suspicion.avoided(20.0 + SUSPECT_S) <= {"S", "T", "U"}


def test_what_is_held_against_machines_is_bounded() -> None:
    suspicion = Suspicion()
    for number in range(3 * MAX_MARKS):
        suspicion.add(accused(f"B{number}", f"S{number}"), float(number))
    assert len(suspicion._marks) <= MAX_MARKS


FULL = ContextFull("no room")


def refuses(peer: str) -> HopRefused:
    return HopRefused(peer, "0-4", FULL)


def test_two_routes_that_share_nothing_are_believed() -> None:
    verdicts = Verdicts()
    assert not verdicts.add(refuses("A"), "AB", 0.0)
    assert not verdicts.add(refuses("C"), "CB", 1.0), "B was in both"
    assert not verdicts.add(HopRefused("E", "0-4", ModelMismatch("other")), "EF", 1.0), "it says something else"
    assert verdicts.heard_over(2.0) == set("ABCEF")
    assert verdicts.add(refuses("D"), "DE", 2.0)
    assert not verdicts.add(HopRefused("G", "0-4", ModelMismatch("other")), "G", 2.0), "its own record says otherwise"


def test_many_routes_that_share_nothing_are_believed_where_many_are_asked_for() -> None:
    verdicts = Verdicts(3)
    for peer in "ABAB":
        assert not verdicts.add(refuses(peer), peer, 0.0), "the same two again"
    assert not verdicts.add(refuses("C"), "BC", 1.0)
    assert verdicts.add(refuses("D"), "D", 1.0)


def test_what_was_said_long_ago_is_forgotten() -> None:
    verdicts = Verdicts()
    verdicts.add(refuses("A"), "AB", 0.0)
    assert not verdicts.add(refuses("C"), "CD", VERDICT_S)
    assert verdicts.heard_over(VERDICT_S) == frozenset()


@pytest.mark.parametrize("error", [FULL, ModelMismatch("other")])
def test_a_user_hears_the_machines_own_words(error: ContextFull) -> None:
    assert plain_error(HopRefused("A", "0-4", error)) is error
    assert plain_error(error) is error
