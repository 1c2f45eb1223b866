"""The tail's own walk: which live nodes lie on the path that its picks accept, and whose rows answer a sweep."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import node.session.tail
from node.session.tail import MAX_ROUND_TRIP_MS, AcceptedPath, PromptRowsBudget, ReplyBuffer, requested_rows
from swarm.base.ids import TreeNodeId
from swarm.link.link import ROUND_TRIPS_KEPT
from swarm.protocol.limits import MAX_REPLY_ROWS
from swarm.protocol.messages import Sweep, Want
from swarm.protocol.session import Limits, SessionState

LIMITS = Limits(vocab_size=100, window_tokens=300, sweeps=4, nodes=200)


class Hop:
    """A tail's rules and its walk."""

    def __init__(self) -> None:
        self.state = SessionState(LIMITS)
        self.path = AcceptedPath()

    def run(
        self,
        tokens: Sequence[int],
        parents: Sequence[int | None],
        picks: dict[int, int],
        commit_to: int | None = None,
        truncate_to: int | None = None,
    ) -> list[int]:
        """One sweep; where the walk goes after it."""
        state = self.state
        kept = len(state.committed) if truncate_to is None else truncate_to
        committed = kept + (len(state.path_to(TreeNodeId(commit_to))) if commit_to is not None else 0)
        sweep = Sweep(
            sequence=state.sequence + 1,
            committed=committed,
            first_id=state.next_id,
            tokens=tuple(tokens),
            parents=tuple(None if parent is None else TreeNodeId(parent) for parent in parents),
            picks_from=state.next_id,
            acked=state.sequence,
            truncate_to=truncate_to,
            commit_to=None if commit_to is None else TreeNodeId(commit_to),
        )
        state.apply(sweep)
        known = {TreeNodeId(node): token for node, token in picks.items()}
        self.path.note(known, state, is_cut=truncate_to is not None)
        return [int(node) for node in self.path.walk(state, sweep)]


def test_picks_are_followed_as_far_as_a_child_holds_them() -> None:
    hop = Hop()
    assert hop.run([5, 6, 7, 8], [None, 0, 0, 2], {0: 7, 1: 1, 2: 8, 3: 9}) == [0, 2, 3]


def test_a_first_pick_that_no_child_holds_leaves_the_pending_token_alone() -> None:
    hop = Hop()
    assert hop.run([5, 6], [None, 0], {0: 99, 1: 1}) == [0]


def test_the_tips_pick_decides_where_it_is_known() -> None:
    hop = Hop()
    hop.run([5, 6], [None, 0], {0: 20, 1: 1})
    assert hop.run([21, 20], [0, 0], {2: 30, 3: 31}) == [0, 3], "a token in flight below what is not committed yet"
    assert hop.run([31], [None], {4: 40}, commit_to=3) == [4], "node 3 is the tip now, and its child holds its pick"
    assert hop.run([50, 40], [None, None], {5: 1, 6: 2}, commit_to=4) == [6], "the first node is not what was picked"


def test_where_nobody_asked_for_the_tips_pick_the_sweeps_first_node_is_next() -> None:
    hop = Hop()
    hop.run([1, 2, 3], [None, 0, 1], {})
    assert hop.run([4, 5], [None, 3], {3: 5, 4: 6}, commit_to=2) == [3, 4]
    assert hop.run([7, 6], [4, 4], {5: 1, 6: 1}) == [3, 4, 6], "and stays so when a later sweep commits nothing"


def test_a_truncation_voids_what_was_picked() -> None:
    hop = Hop()
    hop.run([1, 2], [None, 0], {0: 2, 1: 9})
    hop.run([9], [None], {2: 8}, commit_to=1)
    assert hop.run([30, 31], [None, 3], {3: 31, 4: 1}, truncate_to=2) == [3, 4], "9 was picked once, and is void"


def test_only_a_sweeps_own_nodes_with_wanted_picks_answer_it_and_only_the_deepest() -> None:
    path = [TreeNodeId(node) for node in range(3, 100)]
    sweep = Sweep(1, 0, TreeNodeId(5), (1,) * 90, (None,) * 90, TreeNodeId(7), want=Want(hidden_rows=True))
    assert requested_rows(sweep, path) == tuple(range(95 - MAX_REPLY_ROWS, 95))
    assert requested_rows(sweep, path[:10]) == tuple(range(7, 13))
    nothing = Sweep(1, 0, TreeNodeId(5), (1,), (None,), TreeNodeId(5), want=Want())
    assert requested_rows(nothing, path) == ()


# How many of a prompt's rows a tail sends: within a bound on what the client did not acknowledge.


NODES = [TreeNodeId(node) for node in range(20)]


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.session.tail, "PROMPT_ROWS_BYTES", 100)


def test_the_newest_that_fit_are_sent() -> None:
    budget = PromptRowsBudget()
    assert budget.grant(1, NODES[:3], 10, acked=0) == NODES[:3]
    assert budget.grant(2, NODES, 10, acked=0) == NODES[13:]
    assert budget.grant(3, NODES, 10, acked=0) == []


def test_what_the_client_holds_counts_no_more() -> None:
    budget = PromptRowsBudget()
    for sequence in (1, 2, 3):
        budget.grant(sequence, NODES[:3], 10, acked=0)
    assert budget.grant(4, NODES, 10, acked=2) == NODES[13:]
    assert budget.grant(5, NODES, 10, acked=4) == NODES[10:]


def test_a_row_larger_than_the_bound_is_never_sent() -> None:
    assert PromptRowsBudget().grant(1, NODES, 101, acked=0) == []


# How far the client is from the tail.


def test_the_least_of_the_latest_round_trips_counts() -> None:
    replies = ReplyBuffer()
    assert replies.link_ms == 0.0
    for round_trip_ms in (80.0, 50.0, 200.0):
        replies.measured(round_trip_ms)
    assert replies.link_ms == pytest.approx(25.0)
    for _ in range(ROUND_TRIPS_KEPT):
        replies.measured(1e9)
    assert replies.link_ms == MAX_ROUND_TRIP_MS / 2, "whatever a client answers"
