"""Where a session's KV rows lie on one machine: bookkeeping only, no tensors (docs/design/span-loading.md).

    [0, n)      committed tokens, in order: slot = position
    [n, n + m)  live tree nodes, in the order of their ids

A commit moves rows and never recomputes them, because a node's position (n + depth) is fixed when it is appended.
Nodes that were skipped (pruned) have no slot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from swarm.base.errors import LocalProtocolError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from swarm.base.ids import TreeNodeId


CHUNK_ROWS = 256
"""Rows of the ancestors that are unpacked at a time."""


def ancestor_bytes(nodes: int) -> int:
    """Memory for the ancestors of so many live nodes at most: a bit for each pair."""
    return nodes * math.ceil(nodes / 8)


class KvSlots:
    """Slots, positions and ancestors of one session.

    Attributes:
        nodes: nodes that are live at a time, for which room is made at first; a replay's chunks may be larger.
        committed: committed tokens; they have the first slots.
        ids: the live nodes that have a slot, in slot order.
    """

    def __init__(self, capacity: int, nodes: int | None = None) -> None:
        self.capacity = capacity
        self.nodes = capacity if nodes is None else nodes
        self.committed = 0
        self.ids: list[TreeNodeId] = []
        self._index: dict[TreeNodeId, int] = {}
        self._positions: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        # A bit per pair, lowest first. Row r has none beyond bit r: a node's ancestors come before it.
        self._ancestors: NDArray[np.uint8] = np.zeros((0, 0), dtype=np.uint8)

    @property
    def used(self) -> int:
        """Slots in use: committed tokens and live nodes."""
        return self.committed + len(self.ids)

    @property
    def positions(self) -> NDArray[np.int64]:
        """Position of every used slot, int64 [used]."""
        live = self._positions[: len(self.ids)]
        return np.concatenate([np.arange(self.committed, dtype=np.int64), live])

    def __contains__(self, node: TreeNodeId) -> bool:
        return node in self._index

    def extend(self, tokens: int) -> None:
        """Have so many committed tokens more, whose rows are copied."""
        if self.ids or self.committed + tokens > self.capacity:
            raise LocalProtocolError("prefix", f"{tokens} tokens beside {self.used} in {self.capacity} slots")
        self.committed += tokens

    def truncate(self, length: int) -> None:
        """Keep the first `length` committed tokens and no live node."""
        if not 0 <= length <= self.committed:
            raise LocalProtocolError("truncate_to", f"{length} of {self.committed} committed tokens")
        self.committed = length
        self._keep([])

    def commit(self, path: Sequence[TreeNodeId], survivors: Sequence[TreeNodeId]) -> NDArray[np.int64]:
        """Make `path` the next committed tokens and keep `survivors` live; all others are freed.

        Args:
            path: live nodes from a child of the tip downwards.
            survivors: live nodes below the last of `path`, in id order; ones without a slot are passed over.

        Returns:
            int64 [k]: the old slot of each row that stays, in new order; the first of them goes to the slot that was
            the committed length before. Strictly rising, so rows only ever move towards the front.
        """
        missing = [node for node in path if node not in self._index]
        if missing:
            raise LocalProtocolError("commit_to", f"node {missing[0]} has no KV here")
        kept = [*path, *(node for node in survivors if node in self._index)]
        order = [self._index[node] for node in kept]
        moves = np.asarray(order, dtype=np.int64) + self.committed
        self._keep(order[len(path) :])
        self.committed += len(path)
        return moves

    def append(
        self, ids: Sequence[TreeNodeId], parents: Sequence[TreeNodeId | None], positions: Sequence[int]
    ) -> NDArray[np.bool_]:
        """Give each new node the next slot; a parent of None is the tip.

        Returns:
            bool [len(ids), live nodes]: which live slots each new node sees (its ancestors and itself). Every node sees
            all committed slots besides.
        """
        old, new = len(self.ids), len(ids)
        total = old + new
        if self.committed + total > self.capacity:
            raise LocalProtocolError("nodes", f"{self.committed + total} rows do not fit {self.capacity} slots")
        known = {None, *self._index, *ids}
        missing = [parent for parent in parents if parent not in known]
        if missing:
            raise LocalProtocolError("parents", f"node {missing[0]} has no KV here")
        self._grow(total)
        for row, (node, parent) in enumerate(zip(ids, parents, strict=True), start=old):
            self._ancestors[row] = 0 if parent is None else self._ancestors[self._index[parent]]
            self._ancestors[row, row >> 3] |= 1 << (row & 7)
            self._index[node] = row
        self.ids.extend(ids)
        self._positions[old:total] = positions
        return self._unpacked(self._ancestors[old:total], total)

    def parent(self, row: int) -> int | None:
        """The live node above the one in a row of `ids`, as a row; None is the tip."""
        above = np.flatnonzero(self._unpacked(self._ancestors[row : row + 1], row)[0])
        return int(above[-1]) if len(above) else None

    def ancestors(self, row: int) -> list[int]:
        """The way to the live node in a row of `ids`, from a child of the tip: rows of `ids`, its own the last."""
        return [int(at) for at in np.flatnonzero(self._unpacked(self._ancestors[row : row + 1], row + 1)[0])]

    def withdraw(self, count: int) -> None:
        """Remove the last `count` nodes again, for which nothing was computed."""
        for node in self.ids[len(self.ids) - count :]:
            del self._index[node]
        del self.ids[len(self.ids) - count :]

    def check_integrity(self) -> None:
        """Raise LocalProtocolError when an invariant of this class does not hold."""
        live = len(self.ids)
        ancestors = self._unpacked(self._ancestors[:live], live)
        sound = (
            self._index == {node: row for row, node in enumerate(self.ids)}
            and self.ids == sorted(set(self.ids))
            and self.used <= self.capacity
            and bool((ancestors.sum(1) + self.committed - 1 == self._positions[:live]).all())
        )
        if not sound:
            raise LocalProtocolError("slots", f"bookkeeping is inconsistent at {self.committed} + {live} rows")

    def _keep(self, order: list[int]) -> None:
        count, live = len(order), len(self.ids)
        stays = np.zeros(live, dtype=np.bool_)
        stays[order] = True
        # `order` rises, so a mask selects the same columns as indices would, and faster; and no row is read after it
        # was written.
        size = math.ceil(count / 8)
        for start in range(0, count, CHUNK_ROWS):
            rows = order[start : start + CHUNK_ROWS]
            kept = np.compress(stays, self._unpacked(self._ancestors[rows], live), axis=1)
            self._ancestors[start : start + len(rows), :size] = np.packbits(kept, axis=1, bitorder="little")
            self._ancestors[start : start + len(rows), size:] = 0
        self._positions[:count] = self._positions[order]
        self.ids = [self.ids[row] for row in order]
        self._index = {node: row for row, node in enumerate(self.ids)}

    @staticmethod
    def _unpacked(rows: NDArray[np.uint8], columns: int) -> NDArray[np.bool_]:
        """Packed rows [n, …] as bool [n, columns]."""
        return np.unpackbits(rows, axis=1, count=columns, bitorder="little").view(np.bool_)

    def _grow(self, rows: int) -> None:
        size = len(self._positions)
        if rows <= size:
            return
        larger = max(rows, min(max(2 * size, 64), self.nodes))
        ancestors = np.zeros((larger, math.ceil(larger / 8)), dtype=np.uint8)
        ancestors[:size, : self._ancestors.shape[1]] = self._ancestors
        self._ancestors = ancestors
        self._positions = np.concatenate([self._positions, np.zeros(larger - size, dtype=np.int64)])
