"""One hop's side of a session as a pure object: sweeps in, work out (rules P6, P7, P9). Owns no KV and no network.

    received   the state after every sweep that arrived, queued ones included
    executed   the state after every sweep that was handed out by `next_work`

A node that died uncommitted in `received` is never run: a later sweep in the queue killed it. One that was committed
is run, even when a truncation cuts it off again further back: its commit needs its KV. Skipped nodes stay in the
rules' state, which follows the client's log alone; only their rows are missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import TreeNodeId
from swarm.protocol.limits import MAX_PROMPT_ROWS
from swarm.protocol.messages import Reply, Rows, Snapshot, Sweep, SweepFrame, Tell, Want
from swarm.protocol.session import Applied, Limits, Parent, SessionState
from swarm.protocol.told import Told

REPLAY_NODES = 512
"""Nodes of a snapshot that are run at a time, each time below what is committed by then."""


@dataclass(frozen=True, slots=True)
class SweepWork:
    """One sweep to execute: change the KV as `applied` says, then run the nodes at `run`.

    Attributes:
        frame: the sweep as it arrived.
        applied: what it changes.
        run: offsets within the sweep of the nodes to run.
        kept_rows: [len(run)] rows of `frame.rows` that belong to them.
        is_replay: part of a snapshot in the form of a sweep; nothing is sent on for it.
    """

    frame: SweepFrame
    applied: Applied
    run: tuple[int, ...]
    kept_rows: tuple[int, ...]
    is_replay: bool = False

    @property
    def nodes(self) -> tuple[TreeNodeId, ...]:
        """The nodes to run."""
        return tuple(self.applied.appended[offset] for offset in self.run)


class HopLog:
    """A session on one hop: receives frames in order, hands out work in order.

    Attributes:
        received: the rules' state after every sweep that arrived.
        executed: the rules' state after every sweep that was handed out.
        pruned: nodes that were not run because a later sweep had killed them, so far.
        unanswered: headers of the sweeps that a snapshot left without a reply.
        told: what the client says itself, at a tail that gets structure alone (P17); None elsewhere. Then `executed`
            has tokens, and `received` may have none.
    """

    def __init__(self, limits: Limits, told: Told | None = None) -> None:
        self.told = told
        self._restored: Snapshot | None = None  # whose tokens were not told yet
        self.received = SessionState(limits)
        self.executed = SessionState(limits)
        self.pruned = 0
        self._queue: deque[SweepFrame] = deque()
        self._replay: deque[SweepWork] = deque()
        self.unanswered: tuple[Sweep, ...] = ()
        self._dead: set[TreeNodeId] = set()
        self._skipped: set[TreeNodeId] = set()

    def __len__(self) -> int:
        return len(self._queue) + len(self._replay) + (self._restored is not None)

    @property
    def is_replaying(self) -> bool:
        """Whether parts of a snapshot still wait to be run."""
        return bool(self._replay) or self._restored is not None

    @property
    def untold(self) -> int | None:
        """The first sweep that waits for the client to say what it holds (P17); None: none does."""
        if self._restored is not None:
            return self._restored.sequence
        told = self.told
        waiting = (frame.sweep.sequence for frame in self._queue if told is not None)
        return next((sequence for sequence in waiting if told is not None and not told.covers(sequence)), None)

    @property
    def _is_next_told(self) -> bool:
        """Whether the first sweep of the queue can be handed out."""
        if self._restored is not None or not self._queue:
            return False
        return self.told is None or self.told.covers(self._queue[0].sweep.sequence)

    @property
    def next_rows(self) -> int | None:
        """Upper bound on the nodes that the next work runs; None when nothing waits, or its tokens were not told."""
        if self._replay:
            return len(self._replay[0].run)
        return self._queue[0].sweep.count if self._is_next_told else None

    def hear(self, tell: Tell) -> bool:
        """The client says what a sweep holds (P17); whether that is news, and all of it.

        Raises:
            RemoteProtocolError: it says more than the session may hold, or what no sweep may have.
        """
        if self.told is None:
            raise RemoteProtocolError("tell", "comes to a machine that has its tokens from the chain")
        is_news = self.told.take(tell, self.received.limits)
        self._begin_replay()
        return is_news

    def limit(self, limits: Limits) -> None:
        """Tighten the limits once those of the hops behind are known (F1)."""
        self.received.limits = limits
        self.executed.limits = limits

    def begin(self, tokens: Sequence[int | None], names: Sequence[bytes]) -> None:
        """Begin with committed tokens that this machine holds (P15), before any sweep."""
        limits = self.received.limits
        self.received = SessionState.begun(limits, tokens, names)
        self.executed = SessionState.begun(limits, tokens, names)

    def receive(self, frame: SweepFrame) -> bool:
        """Queue the next sweep; False when it is a repetition, which is not executed again (P9).

        Raises:
            RemoteProtocolError: the sweep breaks a rule; it consumes no sequence.
            ContextFull: a node would lie beyond the session's window.
        """
        if frame.sweep.sequence <= self.received.sequence:
            return False
        self._check_room(frame.sweep)
        count = frame.sweep.count
        kept = count if frame.kept is None else sum(frame.kept)
        if frame.kept is not None and len(frame.kept) != count:
            raise RemoteProtocolError("kept", f"{len(frame.kept)} flags for {count} nodes")
        if frame.rows is not None and frame.rows.count != kept:
            raise RemoteProtocolError("rows", f"{frame.rows.count} rows for {kept} kept nodes")
        before = self.received.live
        applied = self.received.apply(frame.sweep)
        if applied.path or applied.truncated_to is not None:
            gone = before.keys() - self.received.live.keys() - set(applied.path)
            self._dead |= {node for node in gone if node >= self.executed.next_id}
        self._queue.append(frame)
        return True

    def restore(self, snapshot: Snapshot) -> None:
        """Forget everything and continue from a snapshot (R5).

        Raises:
            RemoteProtocolError: the snapshot makes no sense; nothing is changed.
        """
        limits = self.received.limits
        executed = SessionState.restored(limits, snapshot)
        if self.told is not None:
            self.told.remember(self.executed)
        self.received, self.executed = SessionState.restored(limits, snapshot), executed
        kept = snapshot.kept or (True,) * len(snapshot.ids)
        self._skipped = {node for node, flag in zip(snapshot.ids, kept, strict=True) if not flag}
        self._dead = set()
        self._queue.clear()
        self._replay.clear()
        self._restored = snapshot
        self._begin_replay()

    def _begin_replay(self) -> None:
        """Replay a snapshot, as soon as its tokens are known."""
        snapshot, told = self._restored, self.told
        if snapshot is None or (told is not None and not told.covers_all(snapshot)):
            return
        self._restored = None
        if told is not None:
            snapshot = replace(snapshot, headers=told.fill(snapshot, self.executed))
        self._replay = deque(_replay_of(snapshot, self.executed))
        self.unanswered = snapshot.headers

    def replies(self, picks: Mapping[TreeNodeId, int], generation: int) -> list[Reply]:
        """A new tail's replies to the sweeps that its snapshot left unanswered (R6).

        Args:
            picks: the picks of the replay, by node.
            generation: of the session's route.
        """
        return [
            Reply(
                header.sequence,
                generation,
                tuple(
                    (node, picks[node])
                    for node in map(TreeNodeId, range(header.picks_from, header.end_id))
                    if node in picks
                ),
            )
            for header in self.unanswered
        ]

    def next_work(self) -> SweepWork | None:
        """The next sweep in order, without the nodes that are dead already; None when nothing waits, or is untold.

        Raises:
            RemoteProtocolError: a node is committed that the hop before left out, or the client told what cannot be.
        """
        if self._replay:
            return self._replay.popleft()
        if not self._is_next_told:
            return None
        frame = self._queue.popleft()
        if self.told is not None:
            frame = replace(frame, sweep=self.told.join(frame.sweep))
        applied = self.executed.apply(frame.sweep)
        for node in self._skipped.intersection(applied.path):
            raise RemoteProtocolError("kept", f"node {node} was left out, but sweep {frame.sweep.sequence} commits it")
        self._skipped = {node for node in self._skipped if node in self.executed.live}
        run: list[int] = []
        kept_rows: list[int] = []
        row = -1
        for offset, node in enumerate(applied.appended):
            kept = frame.kept is None or frame.kept[offset]
            row += kept
            if kept and self._must_run(node):
                run.append(offset)
                kept_rows.append(row)
            else:
                self._skipped.add(node)
                self.pruned += kept
        self._dead.difference_update(applied.appended)
        return SweepWork(frame, applied, tuple(run), tuple(kept_rows))

    def has_room(self, sweep: Sweep) -> bool:
        """Whether a sweep may join the queue."""
        try:
            self._check_room(sweep)
        except RemoteProtocolError:
            return False
        return True

    def _check_room(self, sweep: Sweep) -> None:
        """Refuse a sweep beyond twice the credits, whatever the client claims to have acknowledged (F1).

        Twice: a machine that comes back into a chain may hold as many old sweeps, answered elsewhere.
        """
        max_sweeps, max_nodes = 2 * self.received.limits.sweeps, 2 * self.received.limits.nodes
        if len(self._queue) >= max_sweeps:
            raise RemoteProtocolError("sequence", f"more than {max_sweeps} sweeps wait here")
        if sum(frame.sweep.count for frame in self._queue) + sweep.count > max_nodes:
            raise RemoteProtocolError("tokens", f"more than {max_nodes} nodes wait here")

    def _must_run(self, node: TreeNodeId) -> bool:
        """Whether no queued sweep killed the node, and its parent has KV here."""
        return node not in self._dead and self.executed.live[node].parent not in self._skipped


def _replay_of(snapshot: Snapshot, state: SessionState) -> list[SweepWork]:
    """A snapshot as works: committed tokens in chunks, each committed by the next, and the live nodes at last.

    They ask for the pick of every node for which an unanswered sweep asks, committed ones too (R6).
    """
    kept = snapshot.kept or (True,) * len(snapshot.ids)
    rows = list(accumulate(kept, initial=0))
    unanswered = [
        node for header in snapshot.headers for node in snapshot.ids if header.picks_from <= node < header.end_id
    ]
    picks_from = min(unanswered, default=snapshot.next_id)
    want = _union(snapshot.headers, picks_from)
    works: list[SweepWork] = []
    path: tuple[TreeNodeId, ...] = ()
    cuts = [*range(0, snapshot.committed, REPLAY_NODES), snapshot.committed]
    for start, end in zip(cuts, (*cuts[1:], len(snapshot.ids)), strict=True):
        places = [place for place in range(start, end) if kept[place]]
        ids = tuple(snapshot.ids[place] for place in places)
        is_live = start == snapshot.committed
        parents: tuple[Parent, ...]
        if is_live:
            parents = tuple(snapshot.parents[place] for place in places)
            positions = tuple(state.live[node].position for node in ids)
        else:
            parents, positions = (None, *ids[:-1]), tuple(places)
        sweep = Sweep(
            sequence=0,
            committed=start,
            first_id=ids[0] if ids else snapshot.next_id,
            tokens=tuple(snapshot.tokens[place] for place in places) if snapshot.tokens else (),
            parents=parents,
            picks_from=picks_from,
            want=want,
        )
        applied = Applied(None if works else 0, path, (), ids, positions)
        every = tuple(range(len(ids)))
        part = _slice_rows(snapshot.rows, [rows[place] for place in places])
        works.append(SweepWork(SweepFrame(sweep, None, part), applied, every, every, is_replay=True))
        path = ids
    return works


def _union(headers: Iterable[Sweep], picks_from: int) -> Want | None:
    """All that any of these sweeps asks for; rows of prompts count back from the `picks_from` that the replay has."""
    found = [(header.want, header.prompt_nodes) for header in headers if header.want is not None]
    if not found:
        return None
    rows_from = min((nodes.start for _, nodes in found if nodes), default=picks_from)
    return Want(
        log_probs=any(want.log_probs for want, _ in found),
        hidden_rows=any(want.hidden_rows for want, _ in found),
        top_log_probs=max(want.top_log_probs for want, _ in found),
        prompt_rows=min(max(0, picks_from - rows_from), MAX_PROMPT_ROWS),
    )


def _slice_rows(rows: Rows | None, places: list[int]) -> Rows | None:
    """The rows at consecutive places, as a view of the same bytes."""
    if rows is None or not places:
        return None if rows is None else Rows(rows.codec, 0, rows.width, b"")
    size = rows.codec.row_bytes(rows.width)
    data = memoryview(rows.data)[places[0] * size : (places[-1] + 1) * size]
    return Rows(rows.codec, len(places), rows.width, data)
