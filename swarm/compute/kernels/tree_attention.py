"""Attention of new tree rows of several sessions, as kernels whose launch depends on the bucket of rows alone.

    store ──▶ items: tiles of rows against splits of their positions ──▶ each row's last blocks ──▶ combine

All that changes from sweep to sweep lies in memory at fixed addresses: the plan (`swarm.compute.kernels.batch_plan`)
and a table that says where each session's keys and values are. So a CUDA graph can hold the launches. A row's bits
depend on its own path alone: not on the bucket, on the rows beside it, or on whether its ancestors are committed yet.
Oracle: `swarm.compute.tree_attention.attend`. Runs on a CPU with TRITON_INTERPRET=1. Source: FlashDecoding (arXiv
2311.01282), splits of the context; SpecInfer (arXiv 2305.09781), tree attention.
"""

from __future__ import annotations

from math import gcd
from typing import TypedDict

import torch

from swarm.compute.kernels import attention_kernels as kernels
from swarm.compute.kernels.attention_cuts import AttentionShape, attention_cut, block_positions, tile_rows
from swarm.compute.kernels.batch_plan import MERGED_ROWS
from swarm.compute.kernels.support import on_device

__all__ = ["tile_rows", "tree_attention"]

LOG2_E = 1.4426950408889634
HEADS_AT_ONCE = 4
"""Heads that a program combines."""
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor addresses, Tensor plan, Tensor part_out, Tensor part_ml, "
    "Tensor? sinks, int tile, float scale, int window, float softcap) -> Tensor"
)


@torch.library.custom_op("canopy::tree_attention", mutates_args=(), schema=_SCHEMA)
def tree_attention(  # noqa: PLR0913 - an op's arguments are tensors and numbers
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    addresses: torch.Tensor,
    plan: torch.Tensor,
    part_out: torch.Tensor,
    part_ml: torch.Tensor,
    sinks: torch.Tensor | None,
    tile: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Store the new rows' keys and values, and attend: B rows, of which the plan says whose they are.

    Compilers see an op without side effects. What it writes, nobody else reads: scratch, and KV where `addresses` says.

    Args:
        query: [1, heads, B, key_width] float32, bfloat16 or float16. key: [1, kv_heads, B, key_width] value: [1,
        kv_heads, B, value_width] addresses: int64 [lines, 3] of this layer: where a session's keys and values begin,
        and its capacity in slots. plan: int32, what `swarm.compute.kernels.batch_plan.plan_batch` made for B rows and
        `tile`; what lies behind is ignored. part_out: float32, at least parts · heads · value_width numbers of scratch.
        part_ml: float32, at least parts · heads · 2 numbers of scratch. sinks: [heads] a score per head that takes
        probability and adds no value, None for none. tile: rows of an item, as the plan was told. window: positions
        that a row sees, 0 for all. softcap: bound on scores, 0 for none.

    Returns:
        [1, B, heads, value_width]; zeros for rows of nobody.
    """
    heads, bucket, key_width = query.shape[1:]
    kv_heads, value_width = value.shape[1], value.shape[3]
    shape = AttentionShape(heads // kv_heads, key_width, value_width, query.dtype)
    align = (gcd(16, width * query.itemsize) for width in (key_width, value_width))
    how: _Constants = {
        "widths": (key_width, value_width, *shape.padded, *align),
        "rules": (window, softcap, block_positions(shape)),
    }
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    result = query.new_empty(1, bucket, heads, value_width)
    grid = bucket, -(-heads // HEADS_AT_ONCE)
    with on_device(query.device):
        kernels.store[bucket, kv_heads](
            key, value, addresses, plan, *key.stride()[1:3], *value.stride()[1:3], how["widths"], num_warps=1
        )
        weights = scale if softcap else scale * LOG2_E  # scores are powers of two
        _weigh((query, addresses, plan, part_out, part_ml, *query.stride()[1:3], weights), shape, tile, how)
        sinks_or_any = part_ml if sinks is None else sinks
        how_many = heads, HEADS_AT_ONCE, sinks is not None
        kernels.combine[grid](part_out, part_ml, plan, sinks_or_any, result, *how_many, **how, num_warps=HEADS_AT_ONCE)
    return result


@tree_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


class _Constants(TypedDict):
    """What all kernels of a layer are compiled for: see `swarm.compute.kernels.attention_kernels`."""

    widths: tuple[int, ...]
    rules: tuple[int, float, int]


def _weigh(
    arguments: tuple[torch.Tensor | int | float, ...], shape: AttentionShape, tile: int, how: _Constants
) -> None:
    """Write the partial results of all rows."""
    query = arguments[0]
    assert isinstance(query, torch.Tensor)
    _, heads, bucket, _ = query.shape
    kv_heads = heads // shape.group
    cut = attention_cut(shape, tile, query.device)
    is_merged = bucket <= MERGED_ROWS
    kernels.items[cut.programs,](
        *arguments, kv_heads, shape.group, tile, cut.lanes, is_merged, **how, num_warps=cut.warps, num_stages=cut.stages
    )
    if not is_merged:
        kernels.own_blocks[bucket, kv_heads](
            *arguments, kv_heads, shape.group, cut.own_lanes, **how, num_warps=cut.own_warps, num_stages=cut.own_stages
        )
