"""Attention on a CPU whose sums go along positions: a row's bits are the same in every tree, sweep and batch.

    positions   [0, B)  [B, 2B)  …         in which slots are positions: shared by all rows
                [base, base + B)  …        from the block on in which a tree begins: paths, gathered for their rows

Torch's own attention makes each block's mean of values and the logarithm of its weights; blocks are joined in order.
Slots of a chain are positions. What a row does not see weighs exactly nothing. In bfloat16, no soft caps, no sinks.
Source: Flash-Decoding (Dao et al., 2023), the join.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

POSITIONS: Final = 128
"""Of a block. Bits depend on it: it belongs to `swarm.protocol.numeric_class.ORDERED`."""
TOGETHER: Final = 4
"""Products have a multiple of so many rows: with others libraries add up in another order."""
MOST_ROWS: Final = 512
"""Query rows of a KV head that are computed at a time."""
MOST_GATHERED: Final = 1 << 21
"""Numbers that are gathered at a time: 4 MiB of keys."""
PER_PRODUCT: Final = 9
"""What a product with a block takes beside its rows, as so many rows would (4 µs and 0.46 µs on one CPU)."""
UNSEEN: Final = -1e30
"""Added to a score. Finite, so that a block of which a row sees nothing has a mean, which then weighs nothing."""
_ATTEND: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

Block = tuple[torch.Tensor, torch.Tensor]
"""Means of values, [blocks, rows, kv_heads, width], and logarithms of weights, without the last dimension.

Rows are those of a group's heads one after the other, filled up."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of positions `[start, end)` in which slots are positions.

    Attributes:
        bias: what is added to scores, [blocks, 1, rows, POSITIONS]; None where all is seen.
    """

    start: int
    end: int
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PathBlocks:
    """The last blocks of some paths, and rows on each path, filled up to the same number.

    Attributes:
        slots: int64 [paths · blocks · POSITIONS], where keys lie.
        query: int64 [paths · blocks · kv_heads · rows], which of the query's rows [heads · r] see them.
        bias: what is added to scores, [paths · blocks, 1, rows, POSITIONS].
        found: int64 [blocks, rows, kv_heads], which of the results [paths · blocks · rows · kv_heads] are a `Block`'s.
    """

    slots: torch.Tensor
    query: torch.Tensor
    bias: torch.Tensor
    found: torch.Tensor


@dataclass(frozen=True, slots=True)
class CutRows:
    """Rows `[first, end)` of a session, and what they see."""

    first: int
    end: int
    blocks: tuple[Blocks | PathBlocks, ...]


@dataclass(frozen=True, slots=True)
class SeenRows:
    """What new rows of a session see.

    Attributes:
        visible: bool [r, used], which slots; windows are taken off.
        above: bool [r, r], for each row itself and those above it.
        positions: int64 [used], of every slot; the rows have the last ones.
        committed: slots that are positions.
        window: positions that a row sees, None for all.
    """

    visible: torch.Tensor
    above: torch.Tensor
    positions: torch.Tensor
    committed: int
    window: int | None


def attend_by_positions(
    pieces: Iterable[CutRows], query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """New rows of a session against its keys.

    Args:
        pieces: the rows, as `cut` cuts them.
        query: [heads, r, width]
        keys: [kv_heads, tokens, width], slots in use and as many more as whole blocks have, which hold numbers.
        values: likewise.

    Returns:
        [heads, r, width]
    """
    heads, _, width = query.shape
    kv_heads = keys.shape[0]
    groups = heads // kv_heads
    made = []
    for piece in pieces:
        count = piece.end - piece.first
        found = [_attended(one, piece, query, keys, values, scale) for one in piece.blocks]
        own = _joined(found)[: groups * count].view(groups, count, kv_heads, width)
        made.append(own.permute(1, 2, 0, 3).reshape(count, heads, width))
    return (made[0] if len(made) == 1 else torch.cat(made)).transpose(0, 1)


def cut(rows: SeenRows, heads: tuple[int, int], width: int) -> Iterator[CutRows]:
    """A session's rows, as many at a time as are computed together.

    Args:
        heads: of keys, and of queries for each of them.
        width: of a key.
    """
    seen, committed, (kv_heads, groups) = rows.visible, rows.committed, heads
    own = rows.positions[-len(seen) :].tolist()
    is_chain = own[-1] == seen.shape[1] - 1  # then all others are before the last one
    at_once = max(1, MOST_ROWS // groups)
    if not is_chain:
        gathered = (max(own) // POSITIONS + 1 - committed // POSITIONS) * POSITIONS
        at_once = min(at_once, max(1, MOST_GATHERED // (gathered * kv_heads * width)))
    for first in range(0, len(seen), at_once):
        end = min(first + at_once, len(seen))
        last = max(own[first:end]) // POSITIONS + 1
        start = 0 if rows.window is None else max(0, min(own[first:end]) + 1 - rows.window) // POSITIONS
        edge = last if is_chain else max(start, committed // POSITIONS)
        blocks: list[Blocks | PathBlocks] = []
        if start < edge:
            blocks.append(_of_slots(seen[first:end], start, edge, groups))
        if edge < last:
            blocks.append(_of_paths(rows, (first, end), (edge, last), heads))
        yield CutRows(first, end, tuple(blocks))


def _of_slots(seen: torch.Tensor, start: int, end: int, groups: int) -> Blocks:
    """Blocks in which slots are positions; rows are those of a group's heads one after the other."""
    within = seen[:, start * POSITIONS : end * POSITIONS]
    within = pad(within, (0, (end - start) * POSITIONS - within.shape[1]))
    if bool(within.all()):
        return Blocks(start, end, None)
    bias = _bias(within).view(len(seen), end - start, 1, POSITIONS).permute(1, 2, 0, 3)
    return Blocks(start, end, in_fours(bias.repeat(1, 1, groups, 1)))


def _of_paths(rows: SeenRows, some: tuple[int, int], where: tuple[int, int], heads: tuple[int, int]) -> PathBlocks:
    """Blocks `where` in which a path has the end of the prefix and its own slots, for `some` of the rows."""
    committed, origin, number = rows.committed, where[0] * POSITIONS, where[1] - where[0]
    count, (kv_heads, groups) = len(rows.visible), heads
    seen = rows.visible[slice(*some)]
    path, place = _on_paths(rows.above[slice(*some), slice(*some)], groups)
    paths, most = int(path.max()) + 1, int(place.max()) + 1
    slots = torch.zeros(paths, number * POSITIONS, dtype=torch.int64)  # any slot stands where nothing is seen
    within = torch.zeros(paths, most, number * POSITIONS, dtype=torch.bool)
    if origin < committed:
        slots[:, : committed - origin] = torch.arange(origin, committed)
        within[path, place, : committed - origin] = seen[:, origin:committed]
    which, live = seen[:, committed:].nonzero(as_tuple=True)
    columns = rows.positions[committed + live] - origin
    slots[path[which], columns] = committed + live
    within[path[which], place[which], columns] = True
    bias = _bias(within).view(paths, most, number, POSITIONS).transpose(1, 2).repeat(1, 1, groups, 1)
    bias = in_fours(bias.flatten(0, 1)[:, None])

    whose = torch.zeros(paths, groups, most, dtype=torch.int64)
    whose[path, :, place] = torch.arange(*some)[:, None] + torch.arange(groups) * count
    query = torch.arange(kv_heads)[:, None] * groups * count + whose.view(paths, 1, 1, -1)
    query = pad(query, (0, bias.shape[2] - query.shape[3])).expand(-1, number, -1, -1)
    found = (path * number + torch.arange(number)[:, None])[:, None] * bias.shape[2] + place
    found = (found + torch.arange(groups)[:, None] * most).view(number, -1, 1) * kv_heads + torch.arange(kv_heads)
    return PathBlocks(slots.flatten(), query.flatten(), bias, in_fours(found))


def _on_paths(above: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """On which path each of r rows is, and as which of its rows, so that products take the least time.

    Args:
        above: bool [r, r], for each row itself and those above it.
    """
    ends = above[above.sum(0) == 1]  # above no other row
    path = ends.int().argmax(0)
    counts = path.bincount(minlength=len(ends))

    def cost(most: int) -> int:
        return int((-(-counts // most)).sum()) * (PER_PRODUCT + groups * most)

    most = min(range(1, int(counts.max()) + 1), key=cost)
    place = torch.empty_like(path)
    place[path.argsort(stable=True)] = torch.arange(len(path)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    parts = -(-counts // most)
    return (parts.cumsum(0) - parts)[path] + place // most, place % most


def _attended(  # noqa: PLR0913 - attention takes these
    blocks: Blocks | PathBlocks,
    rows: CutRows,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> Block:
    """Blocks as some rows of a query [heads, r, width] see them."""
    kv_heads, _, width = keys.shape
    if isinstance(blocks, Blocks):
        own = query[:, rows.first : rows.end].reshape(kv_heads, -1, width)
        own = in_fours(own).expand(blocks.end - blocks.start, -1, -1, -1)
        return _attend(own, keys, values, blocks.bias, scale, blocks.start)
    seeing = query.reshape(-1, width).index_select(0, blocks.query).view(len(blocks.bias), kv_heads, -1, width)
    keys, values = keys.index_select(1, blocks.slots), values.index_select(1, blocks.slots)
    means, weights = _attend(seeing, keys, values, blocks.bias, scale)
    found = blocks.found.flatten()
    means, weights = means.reshape(-1, width).index_select(0, found), weights.flatten().index_select(0, found)
    return means.view(*blocks.found.shape, width), weights.view(blocks.found.shape)


def _attend(  # noqa: PLR0913 - what torch's takes, and where
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    start: int = 0,
) -> Block:
    """Torch's attention of query [n, kv_heads, rows, width] to n blocks, each by itself; no key is copied."""
    heads, _, width = keys.shape
    shape = (len(query), heads, POSITIONS, width)
    blocks = []
    for one in (keys, values):
        by_head, by_key, _ = one.stride()
        first = one.storage_offset() + start * POSITIONS * by_key
        blocks.append(one.as_strided(shape, (POSITIONS * by_key, by_head, by_key, 1), first))
    means, weights = _ATTEND(query, *blocks, 0.0, False, attn_mask=bias, scale=scale)
    return means.transpose(1, 2), weights.transpose(1, 2)  # as they lie


def _joined(found: list[Block]) -> torch.Tensor:
    """The mean over all blocks, [rows, kv_heads, width]: blocks one after the other, each number by itself."""
    means, weights = found[0] if len(found) == 1 else (torch.cat(parts) for parts in zip(*found, strict=True))
    if len(means) == 1:
        return means[0]
    shares = (weights - weights.amax(0)).exp_()
    total, *parts = (means * shares[..., None]).unbind()
    for part in parts:
        total += part
    return (total / shares.cumsum(0)[-1, ..., None]).to(means.dtype)


def in_fours(rows: torch.Tensor) -> torch.Tensor:
    """Rows [..., n, width] filled up to a multiple of `TOGETHER`."""
    lacks = -rows.shape[-2] % TOGETHER
    return pad(rows, (0, 0, 0, lacks)) if lacks else rows


def _bias(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(seen, dtype=torch.bfloat16).masked_fill_(~seen, UNSEEN)
