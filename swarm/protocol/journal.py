"""What a machine keeps of a session so that it alone can replay it to its successor (R4, R5). Pure; sends nothing.

    headers   of every sweep beyond `acked`
    rows      this machine's output for committed and live nodes, by node; the client has none: its successor embeds ids

A successor that received sweep r gets the later ones again (a catch-up sweep is its header and those of its rows that
survive), any other one a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

from swarm.base.ids import TreeNodeId
from swarm.protocol.messages import Codec, Rows, Sampling, Snapshot, Sweep, SweepFrame
from swarm.protocol.session import Applied, SessionState


class Journal:
    """One session's journal.

    Attributes:
        state: the rules' state after the newest sweep that was noted.
        is_dropped: whether the rows were given up for want of memory (R8).
        row_bytes: size of one kept row.
    """

    def __init__(self, state: SessionState, *, is_bare: bool = False) -> None:
        """Keep nothing yet.

        Args:
            state: the rules' state, which goes on.
            is_bare: what is replayed is structure alone (P17).
        """
        self.state = state
        self._is_bare = is_bare
        self.is_dropped = False
        self.row_bytes = 0
        self._headers: dict[int, Sweep] = {}
        self._committed: dict[TreeNodeId, bytes] = {}
        self._live: dict[TreeNodeId, bytes] = {}
        self._form: tuple[Codec, int] | None = None

    @property
    def size_bytes(self) -> int:
        """Memory of the rows."""
        return self.row_bytes * (len(self._committed) + len(self._live))

    def drop(self) -> None:
        """Give the rows up for want of memory: this machine cannot replay any more (R8)."""
        self.is_dropped = True
        self._committed, self._live = {}, {}

    def note(self, sweep: Sweep) -> None:
        """Keep a header; `state` has applied it already."""
        self._headers[sweep.sequence] = self._kept_header(sweep)
        self._headers = {number: kept for number, kept in self._headers.items() if number > self.state.acked}

    def keep(self, applied: Applied, nodes: Sequence[TreeNodeId], rows: Rows) -> None:
        """Keep a sweep's output rows, one per node of `nodes`, and forget those of nodes that the sweep ended."""
        if self.is_dropped:
            return
        if applied.truncated_to is not None:
            left = {token.id for token in self.state.committed}
            self._committed = {node: row for node, row in self._committed.items() if node in left}
            self._live = {}
        if applied.path:
            self._committed |= {node: self._live[node] for node in applied.path if node in self._live}
            self._live = {node: self._live[node] for node in applied.survivors if node in self._live}
        self._form = (rows.codec, rows.width)
        size = self.row_bytes = rows.codec.row_bytes(rows.width)
        data = bytes(rows.data)
        self._live |= {node: data[row * size : (row + 1) * size] for row, node in enumerate(nodes)}

    def restored(self, state: SessionState, headers: Iterable[Sweep]) -> None:
        """Begin again from a snapshot; its rows come with `keep`."""
        self.state, self.is_dropped = state, False
        self._headers = {header.sequence: self._kept_header(header) for header in headers}
        self._committed, self._live = {}, {}

    def begin(self, state: SessionState, rows: Iterable[Rows]) -> None:
        """Begin with committed tokens, and with their rows, block after block (P15)."""
        self.state = state
        ids = iter(state.committed)
        for block in rows:
            self._form, self.row_bytes = (block.codec, block.width), block.codec.row_bytes(block.width)
            for row, token in enumerate(islice(ids, block.count)):
                self._committed[token.id] = bytes(block.row(row).data)

    def block(self, start: int, end: int) -> Rows | None:
        """The rows of committed tokens [start, end); None where some are missing."""
        ids = [token.id for token in self.state.committed[start:end]]
        if self._form is None or any(node not in self._committed for node in ids):
            return None
        return self._rows(ids)

    def find(self, nodes: Sequence[TreeNodeId]) -> Rows | None:
        """The rows of some committed or live nodes; None where one is missing."""
        if self._form is None or any(node not in self._committed and node not in self._live for node in nodes):
            return None
        return self._rows(nodes)

    def replay(self, received: int | None) -> list[SweepFrame] | list[Snapshot]:
        """What a successor needs (R4): nothing, the sweeps that it lacks, or a snapshot.

        Args:
            received: the last sequence that the successor received; None if it does not have the session.
        """
        assert not self.is_dropped, "rows that were given up cannot be replayed"
        if self.state.sequence == 0 and not self.state.committed:
            return list[SweepFrame]()
        later = None if received is None else self.since(received)
        return [self.snapshot()] if later is None else later

    def since(self, received: int) -> list[SweepFrame] | None:
        """The sweeps after `received`, for a successor that has all earlier ones; None when it needs a snapshot.

        A truncation ended nodes whose rows an earlier commit would need, so it is replayed as a snapshot too.
        """
        missing = range(received + 1, self.state.sequence + 1)
        headers = [self._headers.get(number) for number in missing]
        found = [header for header in headers if header is not None and header.truncate_to is None]
        if len(found) < len(missing):
            return None
        return [self._catch_up(header) for header in found]

    def snapshot(self) -> Snapshot:
        """All of the session as it is now."""
        state = self.state
        committed, live = state.committed, state.live.values()
        ids = (*(token.id for token in committed), *state.live)
        above = (None, *ids)[: len(committed)]
        kept: tuple[bool, ...] | None = None
        rows: Rows | None = None
        if self._form is not None:
            flags = tuple(node in self._committed or node in self._live for node in ids)
            kept = None if all(flags) else flags
            rows = self._rows(node for node, flag in zip(ids, flags, strict=True) if flag)
        tokens = () if self._is_bare else (*(one.token for one in committed), *(node.token for node in live))
        return Snapshot(
            committed=len(committed),
            sequence=state.sequence,
            acked=state.acked,
            next_id=state.next_id,
            sampling=Sampling() if self._is_bare else state.sampling,
            ids=ids,
            tokens=tokens,
            sequences=(*(token.sequence for token in committed), *(node.sequence for node in live)),
            parents=(*above, *(node.parent for node in live)),
            headers=_with_last_sampling(
                [header for number, header in sorted(self._headers.items()) if number > state.acked]
            ),
            kept=kept,
            rows=rows,
            names=tuple(state.names),
        )

    def _catch_up(self, header: Sweep) -> SweepFrame:
        if self._form is None:
            return SweepFrame(header)
        nodes = [TreeNodeId(header.first_id + offset) for offset in range(header.count)]
        kept = tuple(node in self._committed or node in self._live for node in nodes)
        rows = self._rows(node for node, flag in zip(nodes, kept, strict=True) if flag)
        return SweepFrame(header, None if all(kept) else kept, rows)

    def _kept_header(self, sweep: Sweep) -> Sweep:
        return sweep.structure() if self._is_bare else sweep

    def _rows(self, nodes: Iterable[TreeNodeId]) -> Rows:
        assert self._form is not None, "the client has no rows"
        codec, width = self._form
        pieces = [self._committed[node] if node in self._committed else self._live[node] for node in nodes]
        return Rows(codec, len(pieces), width, b"".join(pieces))


def _with_last_sampling(headers: Sequence[Sweep]) -> tuple[Sweep, ...]:
    """Headers for a snapshot: only the last sampling among them still counts, and rules may be large."""
    last = max((header.sequence for header in headers if header.sampling is not None), default=0)
    return tuple(
        header if header.sampling is None or header.sequence == last else replace(header, sampling=None)
        for header in headers
    )
