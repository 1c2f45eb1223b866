"""What a client tells a tail: in parts, and anew."""

from __future__ import annotations

from client.chain.tells import TellLog, parts_of, tell_of
from swarm.base.ids import TreeNodeId
from swarm.protocol.limits import MAX_TELL_NODES
from swarm.protocol.messages import Sampling, Sweep, Tell, Want
from swarm.protocol.pick_rules import DraftDistribution
from swarm.protocol.session import Limits, SessionState

LIMITS = Limits(vocab_size=100, window_tokens=10_000, sweeps=4, nodes=5_000)
FIRST = Sweep(1, 0, TreeNodeId(0), (7,), (None,), TreeNodeId(0), sampling=Sampling(9, 1.0))


def test_a_small_sweep_is_told_at_once() -> None:
    assert list(parts_of(tell_of(FIRST))) == [Tell(1, (TreeNodeId(0),), (7,), Sampling(9, 1.0))]


def test_a_large_one_comes_in_parts_and_its_settings_in_the_last() -> None:
    count = 2 * MAX_TELL_NODES + 1
    tokens = tuple(place % 100 for place in range(count))
    guesses = tuple(DraftDistribution(place, (1,), (1.0,), ()) for place in range(count))
    parents = (None, *map(TreeNodeId, range(count - 1)))
    sweep = Sweep(1, 0, TreeNodeId(0), tokens, parents, TreeNodeId(0), sampling=Sampling(1), want=Want(True))
    parts = list(parts_of(Tell(1, sweep.nodes, tokens, sweep.sampling, sweep.want, guesses)))
    assert [len(part.ids) for part in parts] == [MAX_TELL_NODES, MAX_TELL_NODES, 1]
    assert [part.has_more for part in parts] == [True, True, False]
    assert [part.sampling for part in parts] == [None, None, Sampling(1)]
    assert [part.want for part in parts] == [None, None, Want(True)]
    assert tuple(token for part in parts for token in part.tokens) == tokens
    assert tuple(guess for part in parts for guess in part.guesses) == guesses


def test_a_new_tail_is_told_what_came_before_the_unanswered_sweeps_and_then_these() -> None:
    state = SessionState(LIMITS)
    log = TellLog(state)
    two = (TreeNodeId(1), TreeNodeId(2))
    second = Sweep(2, 1, two[0], (8, 9), (None, None), two[0], acked=0, commit_to=TreeNodeId(0))
    third = Sweep(3, 2, TreeNodeId(3), (5,), (None,), TreeNodeId(3), acked=2, commit_to=two[0])
    for sweep in (FIRST, second):
        log.note(sweep)
    assert [tell.sequence for tell in log.all()] == [0, 1, 2]
    log.note(third)
    before, last = log.all()
    assert before == Tell(2, (TreeNodeId(0), *two), (7, 8, 9), Sampling(9, 1.0)), "the dead-to-be is there too"
    assert last == tell_of(third)
    assert state.sequence == 0, "the session's own state is left alone"
