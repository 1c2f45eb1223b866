"""Which states are kept: bookkeeping against a plain account of it, and the laws of giving entries up."""

from __future__ import annotations

import random

import pytest

from swarm.base.ids import TreeNodeId
from swarm.compute.state_slots import (
    MAX_SNAPSHOTS,
    MIN_ENTRIES,
    POOL_BYTES,
    Place,
    StateSlots,
    state_entries,
)


def live(*nodes: int) -> list[Place]:
    return [Place(node=TreeNodeId(node)) for node in nodes]


def ids(*nodes: int) -> list[TreeNodeId]:
    return [TreeNodeId(node) for node in nodes]


def test_entries_follow_memory_and_nodes() -> None:
    assert state_entries(0, 64) == 0
    assert state_entries(1, 64) == MAX_SNAPSHOTS + 64
    assert state_entries(POOL_BYTES // 20, 64) == 20
    assert state_entries(POOL_BYTES, 64) == MIN_ENTRIES


def test_a_commit_turns_nodes_into_snapshots_and_frees_what_is_left_behind() -> None:
    slots = StateSlots(8)
    slots.reserve([], live(0, 1, 2, 3))
    slots.commit(10, ids(0, 2), ids(3))
    assert [*slots.snapshots] == [11, 12]
    assert [*slots.live] == ids(3)
    slots.check_integrity()


def test_the_longest_snapshot_is_never_given_up_and_gaps_stay_even() -> None:
    slots = StateSlots(8)
    for length in range(12):
        slots.reserve(live(length), [])
        slots.commit(length, ids(length), [])
        assert max(slots.snapshots) == length + 1
        slots.check_integrity()
    assert len(slots.snapshots) == slots.max_snapshots
    assert min(slots.snapshots) <= 6, "early ones stay, so that a text can go back"


def test_what_is_needed_pushes_out_the_oldest_node_and_never_the_longest_snapshot() -> None:
    slots = StateSlots(4)
    slots.reserve([], live(0, 1, 2, 3))
    slots.commit(0, ids(0), ids(1, 2, 3))
    assert [*slots.reserve(live(4), live(5, 6))] == live(4), "what is only wanted pushes nothing out"
    assert [*slots.live] == ids(2, 3, 4)
    assert [*slots.reserve(live(5, 6, 7, 8), [])] == live(5, 6, 7), "three are there beside the snapshot"
    assert ([*slots.live], [*slots.snapshots]) == (ids(5, 6, 7), [1])
    slots.check_integrity()


def test_a_failed_forward_leaves_nothing_that_it_wrote() -> None:
    slots = StateSlots(6)
    slots.reserve(live(0), [])
    slots.commit(0, ids(0), [])
    slots.begin()
    slots.reserve([Place(5)], live(1, 2))
    slots.withdraw(ids(1, 2))
    assert ([*slots.snapshots], [*slots.live]) == ([1], [])
    slots.check_integrity()


def test_going_back_keeps_what_is_before() -> None:
    slots = StateSlots(8)
    slots.reserve([], live(0, 1, 2, 3))
    slots.commit(0, ids(0, 1, 2), ids(3))
    slots.truncate(2)
    assert ([*slots.snapshots], [*slots.live]) == ([1, 2], [])
    assert (slots.last_before(2), slots.last_before(0)) == (2, 0)


@pytest.mark.parametrize("entries", [4, 7, 24])
def test_no_entry_is_lost_or_used_twice(entries: int) -> None:
    rng, slots, committed, node = random.Random(entries), StateSlots(entries), 0, 0
    alive: list[int] = []
    for _ in range(200):
        slots.begin()
        new = [*range(node, node + rng.randint(1, 9))]
        node += len(new)
        slots.reserve(live(new[-1]), live(*new))
        alive += new
        match rng.randrange(4):
            case 0:
                slots.withdraw(ids(*new))
                alive = alive[: -len(new)]
            case 1 | 2:
                path = sorted(rng.sample(alive, min(len(alive), rng.randint(1, 3))))
                alive = [each for each in alive if each > path[-1] and rng.random() < 0.5]
                slots.commit(committed, ids(*path), ids(*alive))
                committed += len(path)
            case _:
                committed = rng.randint(0, committed)
                slots.truncate(committed)
                alive = []
        slots.check_integrity()
        assert set(slots.live) <= set(ids(*alive))
        assert max(slots.snapshots, default=0) <= committed
