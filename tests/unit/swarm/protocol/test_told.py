"""What a tail takes from a client, and what it refuses. Random logs: `tests/property/swarm/protocol/test_told.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from swarm.base.errors import LocalProtocolError, RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.protocol import wire
from swarm.protocol.hop_log import HopLog
from swarm.protocol.limits import ID_END, MAX_NODES, MAX_TELL_NODES, TOKEN_END
from swarm.protocol.messages import Sampling, Snapshot, Sweep, SweepFrame, Tell, Want
from swarm.protocol.pick_rules import (
    MAX_CANDIDATES,
    MAX_DRAWS,
    MAX_GRAMMAR_BYTES,
    DraftDistribution,
    Grammar,
    PickRules,
)
from swarm.protocol.session import Limits
from swarm.protocol.told import Told

LIMITS = Limits(vocab_size=100, window_tokens=64, sweeps=2, nodes=8)
IDS = (TreeNodeId(0), TreeNodeId(1), TreeNodeId(2))
SWEEP = Sweep(1, 0, IDS[0], (7, 8, 9), (None, IDS[0], IDS[0]), IDS[0], sampling=Sampling(5, 0.5), want=Want(True))
TELL = Tell(1, IDS, SWEEP.tokens, SWEEP.sampling, SWEEP.want)
GUESSES = (DraftDistribution(0, (7,), (1.0,), (0,)), DraftDistribution(2, (9,), (0.5,), ()))


@pytest.fixture
def tail() -> HopLog:
    return HopLog(LIMITS, Told(is_new=True))


@pytest.mark.parametrize("is_told_first", [True, False])
def test_a_sweep_runs_when_both_halves_are_there(tail: HopLog, is_told_first: bool) -> None:
    halves: list[Callable[[], bool]] = [
        lambda: tail.hear(TELL),
        lambda: tail.receive(SweepFrame(SWEEP.structure())),
    ]
    first, second = halves if is_told_first else reversed(halves)
    first()
    assert (tail.next_work(), tail.next_rows) == (None, None)
    assert tail.untold == (None if is_told_first else 1)
    second()
    assert (tail.untold, tail.next_rows) == (None, 3)
    work = tail.next_work()
    assert work is not None
    assert work.frame.sweep == SWEEP
    assert tail.executed.child(IDS[0], 9) == IDS[2]
    assert tail.received.live[IDS[0]].told is None, "the chain brought none"


def test_parts_are_one_sweep_and_what_was_told_again_changes_nothing(tail: HopLog) -> None:
    assert not tail.hear(replace(TELL, ids=IDS[:2], tokens=(7, 8), sampling=None, guesses=GUESSES[:1], has_more=True))
    assert tail.told is not None
    assert not tail.told.covers(1)
    assert tail.hear(replace(TELL, ids=IDS[2:], tokens=(9,), guesses=GUESSES[1:]))
    assert not tail.hear(replace(TELL, tokens=(1, 2, 3))), "a stream that was opened again begins before"
    tail.receive(SweepFrame(SWEEP.structure()))
    work = tail.next_work()
    assert work is not None
    assert work.frame.sweep == replace(SWEEP, guesses=GUESSES)


@pytest.mark.parametrize(
    ("tell", "says"),
    [
        (replace(TELL, tokens=(7, 8, 100)), "tokens: one is outside the vocabulary"),
        (replace(TELL, guesses=(DraftDistribution(0, (100,), (1.0,), ()),)), "tokens: one is outside the vocabulary"),
        (
            replace(TELL, sampling=Sampling(rules=PickRules(logit_bias=((100, 1.0),)))),
            "sampling: logit_bias must name token ids below 100",
        ),
        (
            replace(TELL, ids=tuple(map(TreeNodeId, range(89))), tokens=(1,) * 89),
            "tell: the client says more than the session may hold",
        ),
    ],
)
def test_what_no_session_holds_is_refused(tail: HopLog, tell: Tell, says: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        tail.hear(tell)
    assert says in str(caught.value)


def test_a_client_that_says_more_and_more_is_refused(tail: HopLog) -> None:
    for sequence in range(1, 6):
        tail.hear(Tell(sequence, (), ()))
    with pytest.raises(RemoteProtocolError, match="more than the session may hold"):
        tail.hear(Tell(6, (), ()))


@pytest.mark.parametrize(
    ("tell", "field"),
    [
        (replace(TELL, ids=IDS[1:], tokens=(8, 9)), "tell"),
        (replace(TELL, tokens=(7, 8, 8)), "tokens"),
        (replace(TELL, guesses=(replace(GUESSES[0], offset=3),)), "guesses"),
    ],
)
def test_halves_that_do_not_fit_are_refused_without_a_token_in_the_words(tail: HopLog, tell: Tell, field: str) -> None:
    tail.receive(SweepFrame(SWEEP.structure()))
    tail.hear(tell)
    with pytest.raises(RemoteProtocolError) as caught:
        tail.next_work()
    assert caught.value.field == field
    assert not any(str(token) in caught.value.reason for token in (7, 8, 9))


def test_who_has_its_tokens_from_the_chain_is_told_nothing() -> None:
    with pytest.raises(RemoteProtocolError, match="from the chain"):
        HopLog(LIMITS).hear(TELL)


def test_a_snapshot_waits_until_all_its_nodes_are_told() -> None:
    tail = HopLog(LIMITS, Told(is_new=False))
    header = replace(SWEEP, sequence=2, first_id=IDS[1], parents=(None, IDS[1]), tokens=(8, 9), committed=1, acked=1)
    snapshot = Snapshot(
        *(1, 2, 1, TreeNodeId(3), Sampling(), IDS, (), (1, 2, 2)), (None, None, IDS[1]), (header.structure(),)
    )
    tail.restore(snapshot)
    assert tail.is_replaying
    assert tail.untold == 2
    tail.hear(Tell(1, IDS[:1], (7,), Sampling(3)))
    assert tail.next_work() is None
    tail.hear(Tell(2, IDS[1:], (8, 9), want=Want(log_probs=True)))
    assert tail.untold is None
    assert [one.token for one in tail.executed.committed] == [7]
    assert [one.token for one in tail.executed.live.values()] == [8, 9]
    assert tail.executed.sampling == Sampling(3)
    assert [one.want for one in tail.unanswered] == [Want(log_probs=True)]
    assert tail.next_work() is not None


def test_the_largest_tell_fits_and_a_larger_one_is_refused_before_it_is_read() -> None:
    nodes = tuple(TreeNodeId(ID_END - MAX_TELL_NODES + place) for place in range(MAX_TELL_NODES))
    tokens = (TOKEN_END - 1,) * MAX_TELL_NODES
    weights = (0.5,) * MAX_CANDIDATES
    ids = tuple(range(TOKEN_END - MAX_CANDIDATES, TOKEN_END))
    guesses = tuple(
        DraftDistribution(MAX_NODES - MAX_TELL_NODES + place, ids, weights, (MAX_CANDIDATES - 1,) * MAX_DRAWS)
        for place in range(MAX_TELL_NODES)
    )
    biases = tuple((token, 99.5) for token in range(TOKEN_END - 1_024, TOKEN_END))
    rules = PickRules(
        *(ID_END - 1, 2.0, 2.0, 0.5, biases, Grammar("lark", "x" * MAX_GRAMMAR_BYTES)),
        tuple(range(TOKEN_END - 64, TOKEN_END)),
    )
    most = Tell(ID_END - 1, nodes, tokens, Sampling(2**64 - 1, 0.5, rules=rules), Want(True, True, 20, 9), guesses)
    assert wire.decode_replies_up(wire.encode_replies_up(most)) == most
    for more in (
        replace(most, ids=(*nodes, TreeNodeId(1)), tokens=(*tokens, 1)),
        replace(most, ids=nodes[1:]),
        replace(most, guesses=(*guesses, guesses[0])),
        Tell(1, nodes, tokens, Sampling(rules=PickRules(grammar=Grammar("lark", "x" * (1 << 20)), end_tokens=(0,)))),
    ):
        with pytest.raises((RemoteProtocolError, LocalProtocolError)):
            wire.decode_replies_up(wire.encode_replies_up(more))
    with pytest.raises(RemoteProtocolError, match="too many"):
        wire.decode_replies_up(bytes((1 << 20) + 1))
