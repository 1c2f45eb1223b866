"""The repair rules under faults: hundreds of random schedules, and what breaks when one rule is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

import swarm.protocol.hop_log
from benchmarks.simulation.fake_chain import ForgetfulLog, GlancingLog
from benchmarks.simulation.repair_chain import Hop, Stream
from benchmarks.simulation.repair_world import SchedulePlan, World
from swarm.base.errors import RemoteProtocolError, SwarmError
from swarm.base.ids import TreeNodeId
from swarm.protocol.hop_log import SweepWork
from swarm.protocol.journal import Journal
from swarm.protocol.messages import Rows, Snapshot, SweepFrame
from swarm.protocol.session import Applied

OFTEN = {  # at least, in a block of 200 schedules
    "killed hop 0": 40,
    "killed tail": 30,
    "killed together": 10,
    "killed all": 10,
    "killed in prefill": 3,
    "killed at work": 8,
    "killed idle": 20,
    "killed in repair": 30,
    "killed in replay": 10,
    "split brain": 50,
    "fenced off": 8,
    "came back with old state": 2,
    "stale Attach": 1,
    "cut streams": 20,
    "lost Attach": 3,
    "lost Reroute": 6,
    "lost Ready": 1,
    "deadlines": 60,
    "dropped journals": 20,
    "asked for a replay": 2,
    "restored with KV behind": 15,
    "rerouted in band": 150,
    "snapshots": 300,
    "catch-ups": 60,
    "computed again": 200,
    "replies again": 60,
    "repetitions": 60,
    "one became two": 3,
    "two became one": 3,
    "took over": 6,
    "restarts during repair": 2,
    "sweeps during repair": 200,
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm.protocol.hop_log, "REPLAY_NODES", 3)


@pytest.mark.parametrize("block", range(4))
def test_any_faults_leave_the_text_of_plain_decoding(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(200 * block, 200 * block + 200):
        world = World(seed)
        world.run()
        seen += world.seen
    assert {kind: seen[kind] for kind, least in OFTEN.items() if seen[kind] < least} == {}


def failures(plan: SchedulePlan, seeds: range, enough: int = 3) -> list[str]:
    """Why schedules fail; no more are run when enough have failed."""
    reasons: list[str] = []
    for seed in seeds:
        try:
            World(seed, plan).run()
        except (AssertionError, SwarmError) as error:
            reasons.append(str(error).partition("\n")[0])
            if len(reasons) == enough:
                break
    return reasons


class Unfenced(Hop):
    def hears(self, stream: Stream) -> bool:
        return True


def test_without_the_fence_a_machine_left_behind_disturbs_the_session() -> None:
    """R3: its snapshots and rows come from an older state, or from other layers."""
    reasons = failures(SchedulePlan(make_hop=Unfenced), range(400))
    assert len(reasons) == 3
    assert any(" after " in reason for reason in reasons), "no sweep was missing"


class ExecutedOnly(Hop):
    """Answers Attach with what it has executed, and not with what waits here."""

    def received(self) -> int | None:
        return None if self.journal.is_dropped else self.log.executed.sequence or None


class StrictLog(GlancingLog):
    """Takes a repetition for an error (breaks P9)."""

    def receive(self, frame: SweepFrame) -> bool:
        if not super().receive(frame):
            raise RemoteProtocolError("sequence", "came twice")
        return True


def test_without_received_in_the_answer_to_attach_waiting_sweeps_come_twice() -> None:
    """R4. P9 drops them, so the text is right; what is lost is their way. Where P9 is broken too, sessions end."""
    orderly, seeds = SchedulePlan(zombies_return=False, repetitions=0), range(100, 200)
    assert repetitions(orderly, seeds) == 0
    assert repetitions(replace(orderly, make_hop=ExecutedOnly), seeds) > 0
    strict = replace(orderly, make_log=StrictLog, make_hop=ExecutedOnly)
    assert failures(strict, seeds, enough=1) == ["sequence: came twice"]


def repetitions(plan: SchedulePlan, seeds: range) -> int:
    """Sweeps that a hop got and had already."""
    worlds = [World(seed, plan) for seed in seeds]
    for world in worlds:
        world.run()
    return sum(world.seen["repetitions"] for world in worlds)


def test_a_skipped_node_that_is_forgotten_has_descendants_without_kv() -> None:
    """P7."""
    reasons = failures(SchedulePlan(make_log=ForgetfulLog), range(300))
    assert len(reasons) == 3
    assert all("has no KV here" in reason for reason in reasons)


class ShortTail(Hop):
    """After a replay, picks for live nodes only."""

    def answer(self, work: SweepWork, wanted: dict[TreeNodeId, int]) -> None:
        live = self.log.executed.live
        super().answer(work, {node: token for node, token in wanted.items() if not work.is_replay or node in live})


def test_a_new_tail_owes_the_picks_of_committed_nodes_too() -> None:
    """R6."""
    reasons = failures(SchedulePlan(make_hop=ShortTail), range(60))
    assert len(reasons) == 3
    assert all("cannot be dead" in reason for reason in reasons)


def test_without_a_deadline_a_lost_message_ends_the_session() -> None:
    """R7."""
    reasons = failures(SchedulePlan(has_deadline=False), range(100))
    assert len(reasons) == 3
    assert all("stuck" in reason for reason in reasons)


class Impatient(Hop):
    """Replays while a sweep runs: the rules' state has it, the journal has neither its header nor its rows."""

    @property
    def is_busy(self) -> bool:
        return self.log.is_replaying


def test_a_replay_waits_for_the_sweep_in_work() -> None:
    assert len(failures(SchedulePlan(make_hop=Impatient), range(100))) == 3


class Complacent(Hop):
    """After a replay, takes its successor to have what it sent it before, and nothing else to be due."""

    def restore(self, snapshot: Snapshot) -> None:
        owed = self.owes
        super().restore(snapshot)
        self.owes = owed


def test_whoever_was_replayed_replays_to_its_successor() -> None:
    reasons = failures(SchedulePlan(make_hop=Complacent), range(60))
    assert len(reasons) == 3
    assert all("stuck" in reason or " after " in reason for reason in reasons)


class TooTrusting(Hop):
    """Sends a Reroute in band although nobody has answered the stream's Attach yet."""

    def follow(self) -> None:
        if self.link is not None and not self.link.is_noticed:
            self.link.is_attached = True
        super().follow()


def test_in_band_is_only_for_streams_that_were_answered() -> None:
    """R2: an Attach that was lost is never made up for."""
    assert "stuck" in failures(SchedulePlan(make_hop=TooTrusting), range(200), enough=1)[0]


def test_the_rows_of_a_commit_stay_in_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """R5."""
    keep = Journal.keep

    def too_little(journal: Journal, applied: Applied, nodes: Sequence[TreeNodeId], rows: Rows) -> None:
        keep(journal, replace(applied, path=applied.path[1:]), nodes, rows)

    monkeypatch.setattr(Journal, "keep", too_little)
    assert len(failures(SchedulePlan(), range(60))) == 3


def test_a_truncation_is_not_replayed_as_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """R5: it ended nodes that an earlier one of these sweeps commits."""

    def as_sweeps(journal: Journal, received: int) -> list[SweepFrame] | None:
        headers = [journal._headers.get(number) for number in range(received + 1, journal.state.sequence + 1)]
        found = [header for header in headers if header is not None]
        return [journal._catch_up(header) for header in found] if len(found) == len(headers) else None

    monkeypatch.setattr(Journal, "since", as_sweeps)
    reasons = failures(SchedulePlan(restarts=4), range(600), enough=1)
    assert reasons
    assert "was left out" in reasons[0] or "has no KV here" in reasons[0]
