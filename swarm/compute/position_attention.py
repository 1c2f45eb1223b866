"""Attention on a CPU whose sums go along positions: a row's bits are the same in every tree, sweep and batch.

    positions   [0, B)  [B, 2B)  …         in which slots are positions: shared by all rows
                [base, base + B)  …        from the block on in which a tree begins: each row's own path, gathered

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
MOST_GATHERED: Final = 1 << 18
"""Numbers that are gathered at a time: 512 KiB of keys, which stay in a core's cache and need no new memory."""
UNSEEN: Final = -1e30
"""Added to a score. Finite, so that a block of which a row sees nothing has a mean, which then weighs nothing."""
_ATTEND: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

Block = tuple[torch.Tensor, torch.Tensor]
"""Means of values, [blocks, kv_heads, rows, width], and logarithms of weights, without the last dimension.

Rows are those of a group's heads one after the other, filled up."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of positions `[start, end)`, as some rows see them.

    Attributes:
        bias: what is added to scores, [blocks, 1, rows, POSITIONS]; of paths [rows · blocks, 1, 1, POSITIONS]; None
            where all is seen.
        slots: int64 [rows · blocks · POSITIONS], where each row's own keys lie; None where slots are positions.
    """

    start: int
    end: int
    bias: torch.Tensor | None
    slots: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class CutRows:
    """Rows `[first, end)` of a session, and what they see."""

    first: int
    end: int
    blocks: tuple[Blocks, ...]


@dataclass(frozen=True, slots=True)
class SeenRows:
    """What new rows of a session see.

    Attributes:
        visible: bool [r, used], which slots; windows are taken off.
        positions: int64 [used], of every slot; the rows have the last ones.
        committed: slots that are positions.
        window: positions that a row sees, None for all.
    """

    visible: torch.Tensor
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
    heads, rows, width = query.shape
    kv_heads = keys.shape[0]
    grouped = query.view(kv_heads, heads // kv_heads, rows, width)
    made = []
    for piece in pieces:
        count = piece.end - piece.first
        some = grouped if count == rows else grouped[:, :, piece.first : piece.end]
        joined = _joined([_attended(one, some, keys, values, scale) for one in piece.blocks])
        made.append(joined[:, : heads // kv_heads * count].reshape(heads, count, width))
    return made[0] if len(made) == 1 else torch.cat(made, 1)


def cut(rows: SeenRows, groups: int, width: int) -> Iterator[CutRows]:
    """A session's rows, as many at a time as are computed together.

    Args:
        groups: query heads of a KV head.
        width: numbers of the keys of a position.
    """
    seen, committed = rows.visible, rows.committed
    own = rows.positions[-len(seen) :].tolist()
    is_chain = own[-1] == seen.shape[1] - 1  # then all others are before the last one
    at_once = max(1, MOST_ROWS // groups)
    if not is_chain:
        gathered = (max(own) // POSITIONS + 1 - committed // POSITIONS) * POSITIONS
        at_once = min(at_once, max(1, MOST_GATHERED // (gathered * width)))
    for first in range(0, len(seen), at_once):
        end = min(first + at_once, len(seen))
        last = max(own[first:end]) // POSITIONS + 1
        start = 0 if rows.window is None else max(0, min(own[first:end]) + 1 - rows.window) // POSITIONS
        edge = last if is_chain else max(start, committed // POSITIONS)
        blocks = [_of_slots(seen[first:end], start, edge, groups)] if start < edge else []
        if edge < last:
            blocks.append(_of_paths(rows, (first, end), edge, last))
        yield CutRows(first, end, tuple(blocks))


def _of_slots(seen: torch.Tensor, start: int, end: int, groups: int) -> Blocks:
    """Blocks in which slots are positions; rows are those of a group's heads one after the other."""
    within = seen[:, start * POSITIONS : end * POSITIONS]
    within = pad(within, (0, (end - start) * POSITIONS - within.shape[1]))
    if bool(within.all()):
        return Blocks(start, end, None)
    bias = _bias(within).view(len(seen), end - start, 1, POSITIONS).permute(1, 2, 0, 3)
    return Blocks(start, end, in_fours(bias.repeat(1, 1, groups, 1)))


def _of_paths(rows: SeenRows, some: tuple[int, int], start: int, end: int) -> Blocks:
    """Blocks in which each row has the end of the prefix and its own path; itself stands where it sees nothing."""
    committed, origin = rows.committed, start * POSITIONS
    count, used = rows.visible.shape
    seen = rows.visible[slice(*some)]
    slots = torch.arange(used - count + some[0], used - count + some[1])
    slots = slots[:, None].repeat(1, (end - start) * POSITIONS)
    within = torch.zeros_like(slots, dtype=torch.bool)
    if origin < committed:
        slots[:, : committed - origin] = torch.arange(origin, committed)
        within[:, : committed - origin] = seen[:, origin:committed]
    places, live = seen[:, committed:].nonzero(as_tuple=True)
    columns = rows.positions[committed + live] - origin
    slots[places, columns] = committed + live
    within[places, columns] = True
    bias = _bias(within).view(-1, 1, 1, POSITIONS)
    return Blocks(start, end, bias, slots.flatten())


def _attended(blocks: Blocks, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> Block:
    """Blocks as rows [kv_heads, groups, r, width] see them."""
    _, groups, count, _ = rows.shape
    number = blocks.end - blocks.start
    if blocks.slots is None:
        query = in_fours(rows.flatten(1, 2)).expand(number, -1, -1, -1)
        return _attend(query, keys, values, blocks.bias, scale, blocks.start)
    query = in_fours(rows.permute(2, 0, 1, 3))[:, None].expand(-1, number, -1, -1, -1).flatten(0, 1)
    assert blocks.bias is not None
    bias = blocks.bias.expand(-1, -1, query.shape[2], -1)
    means, weights = _attend(
        query, keys.index_select(1, blocks.slots), values.index_select(1, blocks.slots), bias, scale
    )
    means = means[:, :, :groups].reshape(count, number, -1, groups, means.shape[-1])
    weights = weights[:, :, :groups].reshape(count, number, -1, groups)
    means, weights = means.permute(1, 2, 3, 0, 4).flatten(2, 3), weights.permute(1, 2, 3, 0).flatten(2, 3)
    return in_fours(means), in_fours(weights[..., None])[..., 0]


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
    return means, weights


def _joined(found: list[Block]) -> torch.Tensor:
    """The mean over all blocks, [kv_heads, rows, width]: blocks one after the other, each number by itself."""
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
