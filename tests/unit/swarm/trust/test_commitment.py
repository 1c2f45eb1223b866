"""Leaves and heads: a row has one leaf however it travels, and a head stands for every message before it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.base.ids import SessionId, TreeNodeId
from swarm.protocol.journal import Journal
from swarm.protocol.messages import Codec, Rows, Sampling, Snapshot, Sweep, SweepFrame
from swarm.protocol.session import Limits, SessionState
from swarm.trust.commitment import (
    ROW,
    Committed,
    CommittedStream,
    PlacedNode,
    commit_rows,
    commit_tokens,
    leaf,
    placed,
    rules_digest,
)

SESSION = SessionId(b"s" * 16)
LIMITS = Limits(100, 64, 8, 64)


def node(number: int) -> TreeNodeId:
    return TreeNodeId(number)


SWEEPS = (
    Sweep(1, 0, node(0), (1, 2), (None, node(0)), node(2)),
    Sweep(2, 2, node(2), (3, 4, 9, 5), (None, node(2), node(2), node(3)), node(2), commit_to=node(1), acked=1),
    Sweep(3, 4, node(6), (6,), (None,), node(6), commit_to=node(3)),
)


def rows_of(nodes: tuple[TreeNodeId, ...]) -> Rows:
    return Rows(Codec.FP32, len(nodes), 2, b"".join(int(one).to_bytes(8) for one in nodes))


def committed(message: SweepFrame | Snapshot, nodes: tuple[TreeNodeId, ...], state: SessionState) -> Committed:
    places = placed(state, nodes)
    assert places is not None
    assert message.rows is not None
    return commit_rows(SESSION, 1, places, message.rows, snapshot=isinstance(message, Snapshot))


def test_a_row_that_is_sent_again_has_the_leaf_that_it_had() -> None:
    """In its sweep, after it (a catch-up), and in a snapshot in which its parent is the tip, or is committed."""
    state = SessionState(LIMITS)
    journal, leaves = Journal(state), dict[TreeNodeId, bytes]()
    for sweep in SWEEPS:
        applied = state.apply(sweep)
        rows = rows_of(applied.appended)
        journal.keep(applied, applied.appended, rows)
        journal.note(sweep)
        made = committed(SweepFrame(sweep, None, rows), applied.appended, state)
        leaves |= {one: made.leaves[32 * place : 32 * place + 32] for place, one in enumerate(made.ids)}
    snapshot = journal.snapshot()
    again = committed(snapshot, snapshot.ids, state)
    assert again.ids == (0, 1, 2, 3, 5, 6)
    later = journal.since(1)
    assert later is not None
    for frame, alive in zip(later, ((2, 3, 5), (6,)), strict=True):
        nodes = tuple(map(node, alive))
        caught_up = committed(frame, nodes, state)
        assert caught_up.leaves == b"".join(leaves[one] for one in nodes)
    assert again.leaves == b"".join(leaves[one] for one in again.ids)


def test_nodes_that_are_gone_have_no_place() -> None:
    state = SessionState(LIMITS)
    for sweep in SWEEPS:
        state.apply(sweep)
    assert placed(state, [node(4)]) is None
    assert placed(state, [node(60)]) is None


def test_a_leaf_is_of_one_node_of_one_session() -> None:
    at = PlacedNode(node(3), 2, node(1))
    whole = leaf(SESSION, at, ROW, b"row")
    others = [
        leaf(SessionId(b"t" * 16), at, ROW, b"row"),
        leaf(SESSION, at._replace(node=node(4)), ROW, b"row"),
        leaf(SESSION, at._replace(position=3), ROW, b"row"),
        leaf(SESSION, at._replace(parent=node(2)), ROW, b"row"),
        leaf(SESSION, at._replace(parent=None), ROW, b"row"),
        leaf(SESSION, at, b"t", b"row"),
        leaf(SESSION, at, ROW, b"roW"),
    ]
    assert len({whole, *others}) == len(others) + 1
    assert leaf(SESSION, at._replace(parent=node(0)), ROW, b"") != leaf(SESSION, at._replace(parent=None), ROW, b"")


@pytest.mark.parametrize("codec", list(Codec))
def test_what_is_hashed_is_what_travels(codec: Codec) -> None:
    """Also in int8: no value is decoded."""
    size = codec.row_bytes(32)
    rows = Rows(codec, 2, 32, bytes(range(size)) + bytes(size))
    at = (PlacedNode(node(0), 0, None), PlacedNode(node(1), 1, node(0)))
    made = commit_rows(SESSION, 1, at, rows, snapshot=False)
    assert made.leaves == leaf(SESSION, at[0], ROW, bytes(range(size))) + leaf(SESSION, at[1], ROW, bytes(size))


def test_a_head_stands_for_all_messages_in_their_order() -> None:
    at = (PlacedNode(node(0), 0, None),)
    messages = [commit_tokens(SESSION, number, at, [number], snapshot=False) for number in (1, 2, 3)]

    def head(some: list[Committed], since: int = 0, receiver: str = "b") -> bytes:
        stream = CommittedStream(SESSION, since, "a", receiver)
        for message in some:
            stream.add(message)
        return stream.head

    whole = head(messages)
    assert whole == head(list(messages))
    one, two, three = messages
    for other in ([one, two], [one, three, two], [two, three], [one, two, three, three]):
        assert head(other) != whole
    assert head(messages, since=1) != whole
    assert head(messages, receiver="c") != whole
    for changed in (replace(two, sequence=4), replace(two, is_snapshot=True), replace(two, nodes=(7).to_bytes(8))):
        assert head([one, changed, three]) != whole


def test_leaves_may_go_and_heads_go_on() -> None:
    at = (PlacedNode(node(0), 0, None),)
    stream, other = CommittedStream(SESSION, 0, "a", "b"), CommittedStream(SESSION, 0, "a", "b")
    for number in (1, 2, 3):
        message = commit_tokens(SESSION, number, at, [number], snapshot=False)
        stream.add(message)
        other.add(message)
        other.drop()
    assert (other.head, other.count) == (stream.head, stream.count)
    assert (other.messages, other.size_bytes) == ([], 0)
    assert stream.size_bytes == 3 * (8 + 32)


def test_rules_are_told_apart_by_every_option() -> None:
    plain = Sampling(seed=1, temperature=0.5)
    others = [
        replace(plain, seed=2),
        replace(plain, temperature=0.6),
        replace(plain, top_k=3),
        replace(plain, top_p=0.5),
    ]
    assert len({rules_digest(one) for one in (plain, *others)}) == 5
