"""One hop's order of receiving, pruning and executing (P6, P7, P9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

import swarm.protocol.hop_log
from swarm.base.errors import ProtocolError, RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.protocol.hop_log import HopLog, SweepWork
from swarm.protocol.journal import Journal
from swarm.protocol.messages import Codec, Reply, Rows, Sampling, Snapshot, Sweep, SweepFrame, Want
from swarm.protocol.session import Applied, Limits, SessionState

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


def test_how_many_nodes_come_next_is_known_before_they_are_handed_out() -> None:
    client, log = Sender(), HopLog(LIMITS)
    known = [log.next_rows]
    for nodes in ([(1, None), (2, 0)], [(3, 1)]):
        log.receive(SweepFrame(client.make(nodes)))
        known.append(log.next_rows)
    for _ in range(2):
        work(log)
        known.append(log.next_rows)
    assert known == [None, 2, 2, 1, None]


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


def acking(sweep: Sweep) -> SweepFrame:
    """The sweep of a client that says it has the replies to all before."""
    return SweepFrame(replace(sweep, acked=sweep.sequence - 1))


def test_no_more_waits_than_twice_the_credits_whatever_is_acked() -> None:
    small = replace(LIMITS, sweeps=2, nodes=8)
    log, client = HopLog(small), Sender()
    for token in range(4):
        log.receive(acking(client.make([(token, None)])))
    fifth = acking(client.make())
    with pytest.raises(RemoteProtocolError, match="more than 4 sweeps wait here"):
        log.receive(fifth)
    work(log)
    assert log.receive(fifth)


def test_no_more_nodes_wait_than_twice_the_credits_whatever_is_acked() -> None:
    log, client = HopLog(replace(LIMITS, sweeps=3, nodes=5)), Sender()
    log.receive(acking(client.make([(token, None) for token in range(5)])))
    log.receive(acking(client.make([(token, None) for token in range(5)], commit=0)))
    third = acking(client.make([(9, None)], commit=5))
    with pytest.raises(RemoteProtocolError, match="more than 10 nodes wait here"):
        log.receive(third)
    work(log)
    assert log.receive(third)


def node_ids(*nodes: int) -> tuple[TreeNodeId, ...]:
    return tuple(TreeNodeId(node) for node in nodes)


class Source:
    """A client that notes what it sends, as the machine before a new hop."""

    def __init__(self) -> None:
        self.client = Sender()
        self.journal = Journal(self.client.state)

    def make(
        self, nodes: Sequence[tuple[int, int | None]] = (), commit: int | None = None, truncate: int | None = None
    ) -> Sweep:
        sweep = self.client.make(nodes, commit, truncate)
        self.journal.note(sweep)
        return sweep

    def grown(self) -> Snapshot:
        """Committed: 0, 1, 2. Live: 3 below the tip, 5 below 3, 6 below the tip. Nothing is acked."""
        self.make([(1, None), (2, 0), (3, 1)])
        self.make([(4, None), (5, None), (6, 3)], commit=2)
        self.make([(7, None)])
        snapshot = self.journal.snapshot()
        assert snapshot.ids == node_ids(0, 1, 2, 3, 4, 5, 6)
        return snapshot


def test_a_snapshot_is_replayed_in_chunks_and_its_live_nodes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm.protocol.hop_log, "REPLAY_NODES", 2)
    log, snapshot = HopLog(LIMITS), Source().grown()
    log.restore(snapshot)
    assert (len(log), log.is_replaying) == (3, True)
    steps = [work(log) for _ in range(3)]
    assert [step.applied for step in steps] == [
        Applied(0, (), (), node_ids(0, 1), (0, 1)),
        Applied(None, node_ids(0, 1), (), node_ids(2), (2,)),
        Applied(None, node_ids(2), (), node_ids(3, 4, 5, 6), (3, 3, 4, 3)),
    ]
    assert [step.frame.sweep.parents for step in steps] == [(None, 0), (None,), (None, None, 3, None)]
    assert [step.frame.sweep.tokens for step in steps] == [(1, 2), (3,), (4, 5, 6, 7)]
    assert all(step.is_replay and step.run == tuple(range(len(step.nodes))) == step.kept_rows for step in steps)
    assert log.next_work() is None
    assert not log.is_replaying


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_whole_chunks_and_an_empty_sequence_are_replayed_too(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(swarm.protocol.hop_log, "REPLAY_NODES", chunk)
    log, snapshot = HopLog(LIMITS), Source().grown()
    log.restore(snapshot)
    nodes = [node for step in iter(log.next_work, None) for node in step.nodes]
    assert nodes == [*snapshot.ids]
    source = Source()
    source.make([(1, None)])
    log.restore(source.journal.snapshot())
    assert [step.applied for step in iter(log.next_work, None)] == [Applied(0, (), (), node_ids(0), (0,))]


def test_a_restored_log_goes_on_with_the_next_sweep_and_forgets_its_queue() -> None:
    source, log = Source(), HopLog(LIMITS)
    other = Sender()
    log.receive(SweepFrame(other.make([(9, None)])))
    log.restore(source.grown())
    assert vars(log.executed) == vars(source.client.state) == vars(log.received)
    assert not log.receive(SweepFrame(other.make()))  # a repetition of what the snapshot holds
    sweep = source.make([(8, 5)], commit=3)
    assert log.receive(SweepFrame(sweep))
    assert [work(log).is_replay for _ in range(len(log))] == [True, True, False]
    assert vars(log.executed) == vars(source.client.state)


def test_a_replay_has_rows_of_the_kept_nodes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm.protocol.hop_log, "REPLAY_NODES", 2)
    source, log = Source(), HopLog(LIMITS)
    kept = (True, True, True, False, True, False, True)
    rows = Rows(Codec.FP32, 5, 1, b"".join(bytes([node] * 4) for node in (0, 1, 2, 4, 6)))
    log.restore(replace(source.grown(), kept=kept, rows=rows))
    parts = [(step.nodes, step.frame.rows) for step in iter(log.next_work, None)]
    assert [nodes for nodes, _ in parts] == [(0, 1), (2,), (4, 6)]
    assert [bytes(part.data)[::4] for _, part in parts if part is not None] == [b"\0\1", b"\2", b"\4\6"]
    log.receive(SweepFrame(source.make([(8, 5), (9, 6)])))  # 5 was left out: what is below it dies on arrival (P7)
    assert work(log).run == (1,)
    log.receive(SweepFrame(source.make(commit=3)))
    with pytest.raises(RemoteProtocolError, match="node 3 was left out"):
        log.next_work()


def test_a_refused_snapshot_changes_nothing() -> None:
    client, log = Sender(), HopLog(LIMITS)
    first = client.make([(1, None)])
    log.receive(SweepFrame(first))
    with pytest.raises(RemoteProtocolError, match="headers"):
        log.restore(replace(Source().grown(), headers=()))
    assert (len(log), log.received.sequence) == (1, 1)
    assert work(log).frame.sweep is first


def test_a_new_tail_answers_what_was_unanswered_committed_nodes_too() -> None:
    log, snapshot = HopLog(LIMITS), Source().grown()
    log.restore(snapshot)
    assert [step.frame.sweep.picks_from for step in iter(log.next_work, None)] == [0, 0]
    picks = {node: 10 + node for node in node_ids(0, 1, 2, 3, 4, 6)}  # 5 has none: it was left out
    assert log.replies(picks, generation=4) == [
        Reply(1, 4, ((TreeNodeId(0), 10), (TreeNodeId(1), 11), (TreeNodeId(2), 12))),
        Reply(2, 4, ((TreeNodeId(3), 13), (TreeNodeId(4), 14))),
        Reply(3, 4, ((TreeNodeId(6), 16),)),
    ]


def test_a_new_tail_owes_no_picks_of_answered_or_forced_nodes() -> None:
    source, log = Source(), HopLog(LIMITS)
    source.make([(1, None), (2, 0)])
    forced = replace(source.client.make([(3, None), (4, 2)], commit=1), acked=1, picks_from=TreeNodeId(3))
    state = SessionState(LIMITS)
    journal = Journal(state)
    for sweep in (source.journal.snapshot().headers[0], forced):
        state.apply(sweep)
        journal.note(sweep)
    log.restore(journal.snapshot())
    assert [step.frame.sweep.picks_from for step in iter(log.next_work, None)] == [3, 3]
    every = dict.fromkeys(node_ids(0, 1, 2, 3), 1)
    assert log.replies(every, generation=1) == [Reply(2, 1, ((TreeNodeId(3), 1),))]


def test_a_new_tail_keeps_the_rows_that_unanswered_parts_of_a_prompt_ask_for() -> None:
    source, log = Source(), HopLog(LIMITS)
    source.make([(1, None), (2, 0)])
    parts = [replace(source.journal.snapshot().headers[0], picks_from=TreeNodeId(2), want=Want(prompt_rows=1))]
    parts.append(Sweep(2, 2, TreeNodeId(2), (3, 4), (None, TreeNodeId(2)), TreeNodeId(4), commit_to=TreeNodeId(1)))
    parts[1] = replace(parts[1], want=Want(prompt_rows=2))
    journal = Journal(SessionState(LIMITS))
    for sweep in parts:
        journal.state.apply(sweep)
        journal.note(sweep)
    log.restore(journal.snapshot())
    wants = [(step.frame.sweep.picks_from, step.frame.sweep.want) for step in iter(log.next_work, None)]
    assert wants == [(4, Want(prompt_rows=3))] * 2, "of nodes 1, 2 and 3"
    assert [list(header.prompt_nodes) for header in log.unanswered] == [[1], [2, 3]]
