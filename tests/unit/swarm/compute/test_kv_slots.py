"""Where KV rows lie after appends, commits and truncations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from swarm.base.errors import LocalProtocolError
from swarm.base.ids import TreeNodeId
from swarm.compute.kv_slots import KvSlots, ancestor_bytes


def ids(*nodes: int) -> list[TreeNodeId]:
    return [TreeNodeId(node) for node in nodes]


def grown() -> KvSlots:
    """Committed: one row. Live: 1 and 2 below the tip, 3 below 1, 4 below 3, 5 below 2."""
    slots = KvSlots(capacity=12)
    slots.append(ids(0), [None], [0])
    slots.commit(ids(0), [])
    slots.append(ids(1, 2, 3, 4, 5), [None, None, *ids(1, 3, 2)], [1, 1, 2, 3, 2])
    return slots


def seen(mask: Sequence[bool], slots: KvSlots) -> list[int]:
    return [node for node, sees in zip(slots.ids, mask, strict=True) if sees]


def test_new_nodes_see_their_ancestors_and_themselves() -> None:
    slots = KvSlots(capacity=12)
    assert slots.append(ids(0), [None], [0]).tolist() == [[True]]
    slots.commit(ids(0), [])
    mask = slots.append(ids(1, 2, 3, 4, 5), [None, None, *ids(1, 3, 2)], [1, 1, 2, 3, 2])
    assert [seen(row, slots) for row in mask] == [[1], [2], [1, 3], [1, 3, 4], [2, 5]]
    later = slots.append(ids(6, 7), ids(5, 4), [3, 4])
    assert [seen(row, slots) for row in later] == [[2, 5, 6], [1, 3, 4, 7]]
    assert slots.positions.tolist() == [0, 1, 1, 2, 3, 2, 3, 4]
    slots.check_integrity()


def test_a_commit_moves_the_path_to_the_front_and_keeps_what_lies_below() -> None:
    slots = grown()
    moves = slots.commit(ids(1), ids(3, 4))
    assert moves.tolist() == [1, 3, 4]  # old slots of 1, 3 and 4
    assert (slots.committed, slots.ids) == (2, [3, 4])
    assert slots.positions.tolist() == [0, 1, 2, 3]
    assert [node in slots for node in ids(0, 1, 2, 3, 4, 5)] == [False, False, False, True, True, False]
    mask = slots.append(ids(6), ids(4), [4])
    assert seen(mask[0], slots) == [3, 4, 6]
    slots.check_integrity()


def test_survivors_without_a_row_are_passed_over() -> None:
    slots = grown()
    assert slots.commit(ids(1), ids(3, 4, 9)).tolist() == [1, 3, 4]
    assert slots.ids == [3, 4]


def test_truncation_frees_every_live_row() -> None:
    slots = grown()
    slots.commit(ids(1, 3), ids(4))
    slots.truncate(2)
    assert (slots.committed, slots.ids, slots.used) == (2, [], 2)
    assert slots.append(ids(8), [None], [2]).tolist() == [[True]]
    slots.check_integrity()


def test_freed_slots_can_be_used_again() -> None:
    slots = KvSlots(capacity=4)
    for node in range(20):
        slots.append(ids(2 * node, 2 * node + 1), [None, None], [1 - (node == 0)] * 2)
        slots.commit(ids(2 * node), [])
        slots.check_integrity()
        slots.truncate(1)


@pytest.mark.parametrize(
    ("field", "break_it"),
    [
        ("truncate_to", lambda slots: slots.truncate(2)),
        ("truncate_to", lambda slots: slots.truncate(-1)),
        ("commit_to", lambda slots: slots.commit(ids(9), [])),
        ("nodes", lambda slots: slots.append(ids(*range(10, 17)), [None] * 7, [1] * 7)),
        ("parents", lambda slots: slots.append(ids(6, 7), ids(5, 9), [3, 3])),
    ],
)
def test_misuse_is_refused_and_changes_nothing(field: str, break_it: Callable[[KvSlots], object]) -> None:
    slots = grown()
    with pytest.raises(LocalProtocolError) as caught:
        break_it(slots)
    assert caught.value.field == field
    assert (slots.committed, slots.ids, slots.used) == (1, [1, 2, 3, 4, 5], 6)
    slots.check_integrity()
    assert slots.append(ids(6), ids(5), [3]).tolist() == [[False, True, False, False, True, True]]


def test_the_integrity_check_sees_a_wrong_position() -> None:
    slots = grown()
    slots.append(ids(6), ids(5), [2])
    with pytest.raises(LocalProtocolError, match="inconsistent"):
        slots.check_integrity()


def test_a_wide_tree_and_a_long_chain_fit() -> None:
    slots = KvSlots(capacity=4096)
    nodes = ids(*range(2048))
    mask = slots.append(nodes, [None, *nodes[:-1]], list(range(2048)))
    assert np.array_equal(mask, np.tril(np.ones((2048, 2048), dtype=np.bool_)))
    slots.append(ids(*range(2048, 4096)), [None] * 2048, [0] * 2048)
    slots.check_integrity()
    assert slots.commit(nodes[:2], nodes[2:]).tolist() == list(range(2048))
    slots.check_integrity()


def test_ancestors_take_a_bit_each_and_no_more_than_the_live_nodes_allow() -> None:
    nodes = 3_000
    slots = KvSlots(capacity=2 * nodes, nodes=nodes)
    for first in range(0, nodes, 100):
        slots.append(ids(*range(first, first + 100)), [None] * 100, [0] * 100)
    assert slots._ancestors.nbytes <= ancestor_bytes(nodes) < nodes * nodes / 7


def test_a_replays_chunk_may_be_larger_than_the_tree() -> None:
    slots = KvSlots(capacity=600, nodes=8)
    chain = ids(*range(512))
    slots.append(chain, [None, *chain[:-1]], list(range(512)))
    slots.commit(chain, [])
    slots.append(ids(600), [None], [512])
    slots.check_integrity()


def test_the_way_to_a_node_is_known() -> None:
    slots = KvSlots(16)
    ids = [TreeNodeId(node) for node in range(5)]
    slots.append(ids, [None, ids[0], ids[0], ids[2], None], [0, 1, 1, 2, 0])
    assert [slots.parent(row) for row in range(5)] == [None, 0, 0, 2, None]
    assert [slots.ancestors(row) for row in (0, 1, 3, 4)] == [[0], [0, 1], [0, 2, 3], [4]]
