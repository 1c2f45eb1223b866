"""Sums of an input's groups, which zero points are multiplied with: value = scale · code + zero, so a product has

Σ x · value = Σ over groups (scale · Σ x · code + zero · Σ x)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_AT_ONCE = 2_048
"""Values of one program. Bits depend on it: it belongs to KERNEL_VERSION."""


@triton.jit(do_not_specialize=["rows", "groups", "size", "x_row"], do_not_specialize_on_alignment=["x"])
def _group_sums(  # noqa: PLR0913 - a kernel's
    x: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    groups: tl.tensor,
    size: tl.tensor,
    x_row: tl.tensor,
    group: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """A program per row and `block` groups. What it is compiled for is the form alone: so is the order of a sum."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * block + tl.arange(0, block)
    k = g[:, None] * group + tl.arange(0, group)[None, :]
    values = tl.load(x + row * x_row + k, mask=k < size, other=0.0).to(tl.float32)
    tl.store(sums + g.to(tl.int64) * rows + row, tl.sum(values, 1), mask=g < groups)


def group_sums(x: torch.Tensor, groups: int, group: int) -> torch.Tensor:
    """float32 [groups, rows]: sums of each row's neighbours, in one order for any number of rows.

    Args:
        x: [rows, K], neighbours side by side; what lies past K counts as zero.
    """
    rows, size = x.shape
    sums = torch.empty(groups, rows, dtype=torch.float32, device=x.device)
    block = _AT_ONCE // group
    if rows:
        _group_sums[rows, triton.cdiv(groups, block)](x, sums, rows, groups, size, x.stride(0), group, block)
    return sums
