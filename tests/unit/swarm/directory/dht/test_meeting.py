"""Which swarm is joined, by what the peers say and by whose word counts most; two are never joined at once."""

from __future__ import annotations

import pytest

from swarm.base.ids import SwarmId
from swarm.directory.dht.addresses import ListenAddresses
from swarm.directory.dht.meeting import Meeting, OtherSwarm, meet

A, B = SwarmId(bytes(16)), SwarmId(bytes([1] * 16))
TYPED, AROUND, REMEMBERED = (0, "from --join"), (1, "from CANOPY_JOIN"), (2, "remembered since 2026-11-28")


def met(
    meant: SwarmId | None, *peers: tuple[str, tuple[int, str], SwarmId | str | None], is_certain: bool = False
) -> Meeting:
    """The decision about peers, given with where each is from and what it says; a text says that it is silent."""
    join, sources = tuple(name for name, _, _ in peers), tuple(source for _, source, _ in peers)
    said = {name: swarm for name, _, swarm in peers if not isinstance(swarm, str)}
    return meet(ListenAddresses(join, (), None, client=True, sources=sources), meant, said, is_certain=is_certain)


def test_who_begins_one_is_asked_nothing() -> None:
    assert met(A).swarm == A


def test_the_id_is_learned_from_the_peer_that_was_typed() -> None:
    found = met(None, ("one", TYPED, A), ("two", TYPED, "silent"))
    assert (found.swarm, found.listen.join, found.others) == (A, ("one", "two"), ())


def test_what_was_typed_counts_more_than_what_is_remembered() -> None:
    found = met(B, ("one", TYPED, A), ("two", REMEMBERED, B), ("three", REMEMBERED, "silent"))
    assert (found.swarm, found.listen.join, found.others) == (A, ("one",), ((B, "two"),))


def test_remembered_peers_stand_in_for_one_that_is_gone() -> None:
    found = met(A, ("one", TYPED, "silent"), ("two", REMEMBERED, A), ("three", REMEMBERED, None))
    assert (found.swarm, found.listen.join) == (A, ("one", "two", "three"))


def test_without_an_id_the_peers_of_a_list_decide_and_no_others() -> None:
    """Release 0.2 says none: such a swarm still works, and is not mixed with another that is remembered."""
    assert met(None, ("one", TYPED, None), ("two", TYPED, "silent")).swarm is None
    found = met(None, ("one", AROUND, None), ("two", REMEMBERED, A), ("three", REMEMBERED, None))
    assert (found.swarm, found.listen.join, found.others) == (None, ("one",), ((A, "two"),))
    found = met(None, ("one", AROUND, "silent"), ("two", REMEMBERED, A))
    assert (found.swarm, found.listen.join) == (A, ("two",))


def test_an_old_memory_of_two_swarms_is_taken_apart() -> None:
    found = met(None, ("one", REMEMBERED, A), ("two", REMEMBERED, B), ("three", REMEMBERED, A))
    assert (found.swarm, found.listen.join, found.others) == (A, ("one", "three"), ((B, "two"),))


@pytest.mark.parametrize(
    ("meant", "is_certain", "peers", "says"),
    [
        (None, False, [("one", TYPED, A), ("two", TYPED, B)], "two .from --join. is of swarm 01010101, and swarm 0000"),
        (A, True, [("one", TYPED, B)], "one .from --join. is of swarm 01010101, and swarm 00000000 is to be joined"),
        (A, True, [("one", TYPED, A), ("two", TYPED, B)], "two .from --join. is of swarm 01010101"),
        (A, False, [("one", REMEMBERED, B)], "one .remembered since 2026-11-28. is of swarm 01010101"),
        (None, False, [("one", TYPED, "silent"), ("two", AROUND, B)], "no peer answers at one"),
    ],
)
def test_another_swarm_is_refused_with_a_line_that_names_both(
    meant: SwarmId | None, is_certain: bool, peers: list[tuple[str, tuple[int, str], SwarmId | str]], says: str
) -> None:
    with pytest.raises(OtherSwarm, match=says):
        met(meant, *peers, is_certain=is_certain)


def test_where_nobody_answers_nothing_is_left_out() -> None:
    found = met(None, ("one", REMEMBERED, "silent"), ("two", REMEMBERED, "silent"))
    assert (found.swarm, found.listen.join) == (None, ("one", "two"))
