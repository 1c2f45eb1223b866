"""Which replies an honest tail could have sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from client.chain.answers import check_reply
from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.protocol.messages import Codec, Reply, Rows, Sweep, Want
from swarm.protocol.session import Limits, SessionState

LIMITS = Limits(vocab_size=100, window_tokens=64, sweeps=4, nodes=64)
SWEEP = Sweep(1, 0, TreeNodeId(0), (1, 2, 3), (None, TreeNodeId(0), TreeNodeId(0)), TreeNodeId(1))
PICKS = ((TreeNodeId(1), 7), (TreeNodeId(2), 8))
REPLY = Reply(1, 0, PICKS)
ROWS = Rows(Codec.FP32, 1, 4, bytes(16))


@pytest.fixture
def state() -> SessionState:
    one = SessionState(LIMITS)
    one.apply(SWEEP)
    return one


def test_what_was_asked_for_is_taken(state: SessionState) -> None:
    check_reply(REPLY, SWEEP, state)
    wanting = replace(SWEEP, want=Want(hidden_rows=True))
    check_reply(replace(REPLY, row_ids=(TreeNodeId(1),), rows=ROWS), wanting, state)
    check_reply(REPLY, wanting, state)


def test_a_node_that_died_needs_no_pick(state: SessionState) -> None:
    state.apply(Sweep(2, 2, TreeNodeId(3), (), (), TreeNodeId(3), acked=0, commit_to=TreeNodeId(1)))
    check_reply(replace(REPLY, picks=PICKS[:1]), SWEEP, state)
    check_reply(REPLY, SWEEP, state)
    with pytest.raises(RemoteProtocolError, match="none for node 1, which cannot be dead"):
        check_reply(replace(REPLY, picks=PICKS[1:]), SWEEP, state)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (replace(REPLY, picks=()), "none for node 1"),
        (replace(REPLY, picks=((TreeNodeId(0), 7), *PICKS)), "nobody asked"),
        (replace(REPLY, picks=(*PICKS, (TreeNodeId(9), 7))), "nobody asked"),
        (replace(REPLY, picks=((TreeNodeId(1), 100), PICKS[1])), "outside the vocabulary"),
        (replace(REPLY, picks=PICKS[::-1]), "not in the order"),
        (replace(REPLY, picks=(PICKS[0], *PICKS)), "not in the order"),
        (replace(REPLY, row_ids=(TreeNodeId(1),), rows=ROWS), "were not asked for"),
    ],
)
def test_what_no_honest_tail_sends_is_refused(reply: Reply, reason: str, state: SessionState) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        check_reply(reply, SWEEP, state)


def test_rows_are_of_nodes_that_were_sent(state: SessionState) -> None:
    wanting = replace(SWEEP, want=Want(hidden_rows=True))
    for ids in ((TreeNodeId(3),), tuple(map(TreeNodeId, [0] * 65))):
        with pytest.raises(RemoteProtocolError, match="never sent"):
            check_reply(replace(REPLY, row_ids=ids, rows=ROWS), wanting, state)


LOGGED = replace(SWEEP, want=Want(log_probs=True, top_log_probs=2))
BEST = ((7, -0.5), (8, -1.5))
TOLD = replace(REPLY, log_probs=(-0.5, -1.5), top_log_probs=(BEST, BEST))


def test_log_probabilities_that_were_asked_for_are_taken(state: SessionState) -> None:
    check_reply(TOLD, LOGGED, state)
    check_reply(replace(TOLD, top_log_probs=None), replace(SWEEP, want=Want(log_probs=True)), state)


@pytest.mark.parametrize(
    ("reply", "sweep", "reason"),
    [
        (REPLY, LOGGED, "are missing"),
        (TOLD, SWEEP, "were not asked for"),
        (replace(TOLD, top_log_probs=None), LOGGED, "are not the 2"),
        (replace(TOLD, top_log_probs=(BEST, BEST[:1])), LOGGED, "are not the 2"),
        (TOLD, replace(SWEEP, want=Want(log_probs=True)), "are not the 0"),
        (replace(TOLD, top_log_probs=(BEST, ((100, -1.0), (8, -2.0)))), LOGGED, "outside the vocabulary"),
    ],
)
def test_other_log_probabilities_are_refused(reply: Reply, sweep: Sweep, reason: str, state: SessionState) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        check_reply(reply, sweep, state)


PROMPT = replace(SWEEP, picks_from=TreeNodeId(3), want=Want(prompt_rows=2))
TWO_ROWS = Rows(Codec.FP32, 2, 4, bytes(32))


def test_rows_of_a_prompt_that_were_asked_for_are_taken(state: SessionState) -> None:
    bare = Reply(1, 0, ())
    check_reply(bare, PROMPT, state)
    check_reply(replace(bare, row_ids=(TreeNodeId(1), TreeNodeId(2)), rows=TWO_ROWS), PROMPT, state)
    check_reply(replace(bare, row_ids=(TreeNodeId(2),), rows=ROWS), PROMPT, state)
    both = replace(SWEEP, want=Want(hidden_rows=True, prompt_rows=1))
    check_reply(replace(REPLY, row_ids=(TreeNodeId(0), TreeNodeId(1)), rows=TWO_ROWS), both, state)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ((0, 1, 2), "were not asked for"),
        ((0,), "were not asked for"),
        ((3,), "were not asked for"),
        ((), "were not asked for"),
        ((2, 1), "not in the order"),
        ((1, 1), "not in the order"),
        ((1, 2) * 600, "not in the order"),
    ],
)
def test_other_rows_of_a_prompt_are_refused(ids: tuple[int, ...], reason: str, state: SessionState) -> None:
    nodes = tuple(map(TreeNodeId, ids))
    reply = Reply(1, 0, (), row_ids=nodes, rows=Rows(Codec.FP32, len(nodes), 4, bytes(16 * len(nodes))))
    with pytest.raises(RemoteProtocolError, match=reason):
        check_reply(reply, PROMPT, state)
