"""What the attention kernels read of a batch, laid out on the host: one int32 buffer, numpy only.

    head       [HEAD]            items, where items and ancestors begin in this buffer, rows in use
    rows       [bucket, FIELDS]  line, slot, front, position, ancestors (start), parts (start), folded
    items      [n, ITEM]         first row, rows, first split, line, splits
    ancestors                    slots, in position order

A row sees slots `[0, front)`, where slot = position: committed tokens and the nodes that continue them without a gap.
Behind them its other ancestors are listed by position, wherever their slots are. So prompts, single tokens and trees
are one case, and a sum over positions does not depend on where a token lies or whether it is committed.

Positions are summed up in fixed splits. An item is a tile of one session's rows against one split; where a batch has
many rows far behind, against a run of them. A row of nobody (of the bucket, not of a session) has line -1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SPLIT = 256
"""Positions whose partial result one program makes. Bits depend on it: it belongs to KERNEL_VERSION."""
BLOCK = 64
"""Positions at a time within a split. Bits depend on it."""
RUN = 8
"""Splits whose partial results are added up before those of other runs. Bits depend on it."""
RUN_POSITIONS = SPLIT * RUN
MERGED_ROWS = 16
"""Up to this bucket, one kernel also does each row's last splits: the same bits, and one launch less."""
MANY_SPLITS = 2048
"""From so many (row, split in front of it) pairs on, an item folds a run of splits into one partial result: there is
work for all processors without cutting finer, and partial results would be most of what is written. No bit depends on
it."""
LISTED = 64
"""Listed ancestors per row that a buffer has room for, on average."""
HEAD, FIELDS, ITEM = 8, 7, 5
NOBODY = -1


class PlanOverflow(Exception):
    """The batch does not fit the memory that its bucket promises; it must be cut into smaller ones."""


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """One session's new rows in a batch.

    Attributes:
        line: of the session in the table of addresses.
        committed: its committed tokens, which every row sees.
        visible: bool [r, live]: which live slots each row sees, its ancestors and itself; the last r are the rows'.
    """

    line: int
    committed: int
    visible: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a batch's kernels read.

    Attributes:
        words: int32 [n], see the module.
        positions: int64 [r], of the batch's rows.
        parts: partial results per head that the kernels write.
    """

    words: NDArray[np.int32]
    positions: NDArray[np.int64]
    parts: int


def plan_words(bucket: int, max_tokens: int) -> int:
    """Words that every plan fits into which `plan_batch` makes within these limits.

    Args:
        max_tokens: of one session, live nodes included.
    """
    items = part_count(bucket, max_tokens)  # an item makes at least one partial result
    return HEAD + bucket * FIELDS + items * ITEM + max(LISTED * bucket, max_tokens)  # a single row always fits


def part_count(bucket: int, max_tokens: int) -> int:
    """Partial results per head that every batch of `plan_batch` within these limits fits into."""
    splits = -(-max_tokens // SPLIT)
    if bucket <= MERGED_ROWS:
        return bucket * splits
    fine, folded = MANY_SPLITS + 2 * bucket, (max_tokens // RUN_POSITIONS + 4) * bucket
    return max(splits, min(bucket * splits, max(fine, folded)))


def plan_batch(sessions: Sequence[PlannedSession], bucket: int, tile: int, max_tokens: int | None = None) -> BatchPlan:
    """Lay out a batch.

    Args:
        sessions: whose rows; each with at least one row.
        bucket: rows that the kernels are started for; at least as many as the batch has.
        tile: rows of a session that an item takes (`swarm.compute.kernels.tree_attention.tile_rows`).
        max_tokens: what `plan_words` and `part_count` were told; None checks nothing.

    Raises:
        PlanOverflow: it has more rows, ancestors or partial results than there is room for.
    """
    rows = _PlannedRows.of(sessions, tile)
    total = len(rows.position)
    if total > bucket:
        raise PlanOverflow(f"{total} rows in a bucket of {bucket}")
    is_merged = bucket <= MERGED_ROWS
    folded = _folded_splits(rows) if not is_merged else np.zeros(total, np.int64)
    # Partial results of folded splits come first, one for each run or piece of one, then those of the splits behind.
    parts = rows.position // SPLIT + 1 - folded + _runs(folded)
    fields = np.full((bucket, FIELDS), NOBODY, np.int32)
    columns = rows.line, rows.slot, rows.front, rows.position, _starts(rows.listed), _starts(parts), folded
    fields[:total] = np.stack(columns, axis=1)
    items = _tile_items(rows, folded, is_merged=is_merged)
    if is_merged:
        items = np.concatenate([items, _row_items(rows)])
    begin = HEAD + bucket * FIELDS
    head = np.array([len(items), begin, begin + items.size, total, parts.sum(), 0, 0, 0], np.int32)
    words = np.concatenate([head, fields.ravel(), items.ravel(), rows.ancestors])
    plan = BatchPlan(words, rows.position, int(parts.sum()))
    if max_tokens is not None:
        _check_room(plan, bucket, max_tokens)
    return plan


@dataclass(frozen=True, slots=True)
class _PlannedRows:
    """Where a batch's R rows and their ancestors lie: int64 [R] each.

    Attributes:
        front: up to where its path lies at slot = position.
        listed: how many ancestors lie elsewhere, itself included.
        ancestors: int32 [listed.sum()] their slots, row after row, each by position.
        tiles: int64 [t] first row of each tile; a tile is of one session.
    """

    line: NDArray[np.int64]
    slot: NDArray[np.int64]
    front: NDArray[np.int64]
    position: NDArray[np.int64]
    listed: NDArray[np.int64]
    ancestors: NDArray[np.int32]
    tiles: NDArray[np.int64]

    @classmethod
    def of(cls, sessions: Sequence[PlannedSession], tile: int) -> _PlannedRows:
        columns: list[NDArray[np.int64]] = [np.zeros((4, 0), np.int64)]  # slot, committed, sees, lead
        listed, lines, tiles = [np.zeros(0, np.int64)], [], [np.zeros(0, np.int64)]
        start = 0
        for session in sessions:
            visible = session.visible
            count, live = visible.shape
            made = np.empty((4, count), np.int64)
            made[0] = np.arange(session.committed + live - count, session.committed + live)
            made[1] = session.committed
            made[2] = sees = visible.sum(1)
            made[3] = lead = np.where(sees == live, live, visible.argmin(1))  # nodes that continue the committed tokens
            columns.append(made)
            # An ancestor has a lower slot than its descendants: rising slots are rising positions.
            listed.append(np.nonzero(visible & (np.arange(live) >= lead[:, None]))[1] + session.committed)
            lines.append(np.full(count, session.line))
            tiles.append(np.arange(start, start + count, tile))
            start += count
        slot, committed, sees, lead = np.concatenate(columns, axis=1)
        return cls(
            line=np.concatenate([np.zeros(0, np.int64), *lines]),
            slot=slot,
            front=committed + lead,
            position=committed + sees - 1,
            listed=sees - lead,
            ancestors=np.concatenate(listed).astype(np.int32),
            tiles=np.concatenate(tiles),
        )

    @property
    def tile_sizes(self) -> NDArray[np.int64]:
        return np.diff(self.tiles, append=len(self.position))


def _folded_splits(rows: _PlannedRows) -> NDArray[np.int64]:
    """Splits in front of all rows of a row's tile, of which an item takes a run, int64 [R]; none in a small batch."""
    if int((rows.front // SPLIT).sum()) < MANY_SPLITS:
        return np.zeros_like(rows.front)
    return np.repeat(np.minimum.reduceat(rows.front, rows.tiles) // SPLIT, rows.tile_sizes)


def _runs(splits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Runs of so many splits; the last one may be a piece."""
    return -(-splits // RUN)


def _tile_items(rows: _PlannedRows, folded: NDArray[np.int64], *, is_merged: bool) -> NDArray[np.int32]:
    """Tiles against what lies in front of all or some of their rows.

    Args:
        folded: [R] splits of which an item takes a run.
        is_merged: whether rows do their last splits from a split's start on, and not from the last whole block.

    Returns:
        int32 [n, ITEM]
    """
    if not len(rows.tiles):
        return np.zeros((0, ITEM), np.int32)
    most = np.maximum.reduceat(rows.front, rows.tiles)
    splits = most // SPLIT if is_merged else -(-(most // BLOCK * BLOCK) // SPLIT)
    folded = folded[rows.tiles]
    tile, place = _spread(splits - folded + _runs(folded))
    behind = place - _runs(folded)[tile]  # of the folded ones
    first = np.where(behind < 0, place * RUN, folded[tile] + behind)
    count = np.where(behind < 0, np.minimum(RUN, folded[tile] - place * RUN), 1)
    columns = rows.tiles[tile], rows.tile_sizes[tile], first, rows.line[rows.tiles[tile]], count
    return np.stack(columns, axis=1).astype(np.int32)


def _row_items(rows: _PlannedRows) -> NDArray[np.int32]:
    """Single rows against their last splits, from the one on that `front` lies in: int32 [n, ITEM], of 0 rows."""
    first = rows.front // SPLIT
    row, place = _spread(rows.position // SPLIT + 1 - first)
    zeros = np.zeros_like(row)
    return np.stack([row, zeros, first[row] + place, rows.line[row], zeros + 1], axis=1).astype(np.int32)


def _check_room(plan: BatchPlan, bucket: int, max_tokens: int) -> None:
    if plan.positions.max(initial=-1) >= max_tokens:
        raise PlanOverflow(f"a position of {plan.positions.max()} in sessions of {max_tokens} tokens")
    if len(plan.words) > (room := plan_words(bucket, max_tokens)):
        raise PlanOverflow(f"{len(plan.words)} words in a buffer of {room}: its rows have too many ancestors")
    if plan.parts > (room := part_count(bucket, max_tokens)):
        raise PlanOverflow(f"{plan.parts} partial results in a buffer of {room}")


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of some pieces starts that lie one after the other."""
    return np.cumsum(counts) - counts


def _spread(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each element of pieces of these sizes: its piece, and its place within."""
    piece = np.repeat(np.arange(len(counts)), counts)
    return piece, np.arange(len(piece)) - _starts(counts)[piece]
