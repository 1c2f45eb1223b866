"""A whole chain on the pure code: client walk, three hops with KV bookkeeping, links that deliver when they like.

Nothing is lost here and nobody dies: see `test_repair_simulation` for that.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

import pytest

from benchmarks.simulation.fake_chain import FakeSpan, ForgetfulLog, GlancingLog, SweepWriter, pick, rows_of
from swarm.base.errors import ProtocolError
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.kv_slots import KvSlots
from swarm.protocol.hop_log import HopLog
from swarm.protocol.messages import Reply, Sweep, SweepFrame
from swarm.protocol.session import Limits, Parent, SessionState

SPANS = (Span(0, 1), Span(1, 3), Span(3, 4))
NEW_TOKENS = 25


class Hop:
    """One machine: its log, its KV and which nodes it ran."""

    def __init__(self, log: HopLog, span: Span) -> None:
        self.log = log
        self.machine = FakeSpan(log.received.limits, span)
        self.ran: set[TreeNodeId] = set()


class Simulation:
    """One session at a random pace; every check that needs the whole picture is made here."""

    def __init__(self, seed: int, make_log: Callable[[Limits, random.Random], HopLog] | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.writer = SweepWriter(rng, widest=8)
        self.walk, self.limits = self.writer.walk, self.writer.limits
        logs = [HopLog(self.limits) if make_log is None else make_log(self.limits, rng) for _ in SPANS]
        self.hops = [Hop(log, span) for log, span in zip(logs, SPANS, strict=True)]
        self.links: list[deque[SweepFrame]] = [deque() for _ in SPANS]
        self.replies: deque[Reply] = deque()
        self.states: dict[int, object] = {}
        self.unanswered: dict[int, int] = {}
        self.pruned: set[TreeNodeId] = set()
        self.restarts = rng.randint(0, 2)
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        writer, places = self.writer, range(len(SPANS))
        while len(writer.text) < NEW_TOKENS:
            able: list[Callable[[], None]] = [partial(self.receive, n) for n in places if self.links[n]]
            able += [partial(self.step, n) for n in places if len(self.hops[n].log)]
            able += [self.answer] if self.replies else []
            if writer.must_send:
                assert able or writer.can_send, "stuck: nothing travels and nothing may be sent"
            else:
                assert able, "stuck: all is answered and the walk still waits"
            able += [self.send] if writer.can_send else []
            if self.restarts and writer.can_restart and self.rng.random() < 0.05:
                able = [self.restart]
            self.rng.choice(able)()
        writer.check_text()

    def send(self) -> None:
        self.dispatch(self.writer.sweep())

    def restart(self) -> None:
        self.restarts -= 1
        commit, kept = self.writer.restart()
        if commit is not None:
            self.dispatch(commit)
        self.seen["kept"] += kept
        self.seen["restarts in flight"] += bool(self.unanswered)

    def dispatch(self, sweep: Sweep) -> None:
        self.unanswered[sweep.sequence] = len(sweep.tokens)
        assert len(self.unanswered) <= self.limits.sweeps
        assert sum(self.unanswered.values()) <= self.limits.nodes
        assert len(self.walk.state.live) <= self.limits.nodes
        self.states[sweep.sequence] = state_of(self.walk.state)
        live = self.walk.state.live
        self.seen["in-flight parents"] += sum(
            parent is not None and parent < sweep.first_id and live[parent].sequence in self.unanswered
            for parent in sweep.parents
        )
        self.seen["ahead of replies"] += len(self.unanswered) > 1
        self.links[0].append(SweepFrame(sweep))
        self.check_certain()

    def receive(self, place: int) -> None:
        frame = self.links[place].popleft()
        assert self.hops[place].log.receive(frame)
        if self.rng.random() < 0.05:
            assert not self.hops[place].log.receive(frame)  # a repetition (P9)

    def step(self, place: int) -> None:
        hop = self.hops[place]
        work = hop.log.next_work()
        assert work is not None
        frame, sweep = work.frame, work.frame.sweep
        values = hop.machine.execute(work)
        hop.ran.update(work.nodes)
        assert state_of(hop.log.executed) == self.states[sweep.sequence]
        self.pruned |= set(work.applied.appended) - hop.ran
        assert place == 0 or hop.ran <= self.hops[place - 1].ran
        self.seen["pruned"] += sum(frame.kept or [True] * len(sweep.tokens)) - len(work.run)
        self.seen["emptied"] += bool(sweep.tokens) and not work.run
        self.check_certain()
        if place + 1 == len(self.hops):
            picks = ((node, pick(value)) for node, value in zip(work.nodes, values, strict=True))
            self.replies.append(
                Reply(sweep.sequence, 0, tuple(entry for entry in picks if entry[0] >= sweep.picks_from))
            )
            return
        kept = tuple(offset in work.run for offset in range(len(sweep.tokens)))
        self.links[place + 1].append(SweepFrame(sweep, kept, rows_of(values)))

    def answer(self) -> None:
        reply = self.replies.popleft()
        self.writer.accept(reply)
        self.unanswered.pop(reply.sequence)
        if self.rng.random() < 0.05:
            assert self.walk.accept(reply) == []
        self.check_certain()

    def check_certain(self) -> None:
        assert self.walk.certain not in self.pruned, "the walk waits for a pruned node"


def state_of(state: SessionState) -> object:
    """What client and hops must agree on."""
    return (list(state.committed), list(state.live.items()), state.next_id, state.acked)


@pytest.mark.parametrize("block", range(3))
def test_any_pace_gives_the_text_of_plain_decoding(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(50 * block, 50 * block + 50):
        simulation = Simulation(seed)
        simulation.run()
        seen += simulation.seen
    assert seen["in-flight parents"] > 500
    assert seen["ahead of replies"] > 500
    assert seen["pruned"] > 50
    assert seen["emptied"] > 5
    assert seen["kept"] > 100
    assert seen["restarts in flight"] > 8


class EagerLog(HopLog):
    """Skips living nodes too."""

    def __init__(self, limits: Limits, rng: random.Random) -> None:
        super().__init__(limits)
        self.rng = rng

    def _must_run(self, node: TreeNodeId) -> bool:
        return super()._must_run(node) and self.rng.random() < 0.99


def failures(make_log: Callable[[Limits, random.Random], HopLog] | None, because: str = "") -> int:
    """How many of 40 sessions fail, for the reason given."""
    failed = 0
    for seed in range(40):
        try:
            Simulation(seed, make_log).run()
        except (AssertionError, ProtocolError) as error:
            failed += because in str(error)
    return failed


def test_pruning_less_is_allowed_but_not_forgetting_what_was_pruned() -> None:
    assert failures(GlancingLog) == 0
    assert failures(ForgetfulLog, because="has no KV here") > 0


def test_skipping_a_living_node_is_noticed() -> None:
    assert failures(EagerLog) > 20


def test_an_uncle_in_place_of_the_parent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    append = KvSlots.append

    def to_an_uncle(slots: KvSlots, ids: list[TreeNodeId], parents: list[Parent], positions: list[int]) -> object:
        """Depths stay right, so that only the text can tell."""
        place = dict(zip([*slots.ids, *ids], [*slots.positions[slots.committed :].tolist(), *positions], strict=True))
        oldest = {position: node for node, position in sorted(place.items(), reverse=True)}
        return append(slots, ids, [parent and oldest[place[parent]] for parent in parents], positions)

    monkeypatch.setattr(KvSlots, "append", to_an_uncle)
    assert failures(None, because="another text") > 3


def test_a_wrong_order_of_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = KvSlots.commit
    monkeypatch.setattr(KvSlots, "commit", lambda slots, path, survivors: commit(slots, path, survivors)[::-1])
    assert failures(None) > 20
