"""A whole chain on the pure code: client walk, three hops with KV bookkeeping, links that deliver when they like.

The target is fake: its pick is a function of the path that a node's KV rows really spell, so a row in the wrong place,
a wrong ancestor or a wrong order changes the text. Plain decoding with the same function is the oracle.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from client.walk import Walk
from swarm.errors import ProtocolError
from swarm.hop_log import HopLog, SweepWork
from swarm.ids import TreeNodeId
from swarm.messages import Codec, Reply, Rows, Sampling, Sweep, SweepFrame
from swarm.session import Limits, Parent
from swarm.slots import Slots
from swarm.tree import DraftTree

HOPS = 3
VOCAB = 3
NEW_TOKENS = 25
ID_BYTES = 8


def target(path: Sequence[int]) -> int:
    """The fake target's pick after a path of tokens."""
    state = 7
    for token in path:
        state = (state * 31 + token + 1) % 1_000_003
    return (state >> 3) % VOCAB


class Hop:
    """One machine: its log, its slots and the token in every KV row."""

    def __init__(self, limits: Limits) -> None:
        self.log = HopLog(limits)
        self.slots = Slots(limits.window_tokens + limits.nodes)
        self.tokens = [-1] * self.slots.capacity
        self.ran: set[TreeNodeId] = set()

    def execute(self, work: SweepWork) -> list[tuple[TreeNodeId, int]]:
        """Run a sweep's wanted nodes; returns the pick after each, read from the KV rows that the node sees."""
        sweep, applied = work.frame.sweep, work.applied
        if applied.truncated_to is not None:
            self.slots.truncate(applied.truncated_to)
        if applied.path:
            start = self.slots.committed
            moves = self.slots.commit(applied.path, applied.survivors).tolist()
            self.tokens[start : start + len(moves)] = [self.tokens[slot] for slot in moves]
        nodes = [applied.appended[offset] for offset in work.run]
        first = self.slots.used
        self.tokens[first : first + len(nodes)] = [sweep.tokens[offset] for offset in work.run]
        positions = [applied.positions[offset] for offset in work.run]
        mask = self.slots.append(nodes, [sweep.parents[offset] for offset in work.run], positions)
        self.slots.check_integrity()
        self.ran.update(nodes)
        committed = self.slots.committed
        live = self.tokens[committed : self.slots.used]
        picks = []
        for node, row, position in zip(nodes, mask.tolist(), positions, strict=True):
            path = self.tokens[:committed] + [token for token, sees in zip(live, row, strict=True) if sees]
            assert len(path) == position + 1
            picks.append((node, target(path)))
        return picks


class Simulation:
    """One session at a random pace; every check that needs the whole picture is made here."""

    def __init__(self, seed: int, make_log: Callable[[Limits, random.Random], HopLog] | None = None) -> None:
        self.chance = random.Random(seed)
        chance = self.chance
        self.prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 7))]
        self.limits = Limits(VOCAB, window_tokens=80, sweeps=chance.randint(1, 6), nodes=chance.choice([2, 5, 12, 40]))
        self.walk = Walk(self.limits, Sampling())
        self.hops = [Hop(self.limits) for _ in range(HOPS)]
        if make_log is not None:
            for hop in self.hops:
                hop.log = make_log(self.limits, chance)
        self.links: list[deque[SweepFrame]] = [deque() for _ in range(HOPS)]
        self.replies: deque[Reply] = deque()
        self.states: dict[int, object] = {}
        self.unanswered: dict[int, int] = {}
        self.pruned: set[TreeNodeId] = set()
        self.text: list[int] = []
        self.left = list(self.prompt)
        self.restarts = chance.randint(0, 2)
        self.seen: Counter[str] = Counter()

    def run(self) -> None:
        while len(self.text) < NEW_TOKENS:
            able: list[Callable[[], None]] = [partial(self.receive, n) for n in range(HOPS) if self.links[n]]
            able += [partial(self.step, n) for n in range(HOPS) if len(self.hops[n].log)]
            able += [self.answer] if self.replies else []
            if self.left or self.walk.pending is not None:
                assert able or self.walk.room > 0, "stuck: nothing travels and nothing may be sent"
            else:
                assert able, "stuck: all is answered and the walk still waits"
            able += [self.send] if self.walk.room > 0 else []
            if (
                self.restarts
                and self.text
                and len(self.unanswered) < self.limits.sweeps
                and self.chance.random() < 0.05
            ):
                able = [self.restart]
            self.chance.choice(able)()
        plain = list(self.prompt)
        while len(plain) < len(self.prompt) + len(self.text):
            plain.append(target(plain))
        assert self.prompt + self.text == plain, "another text than plain decoding's"

    def send(self) -> None:
        self.dispatch(self.make_sweep())

    def restart(self) -> None:
        """Another turn in the same session, whatever is in flight: some of the text stays and some is new."""
        self.restarts -= 1
        so_far = [*self.prompt, *self.text]
        so_far = so_far[: self.chance.randint(0, len(so_far))]
        self.prompt = (so_far + [self.chance.randrange(VOCAB) for _ in range(4)])[: self.chance.randint(1, 25)]
        self.text = []
        commit, kept = self.walk.restart(self.prompt, Sampling())
        if commit is not None:
            self.dispatch(commit)
        self.left = self.prompt[kept:-1]
        self.seen["kept"] += kept
        self.seen["restarts in flight"] += bool(self.unanswered)

    def dispatch(self, sweep: Sweep) -> None:
        self.unanswered[sweep.sequence] = len(sweep.tokens)
        assert len(self.unanswered) <= self.limits.sweeps
        assert sum(self.unanswered.values()) <= self.limits.nodes
        assert len(self.walk.state.live) <= self.limits.nodes
        self.states[sweep.sequence] = state_of(self.walk)
        live = self.walk.state.live
        self.seen["in-flight parents"] += sum(
            parent is not None and parent < sweep.first_id and live[parent].sequence in self.unanswered
            for parent in sweep.parents
        )
        self.seen["ahead of replies"] += len(self.unanswered) > 1
        self.links[0].append(SweepFrame(sweep))
        self.check_certain()

    def make_sweep(self) -> Sweep:
        chance, room = self.chance, self.walk.room
        if self.left:
            count = min(room, chance.randint(1, 4))
            chunk, self.left = self.left[:count], self.left[count:]
            return self.walk.prefill(chunk, last=not self.left and self.walk.pending is None)
        if self.walk.pending is not None:
            return self.walk.extend(self.random_tree(min(room - 1, chance.randint(0, 8))))
        return self.grow(min(room, chance.randint(0, 5)))

    def random_tree(self, count: int) -> DraftTree:
        children: set[tuple[int | None, int]] = set()
        for _ in range(count):
            parent = self.chance.choice([None, *range(len(children))])
            children.add((parent, self.chance.randrange(VOCAB)))
        pairs: list[tuple[int | None, int]] = []
        for parent, token in sorted(children, key=lambda pair: -1 if pair[0] is None else pair[0]):
            if parent is None or parent < len(pairs):
                pairs.append((parent, token))
        return DraftTree(tuple(token for _, token in pairs), tuple(parent for parent, _ in pairs), (1.0,) * len(pairs))

    def grow(self, count: int) -> Sweep:
        """A sweep of nodes at and below the certain node, under parents whose picks are mostly still in flight."""
        state, certain = self.walk.state, self.walk.certain
        assert certain is not None
        inside = certain in state.live
        able = [certain, *state.below(certain if inside else None)]
        tokens: list[int] = []
        parents: list[TreeNodeId] = []
        for _ in range(count):
            parent, token = self.chance.choice(able), self.chance.randrange(VOCAB)
            older = state.child(parent if inside or parent != certain else None, token) is not None
            if not older and (parent, token) not in zip(parents, tokens, strict=True):
                able.append(TreeNodeId(state.next_id + len(tokens)))
                tokens.append(token)
                parents.append(parent)
        return self.walk.grow(tokens, parents)

    def receive(self, place: int) -> None:
        frame = self.links[place].popleft()
        assert self.hops[place].log.receive(frame)
        if self.chance.random() < 0.05:
            assert not self.hops[place].log.receive(frame)  # a repetition (P9)

    def step(self, place: int) -> None:
        hop = self.hops[place]
        work = hop.log.next_work()
        assert work is not None
        frame, sweep = work.frame, work.frame.sweep
        if frame.rows is not None:
            assert [row_id(frame.rows, row) for row in work.kept_rows] == [work.applied.appended[o] for o in work.run]
        picks = hop.execute(work)
        assert state_of(hop.log.executed) == self.states[sweep.sequence]
        self.pruned |= set(work.applied.appended) - hop.ran
        assert place == 0 or hop.ran <= self.hops[place - 1].ran
        self.seen["pruned"] += sum(frame.kept or [True] * len(sweep.tokens)) - len(work.run)
        self.seen["emptied"] += bool(sweep.tokens) and not work.run
        self.check_certain()
        if place == HOPS - 1:
            wanted = tuple((node, token) for node, token in picks if node >= sweep.picks_from)
            self.replies.append(Reply(sweep.sequence, 0, wanted))
            return
        ids = b"".join(node.to_bytes(ID_BYTES, "little") for node, _ in picks)
        kept = tuple(offset in work.run for offset in range(len(sweep.tokens)))
        self.links[place + 1].append(SweepFrame(sweep, kept, Rows(Codec.FP32, len(picks), ID_BYTES // 4, ids)))

    def answer(self) -> None:
        reply = self.replies.popleft()
        self.text += self.walk.accept(reply)
        self.unanswered.pop(reply.sequence)
        if self.chance.random() < 0.05:
            assert self.walk.accept(reply) == []
        self.check_certain()

    def check_certain(self) -> None:
        assert self.walk.certain not in self.pruned, "the walk waits for a pruned node"


def state_of(owner: Walk | object) -> object:
    """What client and hops must agree on."""
    state = owner.state if isinstance(owner, Walk) else owner
    return (list(state.committed), list(state.live.items()), state.next_id, state.acked)  # type: ignore[attr-defined]


def row_id(rows: Rows, row: int) -> int:
    return int.from_bytes(rows.data[row * ID_BYTES : (row + 1) * ID_BYTES], "little")


@pytest.mark.parametrize("block", range(3))
def test_any_pace_gives_the_text_of_plain_decoding(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(100 * block, 100 * block + 100):
        simulation = Simulation(seed)
        simulation.run()
        seen += simulation.seen
    assert seen["in-flight parents"] > 1_000
    assert seen["ahead of replies"] > 1_000
    assert seen["pruned"] > 100
    assert seen["emptied"] > 10
    assert seen["kept"] > 200
    assert seen["restarts in flight"] > 20


class GlancingLog(HopLog):
    """Looks into its queue only now and then, as a hop may whose look-ahead is bounded."""

    def __init__(self, limits: Limits, chance: random.Random) -> None:
        super().__init__(limits)
        self.chance = chance

    def _is_wanted(self, node: TreeNodeId) -> bool:
        dead = node in self._dead and self.chance.random() < 0.5
        return not dead and self.executed.live[node].parent not in self._skipped


class ForgetfulLog(GlancingLog):
    """The same without stickiness: it runs nodes below one that it skipped (breaks P7)."""

    def _is_wanted(self, node: TreeNodeId) -> bool:
        return node not in self._dead or self.chance.random() < 0.5


class EagerLog(HopLog):
    """Skips living nodes too."""

    def __init__(self, limits: Limits, chance: random.Random) -> None:
        super().__init__(limits)
        self.chance = chance

    def _is_wanted(self, node: TreeNodeId) -> bool:
        return super()._is_wanted(node) and self.chance.random() < 0.99


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
    append = Slots.append

    def to_an_uncle(slots: Slots, ids: list[TreeNodeId], parents: list[Parent], positions: list[int]) -> object:
        """Depths stay right, so that only the text can tell."""
        place = dict(zip([*slots.ids, *ids], [*slots.positions[slots.committed :].tolist(), *positions], strict=True))
        oldest = {position: node for node, position in sorted(place.items(), reverse=True)}
        return append(slots, ids, [parent and oldest[place[parent]] for parent in parents], positions)

    monkeypatch.setattr(Slots, "append", to_an_uncle)
    assert failures(None, because="another text") > 3


def test_a_wrong_order_of_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Slots.commit
    monkeypatch.setattr(Slots, "commit", lambda slots, path, survivors: commit(slots, path, survivors)[::-1])
    assert failures(None) > 20
