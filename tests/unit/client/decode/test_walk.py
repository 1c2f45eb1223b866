"""The client's walk: what becomes certain, what is committed next, what is emitted (P3–P5)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from client.base.stats import TokenLogProbs
from client.decode.walk import Walk
from client.draft.search.tree import DraftTree
from swarm.base.errors import ContextFull, ProtocolError
from swarm.base.ids import TreeNodeId
from swarm.protocol.messages import Reply, Sampling, Sweep, Want
from swarm.protocol.session import Limits

LIMITS = Limits(vocab_size=100, window_tokens=40, sweeps=4, nodes=16)
SAMPLING = Sampling(seed=5, temperature=0.7)


def reply(sweep: Sweep, *picks: tuple[int, int]) -> Reply:
    return Reply(sweep.sequence, 0, tuple((TreeNodeId(node), token) for node, token in picks))


def prompted(*prompt: int, pick: int) -> Walk:
    """A walk whose prompt was answered by `pick`, which is pending."""
    walk = Walk(LIMITS, SAMPLING)
    sweep = walk.prefill(prompt, last=True)
    assert walk.accept(reply(sweep, (len(prompt) - 1, pick))) == [pick]
    return walk


def text(walk: Walk) -> list[int]:
    return [entry.token for entry in walk.state.committed]


def test_each_chunk_of_a_prompt_commits_the_one_before() -> None:
    walk = Walk(LIMITS, SAMPLING)
    first = walk.prefill([10, 11, 12], last=False)
    assert (first.tokens, first.parents, first.commit_to, first.picks_from) == ((10, 11, 12), (None, 0, 1), None, 3)
    second = walk.prefill([13, 14], last=True)
    assert (second.tokens, second.parents, second.commit_to, second.picks_from) == ((13, 14), (None, 3), 2, 4)
    assert (second.committed, text(walk), list(walk.state.live)) == (3, [10, 11, 12], [3, 4])
    assert walk.in_flight == 2
    assert walk.accept(reply(first)) == []
    assert walk.accept(reply(second, (4, 20))) == [20]
    assert walk.in_flight == 0


def test_each_emitted_token_has_the_log_probabilities_of_its_own_node() -> None:
    walk = prompted(10, 11, pick=20)
    walk.want = Want(log_probs=True, top_log_probs=1)
    sweep = walk.extend(DraftTree((30, 31, 32), (None, None, 0), (1.0,) * 3))
    assert sweep.want == walk.want
    answer = replace(
        reply(sweep, (2, 30), (3, 32), (4, 50), (5, 40)),
        log_probs=(-1.0, -2.0, -3.0, -4.0),
        top_log_probs=(((30, -1.0),), ((9, -0.5),), ((50, -3.0),), ((40, -4.0),)),
    )
    assert walk.accept(answer) == [30, 32, 40]
    assert walk.log_probs == (
        TokenLogProbs(30, -1.0, ((30, -1.0),)),
        TokenLogProbs(32, -2.0, ((9, -0.5),)),
        TokenLogProbs(40, -4.0, ((40, -4.0),)),
    )
    assert walk.accept(answer) == []
    assert not walk.log_probs


def test_sampling_travels_once() -> None:
    walk = Walk(LIMITS, SAMPLING)
    assert walk.prefill([1], last=False).sampling == SAMPLING
    assert walk.prefill([2], last=False).sampling is None
    assert walk.state.sampling == SAMPLING


def test_the_pending_token_comes_first_and_the_tree_hangs_below_it() -> None:
    walk = prompted(10, 11, pick=20)
    assert walk.pending == 20
    sweep = walk.extend(DraftTree((30, 31, 32, 33), (None, 0, 0, 1), (1.0,) * 4))
    assert (sweep.commit_to, sweep.committed, sweep.acked) == (1, 2, 1)
    assert (sweep.tokens, sweep.parents) == ((20, 30, 31, 32, 33), (None, 2, 3, 3, 4))
    assert (sweep.first_id, sweep.picks_from) == (2, 2)
    assert walk.pending is None
    assert walk.certain == 2


def test_the_walk_follows_picks_and_emits_the_first_without_a_child() -> None:
    walk = prompted(10, pick=20)
    sweep = walk.extend(DraftTree((30, 31, 32, 33), (None, 0, 0, 1), (1.0,) * 4))
    answer = reply(sweep, (1, 30), (2, 32), (3, 50), (4, 60), (5, 70))
    assert walk.accept(answer) == [30, 32, 60]
    assert (walk.pending, walk.certain, walk.passed) == (60, 4, (1, 2, 4))
    following = walk.extend(DraftTree())
    assert (following.commit_to, following.committed, text(walk)) == (4, 4, [10, 20, 30, 32])
    assert walk.accept(reply(following, (6, 61))) == [61]


def test_a_rejection_at_once_still_emits_a_token() -> None:
    walk = prompted(10, pick=20)
    sweep = walk.extend(DraftTree((30, 31), (None, None), (1.0,) * 2))
    assert walk.accept(reply(sweep, (1, 40), (2, 0), (3, 0))) == [40]
    following = walk.extend(DraftTree((30,), (None,), (1.0,)))
    assert (following.commit_to, following.parents) == (1, (None, 4))
    assert sorted(walk.state.live) == [2, 3, 4, 5]  # the rejected ones die with the next commit


def test_growing_below_nodes_that_are_not_verified_yet() -> None:
    walk = prompted(10, pick=20)
    first = walk.extend(DraftTree((30, 31), (None, 0), (1.0,) * 2))  # nodes 1: 20, 2: 30, 3: 31
    second = walk.grow([40, 41, 42], [TreeNodeId(3), TreeNodeId(4), TreeNodeId(1)])
    assert (second.commit_to, second.tokens, second.parents) == (1, (40, 41, 42), (3, 4, None))
    assert text(walk) == [10, 20]
    assert walk.certain == 1  # the tip now; its pick is still missing
    third = walk.grow([43], [TreeNodeId(1)])
    assert (third.commit_to, third.committed, third.parents) == (None, 2, (None,))
    assert walk.accept(reply(first, (1, 30), (2, 31), (3, 40))) == [30, 31, 40]
    assert walk.certain == 4
    fourth = walk.grow([], [])
    assert (fourth.commit_to, fourth.tokens, text(walk)) == (4, (), [10, 20, 30, 31, 40])
    assert walk.accept(reply(second, (4, 41), (5, 60))) == [41, 60]  # node 6 is dead: its pick may lack
    assert walk.passed == (4, 5)
    assert walk.accept(reply(third)) == []
    assert not walk.passed
    assert walk.accept(reply(fourth)) == []
    assert walk.extend(DraftTree()).commit_to == 5


def test_growing_where_nothing_can_be_accepted_is_a_bug() -> None:
    walk = prompted(10, pick=20)
    sweep = walk.extend(DraftTree((30, 31, 32), (None, None, 1), (1.0,) * 3))
    for node in (0, 5, 99):
        with pytest.raises(ProtocolError):
            walk.grow([50], [TreeNodeId(node)])
    assert walk.grow([33], [TreeNodeId(2)]).parents == (2,)  # node 5
    assert walk.accept(reply(sweep, (1, 30), (2, 33))) == [30, 33]
    assert walk.certain == 5
    for node in (0, 1, 2, 3, 4, 6, 99):
        with pytest.raises(ProtocolError) as caught:
            walk.grow([50], [TreeNodeId(node)])
        assert caught.value.field == "parents"
    assert walk.grow([50, 51], [TreeNodeId(5), TreeNodeId(6)]).parents == (None, 6)


def test_replies_may_be_late_repeated_and_out_of_order() -> None:
    walk = prompted(10, pick=20)
    first = walk.extend(DraftTree((30,), (None,), (1.0,)))
    second = walk.grow([31], [TreeNodeId(2)])
    assert walk.accept(reply(second, (3, 32))) == []
    assert (walk.in_flight, walk.room) == (1, 16 - 3 - 1)  # credits count from the oldest missing reply
    assert walk.accept(reply(first, (1, 30), (2, 31))) == [30, 31, 32]
    assert walk.in_flight == 0
    assert walk.accept(reply(first, (1, 77), (2, 77))) == []
    assert walk.accept(reply(second, (3, 77))) == []
    assert walk.extend(DraftTree()).acked == 3


def test_a_reply_that_answers_what_was_not_asked_is_refused() -> None:
    walk = prompted(10, pick=20)
    sweep = walk.extend(DraftTree((30,), (None,), (1.0,)))
    for field, wrong in (
        ("sequence", replace(reply(sweep), sequence=0)),
        ("sequence", replace(reply(sweep), sequence=3)),
        ("picks", reply(sweep, (3, 30))),
        ("picks", reply(sweep, (-1, 30))),
        ("picks", reply(sweep, (1, 100))),
        ("picks", reply(sweep, (1, -1))),
    ):
        with pytest.raises(ProtocolError) as caught:
            walk.accept(wrong)
        assert caught.value.field == field
        assert walk.in_flight == 1
    assert walk.accept(reply(sweep, (1, 31), (2, 0))) == [31]


def test_a_missing_pick_that_the_sequence_needs_is_an_error_and_no_endless_wait() -> None:
    walk = prompted(10, pick=20)
    sweep = walk.extend(DraftTree((30,), (None,), (1.0,)))
    with pytest.raises(ProtocolError, match="node 1"):
        walk.accept(reply(sweep, (2, 40)))


def test_room_follows_the_credits() -> None:
    walk = Walk(LIMITS, SAMPLING)
    assert walk.room == 16
    sweep = walk.prefill(range(16), last=False)
    assert walk.room == 0
    walk.accept(reply(sweep))
    assert walk.room == 16
    last = walk.prefill([50], last=True)
    assert walk.room == 14  # one is held back for the token that the pick brings
    walk.accept(reply(last, (16, 60)))
    assert walk.room == 16
    walk.extend(DraftTree((1, 2, 3), (None,) * 3, (1.0,) * 3))
    assert walk.room == 11
    for credit in (True, True, True, False):
        assert (walk.room > 0) is credit
        if credit:
            walk.grow([], [])
    with pytest.raises(ProtocolError, match="unanswered sweeps"):
        walk.grow([], [])


def test_room_is_never_used_up_by_rejected_nodes() -> None:
    walk = prompted(10, pick=0)
    for turn in range(12):
        room = walk.room
        assert room >= 1
        first = walk.state.next_id
        sweep = walk.extend(DraftTree(tuple(range(50, 49 + room)), (None,) * (room - 1), (1.0,) * (room - 1)))
        assert walk.accept(reply(sweep, (first, turn))) == [turn]


def test_the_window_is_the_callers_to_mind() -> None:
    walk = Walk(replace(LIMITS, window_tokens=3), SAMPLING)
    sweep = walk.prefill([1, 2], last=True)
    walk.accept(reply(sweep, (1, 3)))
    with pytest.raises(ContextFull):
        walk.extend(DraftTree((4,), (None,), (1.0,)))
    assert walk.pending == 3
    assert walk.extend(DraftTree()).tokens == (3,)


def test_another_prompt_in_the_same_session_keeps_what_both_begin_with() -> None:
    walk = prompted(10, 11, pick=20)
    sweep = walk.extend(DraftTree((30, 31), (None, 0), (1.0,) * 2))
    walk.accept(reply(sweep, (2, 30), (3, 31), (4, 40)))
    other = replace(SAMPLING, seed=6)
    commit, kept = walk.restart([10, 11, 20, 30, 50, 51], other)
    assert commit is not None
    assert (commit.commit_to, commit.committed, commit.tokens) == (4, 5, ())
    assert (kept, walk.pending, text(walk)) == (4, 51, [10, 11, 20, 30, 31])
    sweep = walk.prefill([50], last=False)
    assert (sweep.truncate_to, sweep.committed, sweep.parents, sweep.sampling) == (4, 4, (None,), other)
    assert text(walk) == [10, 11, 20, 30]
    assert walk.extend(DraftTree()).truncate_to is None
    assert text(walk) == [10, 11, 20, 30, 50]


def test_the_last_token_of_a_prompt_is_made_again_for_its_pick() -> None:
    walk = prompted(10, 11, pick=20)
    commit, kept = walk.restart([10, 11], SAMPLING)
    assert commit is not None
    assert (kept, walk.pending) == (1, 11)
    sweep = walk.extend(DraftTree())
    assert (sweep.truncate_to, sweep.committed, sweep.tokens) == (1, 1, (11,))


def test_a_generation_that_was_left_does_not_speak_in_the_next() -> None:
    walk = prompted(10, pick=20)
    left = walk.extend(DraftTree((30,), (None,), (1.0,)))
    _, kept = walk.restart([10, 20, 60], SAMPLING)
    assert kept == 2
    assert walk.room == 16 - 2  # the live nodes go, the unanswered ones still count
    assert walk.accept(reply(left, (1, 30), (2, 33))) == []
    following = walk.extend(DraftTree((30,), (None,), (1.0,)))
    assert (following.truncate_to, following.tokens, walk.pending) == (2, (60, 30), None)
    assert walk.accept(reply(following, (3, 61), (4, 62))) == [61]


def test_a_first_prompt_truncates_nothing() -> None:
    walk = Walk(LIMITS, SAMPLING)
    assert walk.restart([10, 11], SAMPLING) == (None, 0)
    assert walk.prefill([10], last=False).truncate_to is None
