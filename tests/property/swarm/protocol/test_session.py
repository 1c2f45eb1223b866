"""Random logs of sweeps against a naive model: a sequence is a list of ids, and a live node is its whole path.

The model holds for every node the ids from the start of the text down to it, and knows no parents, positions or slots.
    a commit of X       the text becomes X's path; nodes whose path goes on from it survive
    a truncation to L   the text is cut; no node survives
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.base.errors import ProtocolError
from swarm.base.ids import TreeNodeId
from swarm.compute.kv_slots import KvSlots
from swarm.protocol.hop_log import HopLog
from swarm.protocol.messages import Sweep, SweepFrame
from swarm.protocol.session import Limits, SessionState

LIMITS = Limits(vocab_size=5, window_tokens=10_000, sweeps=100, nodes=10_000)
Path = tuple[TreeNodeId, ...]


@dataclass
class Model:
    """The naive oracle."""

    text: Path = ()
    paths: dict[TreeNodeId, Path] = field(default_factory=dict)
    tokens: dict[TreeNodeId, int] = field(default_factory=dict)

    def commit(self, node: TreeNodeId) -> None:
        self.text = self.paths[node]
        length = len(self.text)
        self.paths = {
            other: path for other, path in self.paths.items() if path[:length] == self.text and len(path) > length
        }

    def truncate(self, length: int) -> None:
        self.text, self.paths = self.text[:length], {}

    def append(self, token: int, parent: TreeNodeId | None) -> None:
        node = TreeNodeId(len(self.tokens))
        self.tokens[node] = token
        self.paths[node] = (*(self.text if parent is None else self.paths[parent]), node)

    def child_tokens(self, parent: TreeNodeId | None) -> set[int]:
        above = self.text if parent is None else self.paths[parent]
        return {self.tokens[node] for node, path in self.paths.items() if path[:-1] == above}


@dataclass(frozen=True)
class Step:
    """Choices for one sweep; numbers are taken modulo what there is to choose from."""

    truncate: int | None
    commit: int | None
    nodes: tuple[tuple[int, int], ...]


number = st.integers(0, 30)
steps = st.builds(
    Step,
    st.one_of(st.none(), st.none(), st.none(), number),
    st.one_of(st.none(), number),
    st.lists(st.tuples(number, number), max_size=7).map(tuple),
)
logs = st.lists(steps, min_size=1, max_size=12)


def play(model: Model, log: list[Step], skipped: set[TreeNodeId] | None = None) -> Iterator[Sweep]:
    """Turn choices into legal sweeps and apply each to the model; nodes in `skipped` are never committed."""
    for sequence, step in enumerate(log, start=1):
        truncate_to = commit_to = None
        able = [node for node, path in model.paths.items() if not (skipped or set()).intersection(path)]
        if step.truncate is not None:
            truncate_to = step.truncate % (len(model.text) + 1)
            model.truncate(truncate_to)
        elif step.commit is not None and able:
            commit_to = able[step.commit % len(able)]
            model.commit(commit_to)
        first, committed = TreeNodeId(len(model.tokens)), len(model.text)
        tokens: list[int] = []
        parents: list[TreeNodeId | None] = []
        for where, token in step.nodes:
            parent = [None, *model.paths][where % (len(model.paths) + 1)]
            if token % LIMITS.vocab_size not in model.child_tokens(parent):
                tokens.append(token % LIMITS.vocab_size)
                parents.append(parent)
                model.append(tokens[-1], parent)
        yield Sweep(
            sequence=sequence,
            committed=committed,
            first_id=first,
            tokens=tuple(tokens),
            parents=tuple(parents),
            picks_from=first,
            truncate_to=truncate_to,
            commit_to=commit_to,
        )


def agree(state: SessionState, model: Model) -> None:
    assert [(entry.id, entry.token) for entry in state.committed] == [(node, model.tokens[node]) for node in model.text]
    assert list(state.live) == sorted(model.paths)
    for node, path in model.paths.items():
        live = state.live[node]
        assert (live.token, live.position) == (model.tokens[node], len(path) - 1)  # n + depth
        assert (*model.text, *state.path_to(node)) == path
        parent = path[-2] if len(path) > len(model.text) + 1 else None
        assert live.parent == parent
        assert state.child(parent, live.token) == node
        assert state.below(node) == tuple(
            sorted(n for n, p in model.paths.items() if p[: len(path)] == path and n != node)
        )
    for parent in (None, *model.paths):
        for token in range(LIMITS.vocab_size):
            assert (state.child(parent, token) is not None) == (token in model.child_tokens(parent))
    assert {node for node in model.tokens if state.is_alive(node)} == {*model.text, *model.paths}


@given(logs)
def test_the_state_is_the_models(log: list[Step]) -> None:
    model, state = Model(), SessionState(LIMITS)
    for sweep in play(model, log):
        applied = state.apply(sweep)
        agree(state, model)
        survivors = [node for node in sorted(model.paths) if node < sweep.first_id]
        assert list(applied.survivors) == survivors
        assert applied.appended == tuple(node for node in sorted(model.paths) if node >= sweep.first_id)
        assert applied.positions == tuple(len(model.paths[node]) - 1 for node in applied.appended)


@given(logs, st.integers(0, 2**32))
def test_a_refused_sweep_changes_nothing(log: list[Step], seed: int) -> None:
    chance = random.Random(seed)
    model, state = Model(), SessionState(LIMITS)
    for sweep in play(model, log):
        before = repr(vars(state))
        for _ in range(3):
            with pytest.raises(ProtocolError):
                state.apply(garble(sweep, chance))
            assert repr(vars(state)) == before
        state.apply(sweep)


def garble(sweep: Sweep, chance: random.Random) -> Sweep:
    """The sweep with one field that is surely wrong."""
    wrong = TreeNodeId(sweep.first_id + len(sweep.tokens) + chance.randrange(9))
    return chance.choice(
        [
            replace(sweep, sequence=sweep.sequence + chance.choice([-1, 1, 7])),
            replace(sweep, committed=sweep.committed + chance.choice([-1, 1, 7])),
            replace(sweep, first_id=TreeNodeId(sweep.first_id + chance.choice([-1, 1, 7]))),
            replace(sweep, acked=sweep.sequence),
            replace(sweep, commit_to=wrong),
            replace(sweep, tokens=(*sweep.tokens, 1)),
            replace(sweep, tokens=(*sweep.tokens, 1), parents=(*sweep.parents, TreeNodeId(wrong + 1))),
            replace(sweep, tokens=(*sweep.tokens, LIMITS.vocab_size), parents=(*sweep.parents, None)),
        ]
    )


class Memory:
    """The ids that lie in a session's KV rows, moved exactly as the slots say."""

    def __init__(self) -> None:
        self.slots = KvSlots(capacity=200)
        self.rows = np.full(200, -1)

    def commit(self, path: Path, survivors: Path) -> None:
        start = self.slots.committed
        moves = self.slots.commit(path, survivors)
        assert (np.diff(moves) > 0).all()
        assert (moves >= np.arange(start, start + len(moves))).all()
        self.rows[start : start + len(moves)] = self.rows[moves]
        self.rows[self.slots.used :] = -1

    def append(self, ids: Path, parents: list[TreeNodeId | None], positions: list[int]) -> list[Path]:
        """Returns what each new node sees, in slot order."""
        mask = self.slots.append(ids, parents, positions)
        first, used = self.slots.used - len(ids), self.slots.used
        self.rows[first:used] = ids
        prefix = self.rows[: self.slots.committed].tolist()
        live = self.rows[self.slots.committed : used]
        return [(*prefix, *(TreeNodeId(node) for node in live[row].tolist())) for row in mask]

    def agrees(self, model: Model, skipped: set[TreeNodeId]) -> None:
        self.slots.check_integrity()
        held = [node for node in sorted(model.paths) if node not in skipped]
        assert self.rows[: self.slots.used].tolist() == [*model.text, *held]
        assert self.slots.positions.tolist() == [*range(len(model.text)), *(len(model.paths[n]) - 1 for n in held)]


@given(logs, st.integers(0, 2**32))
def test_kv_rows_follow_the_model(log: list[Step], seed: int) -> None:
    chance = random.Random(seed)
    model, state, memory, skipped = Model(), SessionState(LIMITS), Memory(), set[TreeNodeId]()
    for sweep in play(model, log, skipped):
        applied = state.apply(sweep)
        if applied.truncated_to is not None:
            memory.slots.truncate(applied.truncated_to)
        if applied.path:
            memory.commit(applied.path, applied.survivors)
        run = []
        for offset, node in enumerate(applied.appended):
            if sweep.parents[offset] in skipped or chance.random() < 0.2:
                skipped.add(node)
            else:
                run.append(offset)
        ids = tuple(applied.appended[offset] for offset in run)
        seen = memory.append(ids, [sweep.parents[o] for o in run], [applied.positions[o] for o in run])
        assert seen == [model.paths[node] for node in ids]
        memory.agrees(model, skipped)


@given(logs, st.integers(0, 2**32))
def test_pruning_in_a_chain_never_skips_what_is_committed(log: list[Step], seed: int) -> None:
    """Three hops take a random log, truncations included, at random paces: each ends with the model's KV."""
    chance = random.Random(seed)
    model = Model()
    links = [deque(SweepFrame(sweep) for sweep in play(model, log)), deque[SweepFrame](), deque[SweepFrame]()]
    hops, memories = [HopLog(LIMITS) for _ in links], [Memory() for _ in links]
    skipped: list[set[TreeNodeId]] = [set() for _ in links]
    while any(links) or any(map(len, hops)):
        place = chance.randrange(3)
        if links[place] and chance.random() < 0.6:
            hops[place].receive(links[place].popleft())
        elif (work := hops[place].next_work()) is not None:
            sweep, applied, memory = work.frame.sweep, work.applied, memories[place]
            if applied.truncated_to is not None:
                memory.slots.truncate(applied.truncated_to)
            if applied.path:
                memory.commit(applied.path, applied.survivors)
            ids = tuple(applied.appended[offset] for offset in work.run)
            memory.append(ids, [sweep.parents[o] for o in work.run], [applied.positions[o] for o in work.run])
            skipped[place] |= set(applied.appended) - set(ids)
            if place < 2:
                links[place + 1].append(SweepFrame(sweep, tuple(o in work.run for o in range(len(sweep.tokens)))))
    for hop, memory, dead in zip(hops, memories, skipped, strict=True):
        agree(hop.executed, model)
        memory.agrees(model, dead)
        assert not dead.intersection([*model.text, *model.paths])  # whatever is alive in the end was run
    assert skipped[0] <= skipped[1] <= skipped[2]
