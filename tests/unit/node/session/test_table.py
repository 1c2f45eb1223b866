"""Whose session gives way where a node is full."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.session.admission import CARRIED, PREFERRED, OwnerStanding, standing_of, weight_of
from node.session.table import IDLE_S, REST_S, UNUSED_S, Reservation, Room, as_idle_s, making_room, victims

ROOM = Room(tokens=1_000, sessions=8)
ACTIVE, IDLE = 0.0, IDLE_S + 1


def give_way(held: list[tuple[str, int, float]], asked: tuple[str, int]) -> list[int] | None:
    """The places of those that go; `held` has (key, tokens, seconds idle)."""
    reservations = {place: Reservation(key, tokens) for place, (key, tokens, _) in enumerate(held)}
    return victims(reservations, Reservation(*asked), ROOM, lambda place: held[place][2], lambda key: OwnerStanding())


def test_nobody_goes_while_there_is_room() -> None:
    assert give_way([("a", 900, IDLE)], ("b", 100)) == []


def test_an_otherwise_empty_node_is_used_whole_until_others_come() -> None:
    held = [("a", 250, ACTIVE)] * 4
    assert give_way(held, ("a", 1)) is None, "its own active sessions do not give way to it"
    assert give_way(held, ("b", 250)) == [0]


def test_of_who_has_most_the_one_idle_for_the_longest_goes() -> None:
    held = [("a", 300, IDLE), ("a", 300, IDLE + 5), ("b", 200, IDLE + 9), ("c", 200, ACTIVE)]
    assert give_way(held, ("d", 100)) == [1]
    assert give_way(held, ("d", 290)) == [1]
    assert give_way(held, ("a", 100)) == [1], "also where it is the one that asks"


def test_what_was_never_used_goes_before_what_is() -> None:
    assert as_idle_s(UNUSED_S, is_unused=True) >= IDLE_S > as_idle_s(UNUSED_S, is_unused=False)
    forty = [(f"{number}", 25, as_idle_s(UNUSED_S, is_unused=True)) for number in range(40)]
    assert len(give_way([*forty], ("d", 25)) or ()) == 33, "and sessions are bounded too"


def test_whoever_uses_a_quarter_or_less_keeps_it() -> None:
    held = [(key, 250, ACTIVE) for key in "abcd"]
    assert give_way(held, ("e", 10)) is None
    assert give_way([(key, 250, IDLE) for key in "abcd"], ("e", 10)) is not None


def test_nobody_takes_from_who_has_less() -> None:
    held = [("a", 400, ACTIVE), ("b", 400, ACTIVE), ("c", 200, IDLE)]
    assert give_way(held, ("d", 700)) is None
    assert give_way(held, ("d", 10)) == [2], "who is idle goes first"


def test_sessions_are_bounded_like_tokens() -> None:
    held = [("a", 1, ACTIVE)] * 7 + [("b", 1, ACTIVE)]
    assert give_way(held, ("c", 1)) == [0]
    one_each = [(key, 1, ACTIVE) for key in "abcdefgh"]
    assert give_way(one_each, ("i", 1)) is None
    assert give_way([*one_each[:7], ("h", 1, IDLE)], ("h", 1)) == [7]


def test_of_sessions_in_use_the_one_that_did_least_lately_goes() -> None:
    held = [("a", 300, ACTIVE), ("a", 300, IDLE / 2), ("a", 300, IDLE / 3), ("b", 100, IDLE / 2)]
    assert give_way(held, ("c", 100)) == [1]


def test_a_machine_that_carries_others_sessions_may_have_more() -> None:
    held = {place: Reservation(CARRIED + "8.8.8.8", 90) for place in range(10)} | {10: Reservation("9.9.9.9", 100)}
    assert victims(held, Reservation("9.9.9.9", 50), Room(1_000, 99), lambda _: ACTIVE, standing_of) is None


@pytest.mark.parametrize("key", ["127.0.0.1", "10.1.2.3", "fd00::/64", "::/64", "unknown", CARRIED + "9.9.9.9"])
def test_near_addresses_and_carriers_weigh_more(key: str) -> None:
    assert weight_of(key) == 16


@pytest.mark.parametrize("key", ["9.9.9.9", "2a00:1450::/64"])
def test_others_weigh_one(key: str) -> None:
    assert weight_of(key) == 1


HELD = st.lists(
    st.tuples(st.sampled_from("abcde"), st.integers(1, 300), st.sampled_from([ACTIVE, 10.0, IDLE, 2 * IDLE])),
    max_size=8,
)


@settings(max_examples=300, deadline=None)
@given(HELD, st.tuples(st.sampled_from("abcdef"), st.integers(1, 1_000)))
def test_what_goes_makes_room_and_never_hurts_who_has_no_more_than_is_asked(
    held: list[tuple[str, int, float]], asked: tuple[str, int]
) -> None:
    while sum(tokens for _, tokens, _ in held) > ROOM.tokens:
        held = held[1:]
    gone = give_way(held, asked)
    if gone is None:
        return
    left = [one for place, one in enumerate(held) if place not in gone]
    assert sum(tokens for _, tokens, _ in left) + asked[1] <= ROOM.tokens
    assert len(left) < ROOM.sessions
    amounts = Counter[str]()
    for key, tokens, _ in held:
        amounts[key] += tokens
    for place in gone:
        key, _, idle_s = held[place]
        assert idle_s >= IDLE_S or key != asked[0], "nobody drives out its own"
        assert idle_s >= IDLE_S or sum(1 for one in held if one[0] == key) > 1 or amounts[key] > ROOM.tokens / 4


def rooms_of(held: list[tuple[str, int, float]], grown: int) -> list[int]:
    """The places of those that make room for one that grew; `held` has (key, tokens, seconds at rest)."""
    reservations = {place: Reservation(key, tokens) for place, (key, tokens, _) in enumerate(held)}
    return making_room(reservations, grown, 1_000, lambda place: held[place][2], lambda key: OwnerStanding())


def test_what_grows_takes_room_of_those_that_rest_and_hold_as_much() -> None:
    assert rooms_of([("a", 500, 0.0), ("b", 500, REST_S)], 0) == []
    assert rooms_of([("a", 501, 0.0), ("a", 300, REST_S), ("a", 200, 2 * REST_S)], 0) == [2]
    assert rooms_of([("a", 400, 0.0), ("b", 650, REST_S)], 0) == [1], "who holds more makes room"
    assert rooms_of([("a", 650, 0.0), ("b", 400, REST_S)], 0) == [], (
        "who holds less does not; there may be an eighth more"
    )
    assert rooms_of([("a", 650, 0.0), ("b", 400, IDLE_S)], 0) == [1], "but for who rests for long"
    assert rooms_of([("a", 500, 0.0), ("b", 520, REST_S / 2)], 0) == []


def test_a_text_that_runs_goes_only_where_all_take_far_too_much() -> None:
    greedy = [("greedy", 400, 0.0), ("greedy", 400, 0.0), ("b", 300, 0.0)]
    assert rooms_of(greedy, 0) == []
    assert rooms_of([*greedy, ("c", 100, 0.0)], 3) == [1], "the newest of who holds most, not who grew"
    assert rooms_of([*greedy, ("c", 100, 0.0)], 1) == [1]
    assert rooms_of([("a", 1_200, 0.0)], 0) == [0]


def test_many_addresses_of_one_network_hold_no_more_than_a_few_owners() -> None:
    crowd = [(f"93.184.216.{place}", 20, ACTIVE) for place in range(50)]
    reservations = {place: Reservation(key, tokens) for place, (key, tokens, _) in enumerate(crowd)}
    room = Room(1_000, 99)
    gone = victims(reservations, Reservation("8.8.8.8", 100), room, lambda _: ACTIVE, standing_of)
    assert gone is not None
    assert len(gone) == 5
    alone = victims(reservations, Reservation("93.184.216.99", 100), room, lambda _: ACTIVE, standing_of)
    assert alone is None, "one more of them takes from nobody"


def test_whom_the_operator_prefers_takes_room_from_strangers() -> None:
    held = {place: Reservation(f"{place + 20}.0.0.1", 250) for place in range(4)}
    assert victims(held, Reservation("9.9.9.9", 100), Room(1_000, 99), lambda _: ACTIVE, standing_of) is None
    own = Reservation(PREFERRED + "9.9.9.9", 100)
    assert victims(held, own, Room(1_000, 99), lambda _: ACTIVE, standing_of) is not None
