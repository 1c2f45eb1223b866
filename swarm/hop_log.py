"""One hop's side of a session as a pure object: sweeps in, work out (PROTOCOL P6, P7, P9). No KV, no network.

    received   the state after every sweep that arrived, queued ones included
    executed   the state after every sweep that was handed out by `next_work`

A node that died uncommitted in `received` is never run: a later sweep in the queue killed it. One that was committed
is run, even when a truncation cuts it off again further back: its commit needs its KV. Skipped nodes stay in the
rules' state, which follows the client's log alone; only their rows are missing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from swarm.errors import RemoteProtocolError
from swarm.ids import TreeNodeId
from swarm.messages import SweepFrame
from swarm.session import Applied, Limits, SessionState


@dataclass(frozen=True, slots=True)
class SweepWork:
    """One sweep to execute: change the KV as `applied` says, then run the nodes at `run`.

    run: offsets within the sweep of the nodes to run; `kept_rows` are the matching rows of `frame.rows`.
    """

    frame: SweepFrame
    applied: Applied
    run: tuple[int, ...]
    kept_rows: tuple[int, ...]


class HopLog:
    """A session on one hop: receives frames in order, hands out work in order."""

    def __init__(self, limits: Limits) -> None:
        self.received = SessionState(limits)
        self.executed = SessionState(limits)
        self.pruned = 0
        self._queue: deque[SweepFrame] = deque()
        self._dead: set[TreeNodeId] = set()
        self._skipped: set[TreeNodeId] = set()

    def __len__(self) -> int:
        return len(self._queue)

    def limit(self, limits: Limits) -> None:
        """Tighten the limits once those of the hops behind are known (F1)."""
        self.received.limits = limits
        self.executed.limits = limits

    def receive(self, frame: SweepFrame) -> bool:
        """Queue the next sweep; False when it is a repetition, which is not executed again (P9).

        Raises:
            RemoteProtocolError: the sweep breaks a rule; it consumes no sequence.
            ContextFull: a node would lie beyond the session's window.
        """
        if frame.sweep.sequence <= self.received.sequence:
            return False
        kept = len(frame.sweep.tokens) if frame.kept is None else sum(frame.kept)
        if frame.kept is not None and len(frame.kept) != len(frame.sweep.tokens):
            raise RemoteProtocolError("kept", f"{len(frame.kept)} flags for {len(frame.sweep.tokens)} nodes")
        if frame.rows is not None and frame.rows.count != kept:
            raise RemoteProtocolError("rows", f"{frame.rows.count} rows for {kept} kept nodes")
        before = self.received.live
        applied = self.received.apply(frame.sweep)
        if applied.path or applied.truncated_to is not None:
            gone = before.keys() - self.received.live.keys() - set(applied.path)
            self._dead |= {node for node in gone if node >= self.executed.next_id}
        self._queue.append(frame)
        return True

    def next_work(self) -> SweepWork | None:
        """The next sweep in order, without the nodes that are dead already; None when nothing waits.

        Raises:
            RemoteProtocolError: a node is committed that the hop before left out.
        """
        if not self._queue:
            return None
        frame = self._queue.popleft()
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
            if kept and self._is_wanted(node):
                run.append(offset)
                kept_rows.append(row)
            else:
                self._skipped.add(node)
                self.pruned += kept
        self._dead.difference_update(applied.appended)
        return SweepWork(frame, applied, tuple(run), tuple(kept_rows))

    def _is_wanted(self, node: TreeNodeId) -> bool:
        return node not in self._dead and self.executed.live[node].parent not in self._skipped
