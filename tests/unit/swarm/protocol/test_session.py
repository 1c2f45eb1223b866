"""What one sweep may do to a session (P1–P9), rule by rule."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest

from swarm.base.errors import ContextFull, ProtocolError, SwarmError
from swarm.base.ids import TreeNodeId
from swarm.protocol.journal import Journal
from swarm.protocol.messages import Sampling, Snapshot, Sweep
from swarm.protocol.session import Applied, CommittedToken, Limits, LiveNode, SessionState

LIMITS = Limits(vocab_size=100, window_tokens=12, sweeps=3, nodes=8)
Nodes = Sequence[tuple[int, int | None]]


def following(state: SessionState, nodes: Nodes = (), commit_to: int | None = None) -> Sweep:
    """The legal next sweep that appends `nodes`, pairs of token and parent, every reply held."""
    path = state.path_to(TreeNodeId(commit_to)) if commit_to is not None else ()
    return Sweep(
        sequence=state.sequence + 1,
        committed=len(state.committed) + len(path),
        first_id=state.next_id,
        tokens=tuple(token for token, _ in nodes),
        parents=tuple(None if parent is None else TreeNodeId(parent) for _, parent in nodes),
        picks_from=state.next_id,
        acked=state.sequence,
        commit_to=None if commit_to is None else TreeNodeId(commit_to),
    )


def push(state: SessionState, nodes: Nodes = (), commit_to: int | None = None) -> Applied:
    return state.apply(following(state, nodes, commit_to))


def grown() -> SessionState:
    """Committed: node 0 (token 10). Live: 1 and 2 below the tip, 3 below 1, 4 below 3, 5 below 2."""
    state = SessionState(LIMITS)
    push(state, [(10, None)])
    push(state, [(11, None), (12, None), (13, 1), (14, 3), (15, 2)], commit_to=0)
    return state


def ids(*nodes: int) -> tuple[TreeNodeId, ...]:
    return tuple(TreeNodeId(node) for node in nodes)


def tokens(state: SessionState) -> list[int]:
    return [entry.token for entry in state.committed]


def test_truncate_then_commit_then_append() -> None:
    state = grown()
    assert tokens(state) == [10]
    assert {node: (live.token, live.parent, live.position) for node, live in state.live.items()} == {
        1: (11, None, 1),
        2: (12, None, 1),
        3: (13, 1, 2),
        4: (14, 3, 3),
        5: (15, 2, 2),
    }
    applied = push(state, [(20, None), (21, 4), (22, 6)], commit_to=1)
    assert applied == Applied(None, ids(1), ids(3, 4), ids(6, 7, 8), (2, 4, 3))
    assert state.committed == [CommittedToken(TreeNodeId(0), 10, 1), CommittedToken(TreeNodeId(1), 11, 2)]
    assert list(state.live.items()) == [
        (3, LiveNode(13, None, 2, 2)),
        (4, LiveNode(14, TreeNodeId(3), 2, 3)),
        (6, LiveNode(20, None, 3, 2)),
        (7, LiveNode(21, TreeNodeId(4), 3, 4)),
        (8, LiveNode(22, TreeNodeId(6), 3, 3)),
    ]


def test_commit_takes_the_ancestors_along_and_kills_their_siblings() -> None:
    state = grown()
    applied = push(state, commit_to=4)
    assert applied.path == (1, 3, 4)
    assert tokens(state) == [10, 11, 13, 14]
    assert not state.live
    assert [state.is_alive(TreeNodeId(node)) for node in range(7)] == [True, True, False, True, True, False, False]


def test_children_are_found_by_token_also_under_a_new_tip() -> None:
    state = grown()
    assert state.child(None, 11) == 1
    assert state.child(TreeNodeId(1), 13) == 3
    assert state.child(TreeNodeId(1), 14) is None
    push(state, commit_to=1)
    assert state.child(None, 13) == 3
    assert state.child(None, 11) is None
    assert state.child(TreeNodeId(2), 15) is None
    assert state.below(TreeNodeId(3)) == (4,)
    assert state.below(None) == (3, 4)


def test_truncate_kills_every_live_node_and_ids_are_not_reused() -> None:
    state = grown()
    push(state, [(30, None)], commit_to=4)
    assert tokens(state) == [10, 11, 13, 14]
    sweep = replace(following(state, [(40, None), (41, 7)]), truncate_to=2, committed=2)
    applied = state.apply(sweep)
    assert applied == Applied(2, (), (), ids(7, 8), (2, 3))
    assert tokens(state) == [10, 11]
    assert list(state.live) == [7, 8]
    assert state.child(None, 30) is None
    assert not state.is_alive(TreeNodeId(3))
    with pytest.raises(ProtocolError, match="first_id"):
        state.apply(replace(following(state), first_id=TreeNodeId(2), picks_from=TreeNodeId(2)))


def test_truncate_to_nothing_leaves_the_empty_root() -> None:
    state = grown()
    applied = state.apply(replace(following(state, [(9, None), (8, None)]), truncate_to=0, committed=0))
    assert applied.positions == (0, 0)
    assert state.committed == []
    push(state, commit_to=7)
    assert tokens(state) == [8]


def test_commit_of_a_node_whose_reply_is_missing() -> None:
    state = SessionState(LIMITS)
    push(state, [(1, None), (2, 0)])
    sweep = replace(following(state, [(3, None)], commit_to=1), acked=0)
    assert state.apply(sweep).path == (0, 1)
    assert state.apply(replace(following(state, [(4, None)], commit_to=2), acked=0)).path == (2,)
    assert tokens(state) == [1, 2, 3]


def test_a_parent_may_belong_to_an_unanswered_sweep() -> None:
    state = SessionState(LIMITS)
    push(state, [(1, None), (2, None)])
    applied = state.apply(replace(following(state, [(3, 1), (3, 0)]), acked=0))
    assert applied.positions == (1, 1)
    assert state.path_to(TreeNodeId(2)) == (1, 2)


def test_empty_sweeps_count_and_change_nothing_else() -> None:
    state = grown()
    before = copy.deepcopy(state)
    assert push(state) == Applied(None, (), ids(1, 2, 3, 4, 5), (), ())
    assert state.sequence == before.sequence + 1
    assert (state.live, state.committed, state.next_id) == (before.live, before.committed, before.next_id)


def test_sampling_is_sticky() -> None:
    state = SessionState(LIMITS)
    assert state.sampling == Sampling()
    warm = Sampling(seed=3, temperature=0.5)
    state.apply(replace(following(state, [(1, None)]), sampling=warm))
    push(state, [(2, 0)])
    assert state.sampling == warm


ILLEGAL: list[tuple[str, dict[str, object]]] = [
    ("sequence", {"sequence": 2}),
    ("sequence", {"sequence": 4}),
    ("acked", {"acked": -1}),
    ("acked", {"acked": 3}),
    ("first_id", {"first_id": 5}),
    ("first_id", {"first_id": 7}),
    ("parents", {"parents": (1,)}),
    ("parents", {"parents": (1, 3, 4)}),
    ("parents", {"parents": (1, -1)}),
    ("parents", {"parents": (1, 0)}),  # committed: only the tip can be a parent, and its name is None
    ("parents", {"parents": (1, 7)}),  # the node itself
    ("parents", {"parents": (7, 1)}),  # a later node
    ("parents", {"parents": (1, 3), "commit_to": 1, "committed": 2}),  # 1 is the tip: its name is None
    ("parents", {"parents": (None, 2), "commit_to": 1, "committed": 2}),  # killed by this very commit
    ("parents", {"parents": (None, 3), "truncate_to": 1}),  # killed by this very truncation
    ("picks_from", {"picks_from": 5}),
    ("picks_from", {"picks_from": 9}),
    ("tokens", {"tokens": (20, 100)}),
    ("tokens", {"tokens": (-1, 20)}),
    ("tokens", {"parents": (1, 1), "tokens": (20, 20)}),  # twice in one sweep
    ("tokens", {"parents": (1, 3), "tokens": (13, 20)}),  # beside an older sibling
    ("tokens", {"parents": (None, 3), "tokens": (12, 20)}),  # beside an older child of the tip
    ("tokens", {"parents": (None, None), "tokens": (13, 20), "commit_to": 1, "committed": 2}),  # the new tip's child
    ("tokens", {"tokens": (20, 21, 22, 23), "parents": (1, 3, 3, 3)}),  # nine live nodes
    ("committed", {"committed": 0}),
    ("committed", {"committed": 2}),
    ("committed", {"commit_to": 3, "parents": (None, 4)}),
    ("committed", {"truncate_to": 0, "parents": (None, None)}),
    ("commit_to", {"commit_to": 0, "parents": (None, 4)}),  # committed already
    ("commit_to", {"commit_to": 6, "parents": (None, 4)}),  # not there yet
    ("commit_to", {"commit_to": -1, "parents": (None, 4)}),
    ("commit_to", {"commit_to": 1, "truncate_to": 1, "parents": (None, None)}),
    ("truncate_to", {"truncate_to": -1, "parents": (None, None)}),
    ("truncate_to", {"truncate_to": 2, "parents": (None, None)}),
]


@pytest.mark.parametrize(("field", "changes"), ILLEGAL)
def test_an_illegal_header_is_refused_by_name_and_changes_nothing(field: str, changes: dict[str, object]) -> None:
    state = grown()
    legal = following(state, [(20, 1), (21, 3)])
    before = vars(copy.deepcopy(state))
    with pytest.raises(ProtocolError) as caught:
        state.apply(replace(legal, **changes))  # type: ignore[arg-type]
    assert caught.value.field == field
    assert vars(state) == before
    state.apply(legal)  # a refused sweep consumes no sequence (P8)


def test_unanswered_sweeps_and_nodes_are_limited() -> None:
    state = SessionState(LIMITS)
    for sequence in range(3):
        assert state.room(len(state.live), 0) == 8 - sequence
        state.apply(replace(following(state, [(sequence, None)]), acked=0))
    assert state.room(len(state.live), 0) == 0
    refuses(state, replace(following(state), acked=0), "sequence")
    assert state.room(len(state.live), 1) == 5
    state.apply(replace(following(state, [(9, None)]), acked=1))
    refuses(state, replace(following(state), acked=0), "sequence")  # an older `acked` takes nothing back
    assert state.acked == 1
    state.apply(replace(following(state), acked=3))
    state.apply(replace(following(state), acked=0))
    assert state.acked == 3


def test_unanswered_nodes_count_until_they_are_answered_also_when_dead() -> None:
    state = SessionState(LIMITS)
    push(state, [(1, None), (2, None), (3, None), (4, None), (5, 0)])
    assert state.room(len(state.below(TreeNodeId(0))), 0) == 3
    assert state.room(len(state.below(TreeNodeId(0))), 1) == 7
    four = [(6, None), (7, None), (8, None), (9, None)]
    refuses(state, replace(following(state, four, commit_to=0), acked=0), "tokens")
    push(state, four, commit_to=0)


def refuses(state: SessionState, sweep: Sweep, field: str) -> None:
    before = vars(copy.deepcopy(state))
    with pytest.raises(ProtocolError) as caught:
        state.apply(sweep)
    assert caught.value.field == field
    assert vars(state) == before


def test_the_window_ends_at_its_last_position() -> None:
    state = SessionState(replace(LIMITS, window_tokens=3))
    push(state, [(1, None), (2, 0), (3, 1)])
    before = vars(copy.deepcopy(state))
    for nodes, commit_to in (([(4, 2)], None), ([(4, None)], 2)):
        with pytest.raises(ContextFull, match="3 tokens"):
            push(state, nodes, commit_to)
        assert vars(state) == before
    push(state, [(5, 1)])  # beside node 2: breadth costs no window


def test_check_says_what_apply_does() -> None:
    state = grown()
    sweep = following(state, [(20, 4), (21, None)], commit_to=3)
    before = vars(copy.deepcopy(state))
    checked = state.check(sweep)
    assert vars(state) == before
    assert state.apply(sweep) == checked


def test_errors_are_one_line() -> None:
    for _, changes in ILLEGAL:
        state = grown()
        with pytest.raises(SwarmError) as caught:
            state.apply(replace(following(state, [(20, 1), (21, 3)]), **changes))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def snapshot() -> Snapshot:
    """Committed: 0 and 1. Live: 3 below the tip, 4 below 3, 6 below the tip. Sweep 1 is acked, 2 and 3 are not."""
    state = SessionState(LIMITS)
    journal = Journal(state)
    for nodes, commit_to, acked in (
        ([(10, None)], None, 0),
        ([(11, None), (12, None), (13, 1), (14, 3), (15, 2)], 0, 1),
        ([(16, None)], 1, 1),
    ):
        sweep = replace(following(state, nodes, commit_to), acked=acked)
        state.apply(sweep)
        journal.note(sweep)
    return journal.snapshot()


def test_a_snapshot_restores_the_state() -> None:
    taken = snapshot()
    state = SessionState.restored(LIMITS, taken)
    assert tokens(state) == [10, 11]
    assert list(state.live) == [3, 4, 6]
    assert [live.position for live in state.live.values()] == [2, 3, 2]
    assert (state.sequence, state.acked, state.next_id) == (3, 1, 7)
    assert state.child(None, 16) == 6
    assert state.room(3, 1) == 2  # six unanswered nodes of eight
    refuses(state, replace(following(state, [(20, 5)]), acked=1), "parents")
    push(state, [(20, 4)], commit_to=3)
    assert tokens(state) == [10, 11, 13]


SENSELESS: list[tuple[str, dict[str, object]]] = [
    ("7 committed and -2 live nodes", {"committed": 7}),
    ("ids that do not rise", {"ids": ids(0, 1, 4, 3, 6)}),
    ("ids that do not rise", {"next_id": 6}),
    ("a token outside the vocabulary", {"tokens": (10, 11, 13, 100, 16)}),
    ("a node of a later sweep", {"sequences": (1, 2, 2, 2, 4)}),
    ("other headers than those of the unanswered sweeps", {"headers": ()}),
    ("other headers than those of the unanswered sweeps", {"acked": 2}),
    ("other headers than those of the unanswered sweeps", {"headers": snapshot().headers[::-1]}),
    ("live node 4 has no live parent 1", {"parents": (None, *ids(0), None, *ids(1), None)}),
    ("live node 4 has no live parent 6", {"parents": (None, *ids(0), None, *ids(6), None)}),
    ("a token stands twice under node None", {"tokens": (10, 11, 13, 14, 13)}),
]


@pytest.mark.parametrize(("reason", "changes"), SENSELESS)
def test_a_snapshot_that_makes_no_sense_is_refused(reason: str, changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match=reason) as caught:
        SessionState.restored(LIMITS, replace(snapshot(), **changes))  # type: ignore[arg-type]
    assert caught.value.field == "snapshot"


@pytest.mark.parametrize(
    ("reason", "limits"),
    [
        ("2 committed and 3 live nodes", replace(LIMITS, nodes=2)),
        ("2 committed and 3 live nodes", replace(LIMITS, window_tokens=1)),
        ("more than the window of 3 tokens", replace(LIMITS, window_tokens=3)),
        ("more unanswered sweeps than credits", replace(LIMITS, sweeps=1)),
        ("more unanswered sweeps than credits", replace(LIMITS, nodes=5)),
    ],
)
def test_a_snapshot_beyond_the_limits_is_refused(reason: str, limits: Limits) -> None:
    with pytest.raises(ProtocolError, match=reason):
        SessionState.restored(limits, snapshot())


@pytest.mark.parametrize("next_id", [0, 7])
def test_a_snapshot_of_nothing_is_the_state_before_the_first_token(next_id: int) -> None:
    nothing = Snapshot(0, 0, 0, TreeNodeId(next_id), Sampling(), (), (), (), (), ())
    state = SessionState.restored(Limits(100, 64, 4, 16), nothing)
    assert (state.committed, state.live, state.next_id) == ([], {}, next_id)
