"""What a machine can replay of a session, and to whom it must send a snapshot (R4, R5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from swarm.base.ids import TreeNodeId
from swarm.protocol.journal import Journal
from swarm.protocol.messages import Codec, Rows, Sampling, Snapshot, Sweep, SweepFrame
from swarm.protocol.pick_rules import PickRules
from swarm.protocol.session import Applied, Limits, SessionState

LIMITS = Limits(vocab_size=100, window_tokens=50, sweeps=8, nodes=32)
Nodes = Sequence[tuple[int, int | None]]


def ids(*nodes: int) -> tuple[TreeNodeId, ...]:
    return tuple(TreeNodeId(node) for node in nodes)


def rows_of(*nodes: int) -> Rows:
    """Rows that say whose they are."""
    return Rows(Codec.FP32, len(nodes), 1, b"".join(node.to_bytes(4, "little") for node in nodes))


def nodes_in(rows: Rows | None) -> list[int]:
    assert rows is not None
    assert len(rows.data) == rows.size_bytes
    return [int.from_bytes(rows.data[start : start + 4], "little") for start in range(0, 4 * rows.count, 4)]


class Machine:
    """A hop, or with `has_rows` false a client: the rules' state and the journal, sweep by sweep."""

    def __init__(self, *, has_rows: bool = True) -> None:
        self.state = SessionState(LIMITS)
        self.journal = Journal(self.state)
        self.has_rows = has_rows
        self.sweeps: list[Sweep] = []

    def run(
        self,
        nodes: Nodes = (),
        commit: int | None = None,
        truncate: int | None = None,
        acked: int = 0,
        pruned: Sequence[int] = (),
    ) -> None:
        state = self.state
        commit_to = None if commit is None else TreeNodeId(commit)
        length = len(state.committed) if truncate is None else truncate
        sweep = Sweep(
            sequence=state.sequence + 1,
            committed=length + (0 if commit_to is None else len(state.path_to(commit_to))),
            first_id=state.next_id,
            tokens=tuple(token for token, _ in nodes),
            parents=tuple(None if parent is None else TreeNodeId(parent) for _, parent in nodes),
            picks_from=state.next_id,
            acked=acked,
            truncate_to=truncate,
            commit_to=commit_to,
        )
        applied = state.apply(sweep)
        self.sweeps.append(sweep)
        self.journal.note(sweep)
        if self.has_rows:
            ran = [node for node in applied.appended if node not in pruned]
            self.journal.keep(applied, ran, rows_of(*ran))

    def snapshot(self) -> Snapshot:
        return self.journal.snapshot()

    def kept(self) -> list[int]:
        return nodes_in(self.snapshot().rows)


def test_a_snapshot_has_committed_then_live_nodes_with_their_rows() -> None:
    machine = Machine()
    machine.run([(1, None), (2, 0)])
    machine.run([(3, None), (4, None), (5, 2)], commit=1, acked=1)
    machine.run([(6, 4)], commit=2, acked=1)
    assert machine.snapshot() == Snapshot(
        committed=3,
        sequence=3,
        acked=1,
        next_id=TreeNodeId(6),
        sampling=Sampling(),
        ids=ids(0, 1, 2, 4, 5),
        tokens=(1, 2, 3, 5, 6),
        sequences=(1, 1, 2, 2, 3),
        parents=(None, *ids(0, 1), None, *ids(4)),
        headers=tuple(machine.sweeps[1:]),
        kept=None,
        rows=rows_of(0, 1, 2, 4, 5),
    )


def test_a_snapshot_leads_to_the_same_state() -> None:
    machine = Machine()
    machine.run([(1, None), (2, None), (3, 0), (4, 1)])
    machine.run([(5, 2), (7, 4), (6, None)], commit=0, acked=1)
    machine.state.sampling = Sampling(seed=3, temperature=1.0)
    restored = SessionState.restored(LIMITS, machine.snapshot())
    assert vars(restored) == vars(machine.state)


def test_a_client_has_no_rows() -> None:
    client = Machine(has_rows=False)
    client.run([(1, None), (2, None)])
    assert (client.snapshot().rows, client.snapshot().kept) == (None, None)
    assert client.journal.replay(0) == [SweepFrame(client.sweeps[0])]
    assert client.journal.size_bytes == 0


def test_pruned_nodes_are_flagged_and_have_no_row() -> None:
    machine = Machine()
    machine.run([(1, None), (2, None), (3, 1)], pruned=[1, 2])
    assert machine.snapshot().kept == (True, False, False)
    assert machine.kept() == [0]
    assert machine.journal.replay(0) == [SweepFrame(machine.sweeps[0], (True, False, False), rows_of(0))]


def test_rows_end_with_their_nodes() -> None:
    machine = Machine()
    machine.run([(1, None), (2, None), (3, 0), (4, 1)])
    assert (machine.journal.size_bytes, machine.kept()) == (16, [0, 1, 2, 3])
    machine.run(commit=0)
    assert (machine.journal.size_bytes, machine.kept()) == (8, [0, 2])
    machine.run([(5, None)], truncate=0)
    assert (machine.journal.size_bytes, machine.kept()) == (4, [4])


def test_a_truncation_keeps_the_rows_before_it() -> None:
    machine = Machine()
    machine.run([(1, None), (2, 0), (3, 1)])
    machine.run([(4, None)], commit=2)
    machine.run([(5, None)], truncate=2)
    assert machine.kept() == [0, 1, 4]


def test_headers_are_kept_until_they_are_acked() -> None:
    machine = Machine()
    for token in range(4):
        machine.run([(token, None)])
    machine.run(acked=3)
    assert [header.sequence for header in machine.snapshot().headers] == [4, 5]
    assert machine.journal.since(3) == [
        SweepFrame(machine.sweeps[3], None, rows_of(3)),
        SweepFrame(machine.sweeps[4], None, rows_of()),
    ]
    assert machine.journal.since(2) is None


def test_a_catch_up_sweep_has_the_rows_that_survive() -> None:
    machine = Machine()
    machine.run([(1, None)])
    machine.run([(2, None), (3, None), (4, 1)])
    machine.run([(5, 2)])
    machine.run(commit=1)
    assert machine.journal.since(1) == [
        SweepFrame(machine.sweeps[1], (True, False, True), rows_of(1, 3)),
        SweepFrame(machine.sweeps[2], (False,), rows_of()),
        SweepFrame(machine.sweeps[3], None, rows_of()),
    ]


def test_what_a_successor_gets_depends_on_what_it_received() -> None:
    machine = Machine()
    assert machine.journal.replay(None) == []
    machine.run([(1, None)])
    machine.run([(2, 0)])
    assert machine.journal.replay(None) == [machine.snapshot()]
    assert machine.journal.replay(1) == [SweepFrame(machine.sweeps[1], None, rows_of(1))]
    assert machine.journal.replay(2) == []
    assert machine.journal.replay(7) == []  # it heard another predecessor, which was further
    machine.run(acked=2)
    assert machine.journal.replay(1) == [machine.snapshot()]


def test_a_truncation_among_the_missing_sweeps_needs_a_snapshot() -> None:
    machine = Machine()
    machine.run([(1, None), (2, 0)])
    machine.run([(3, None)], commit=1)
    machine.run([(4, None)], truncate=1)
    machine.run([(5, None)])
    assert machine.journal.since(1) is None
    assert machine.journal.since(2) is None
    assert machine.journal.since(3) == [SweepFrame(machine.sweeps[3], None, rows_of(4))]


def test_a_dropped_journal_keeps_no_rows_and_replays_nothing() -> None:
    machine = Machine()
    machine.run([(1, None)])
    machine.journal.drop()
    machine.run([(2, 0)])
    assert machine.journal.is_dropped
    assert machine.journal.size_bytes == 0
    with pytest.raises(AssertionError, match="given up"):
        machine.journal.replay(None)


def test_a_replayed_machine_can_replay_again() -> None:
    source, machine = Machine(), Machine()
    source.run([(1, None), (2, 0)])
    source.run([(3, None)], commit=1)
    snapshot = source.snapshot()
    machine.journal.drop()
    state = SessionState.restored(LIMITS, snapshot)
    machine.journal.restored(state, snapshot.headers)
    assert not machine.journal.is_dropped
    machine.journal.keep(_appended(source, 0), ids(0, 1), rows_of(0, 1))
    machine.journal.keep(_appended(source, 1), ids(2), rows_of(2))
    assert machine.snapshot() == snapshot
    assert machine.journal.replay(1) == source.journal.replay(1)


def _appended(source: Machine, place: int) -> Applied:
    """What a sweep changed."""
    state = SessionState(LIMITS)
    return [state.apply(sweep) for sweep in source.sweeps[: place + 1]][-1]


def test_a_snapshot_keeps_the_last_sampling_of_its_headers_alone() -> None:
    """Rules of picks may be large; whoever goes on from it sends a later machine what still counts."""
    machine = Machine()
    for number in range(3):
        machine.run([(number, None)])
    first, second = (Sampling(rules=PickRules(frequency_penalty=penalty)) for penalty in (1.0, 2.0))
    for number, sampling in ((1, first), (2, second)):
        machine.journal._headers[number] = replace(machine.sweeps[number - 1], sampling=sampling)
    assert [header.sampling for header in machine.snapshot().headers] == [None, second, None]
    later = machine.journal.since(1)
    assert later is not None
    assert [frame.sweep.sampling for frame in later] == [second, None]
