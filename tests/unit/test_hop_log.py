"""One hop's order of receiving, pruning and executing (P6, P7, P9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from swarm.errors import ProtocolError, RemoteProtocolError
from swarm.hop_log import HopLog, SweepWork
from swarm.ids import TreeNodeId
from swarm.messages import Codec, Rows, Sampling, Sweep, SweepFrame
from swarm.session import Limits, SessionState

LIMITS = Limits(vocab_size=100, window_tokens=50, sweeps=8, nodes=32)


class Sender:
    """A client that makes legal sweeps ahead of every reply."""

    def __init__(self) -> None:
        self.state = SessionState(LIMITS)

    def make(
        self, nodes: Sequence[tuple[int, int | None]] = (), commit: int | None = None, truncate: int | None = None
    ) -> Sweep:
        commit_to = None if commit is None else TreeNodeId(commit)
        length = len(self.state.committed) if truncate is None else truncate
        sweep = Sweep(
            sequence=self.state.sequence + 1,
            committed=length + (0 if commit_to is None else len(self.state.path_to(commit_to))),
            first_id=self.state.next_id,
            tokens=tuple(token for token, _ in nodes),
            parents=tuple(None if parent is None else TreeNodeId(parent) for _, parent in nodes),
            picks_from=self.state.next_id,
            commit_to=commit_to,
            truncate_to=truncate,
        )
        self.state.apply(sweep)
        return sweep


def work(log: HopLog) -> SweepWork:
    step = log.next_work()
    assert step is not None
    return step


def test_sweeps_are_handed_out_in_order_and_whole() -> None:
    client, log = Sender(), HopLog(LIMITS)
    sweeps = [client.make([(1, None), (2, 0)]), client.make([(3, 1)])]
    for sweep in sweeps:
        assert log.receive(SweepFrame(sweep))
    assert len(log) == 2
    assert [(step.frame.sweep, step.run, step.kept_rows) for step in (work(log), work(log))] == [
        (sweeps[0], (0, 1), (0, 1)),
        (sweeps[1], (0,), (0,)),
    ]
    assert log.next_work() is None
    assert log.executed.live == client.state.live


def test_a_queued_commit_prunes_the_nodes_that_it_kills() -> None:
    client, log = Sender(), HopLog(LIMITS)
    log.receive(SweepFrame(client.make([(1, None), (2, None), (3, 0), (4, 1)])))
    log.receive(SweepFrame(client.make([(5, None), (6, 2)], commit=0)))
    step = work(log)
    assert step.run == (0, 2)  # nodes 1 and 3 die when 0 is committed
    assert log.pruned == 2
    assert list(log.executed.live) == [0, 1, 2, 3]  # the rules' state follows the client alone (P1)
    assert work(log).run == (0, 1)
    assert log.executed.live == client.state.live


def test_a_sweep_that_pruning_emptied_is_still_handed_out() -> None:
    client, log = Sender(), HopLog(LIMITS)
    log.receive(SweepFrame(client.make([(1, None), (2, None)])))
    log.receive(SweepFrame(client.make([(3, 1), (4, 1)])))
    log.receive(SweepFrame(client.make(commit=0)))
    assert [work(log).run, work(log).run, work(log).run] == [(0,), (), ()]


def test_a_commit_that_arrives_too_late_prunes_nothing() -> None:
    client, log = Sender(), HopLog(LIMITS)
    log.receive(SweepFrame(client.make([(1, None), (2, None)])))
    assert work(log).run == (0, 1)
    log.receive(SweepFrame(client.make([(3, None)], commit=0)))
    assert work(log).run == (0,)
    assert log.pruned == 0


def test_a_committed_node_is_run_though_a_queued_truncation_cuts_it_off() -> None:
    client, log = Sender(), HopLog(LIMITS)
    log.receive(SweepFrame(client.make([(1, None), (2, 0), (3, 0)])))
    log.receive(SweepFrame(client.make([(4, None)], commit=1)))
    log.receive(SweepFrame(client.make([(5, None)], truncate=1)))
    assert work(log).run == (0, 1)  # the second sweep commits both, so their KV must be there; node 2 dies
    assert work(log).run == ()  # node 3 was live when the truncation came
    assert work(log).run == (0,)


def test_nodes_that_the_hop_before_left_out_stay_dead_with_all_below() -> None:
    client, log = Sender(), HopLog(LIMITS)
    rows = Rows(Codec.FP32, count=2, width=1, data=bytes(8))
    log.receive(SweepFrame(client.make([(1, None), (2, None), (3, None)]), kept=(True, False, True), rows=rows))
    log.receive(SweepFrame(client.make([(4, 0), (5, 1), (6, 2)])))
    log.receive(SweepFrame(client.make([(7, 4), (8, 5)])))
    step = work(log)
    assert (step.run, step.kept_rows) == ((0, 2), (0, 1))
    assert (work(log).run, work(log).run) == ((0, 2), (1,))


def test_rows_are_counted_over_kept_nodes() -> None:
    client, log = Sender(), HopLog(LIMITS)
    sweep = client.make([(1, None), (2, None), (3, None), (4, 2)])
    log.receive(SweepFrame(sweep, (False, True, True, True), Rows(Codec.FP32, 3, 1, bytes(12))))
    log.receive(SweepFrame(client.make(commit=2)))
    step = work(log)
    assert (step.run, step.kept_rows) == ((2, 3), (1, 2))
    assert log.pruned == 1  # node 1, here; node 0 was pruned before


def test_committing_what_the_hop_before_left_out_is_its_fault() -> None:
    client, log = Sender(), HopLog(LIMITS)
    log.receive(SweepFrame(client.make([(1, None), (2, None)]), kept=(False, True)))
    log.receive(SweepFrame(client.make(commit=0)))
    work(log)
    with pytest.raises(RemoteProtocolError, match="node 0"):
        log.next_work()


def test_a_repetition_is_not_executed_again() -> None:
    client, log = Sender(), HopLog(LIMITS)
    first, second = SweepFrame(client.make([(1, None)])), SweepFrame(client.make([(2, 0)]))
    assert log.receive(first)
    assert not log.receive(first)
    assert log.receive(second)
    assert not log.receive(first)
    work(log), work(log)
    assert not log.receive(second)
    assert log.next_work() is None


def test_a_refused_sweep_consumes_no_sequence() -> None:
    client, log = Sender(), HopLog(LIMITS)
    sweep = client.make([(1, None), (2, None)])
    later = client.make([(3, 1)])
    rows = Rows(Codec.FP32, count=2, width=1, data=bytes(8))
    for field, frame in (
        ("kept", SweepFrame(sweep, kept=(True,))),
        ("rows", SweepFrame(sweep, kept=(True, False), rows=rows)),
        ("rows", SweepFrame(sweep, rows=replace(rows, count=3))),
        ("tokens", SweepFrame(replace(sweep, tokens=(1, 1)))),
        ("sequence", SweepFrame(later)),
    ):
        with pytest.raises(ProtocolError) as caught:
            log.receive(frame)
        assert caught.value.field == field
        assert len(log) == 0
    assert log.receive(SweepFrame(sweep))
    assert log.receive(SweepFrame(later))


def test_sampling_of_the_executed_sweep_is_not_that_of_a_queued_one() -> None:
    client, log = Sender(), HopLog(LIMITS)
    cold, warm = Sampling(seed=1), Sampling(seed=2, temperature=1.0)
    log.receive(SweepFrame(replace(client.make([(1, None)]), sampling=cold)))
    log.receive(SweepFrame(replace(client.make([(2, 0)]), sampling=warm)))
    work(log)
    assert log.executed.sampling == cold
    work(log)
    assert log.executed.sampling == warm
