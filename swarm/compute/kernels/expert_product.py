"""The product of a mixture of experts: each row with the experts that were chosen for it, weights whole, int8 or int4.

The launch depends on the number of rows alone, so a CUDA graph can hold it: nothing is asked of the card. A first
kernel lists the pairs (row, expert) by expert. The second has programs for every expert; those of an expert that nobody
chose end at once. An expert's weights are read once per tile of its rows. A pair's bits depend on its row and its
expert alone: K is summed in one range, in the steps of `swarm.compute.kernels.product_cuts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from swarm.compute.kernels.arithmetic import rounded
from swarm.compute.kernels.group_sums import group_sums
from swarm.compute.kernels.packed_product import card_of
from swarm.compute.kernels.packed_words import arrange, takes
from swarm.compute.kernels.product_cuts import chunk_of, cut_of, step_of, steps_of, tile_rows
from swarm.compute.kernels.range_sum import packed_sum, whole_sum, zeros_sum
from swarm.compute.kernels.support import is_interpreted, on_device

__all__ = ["arrange", "expert_product", "takes"]

_LISTED_AT_ONCE = 512


@triton.jit(do_not_specialize=["pairs"])
def _list_pairs(experts: tl.tensor, order: tl.tensor, bounds: tl.tensor, pairs: tl.tensor, block: tl.constexpr) -> None:
    """A program per expert: order[bounds[2e] … bounds[2e + 1]) are its pairs, ascending."""
    mine = tl.program_id(0)
    below, own = 0, 0
    for at in range(0, pairs, block):
        pair = at + tl.arange(0, block)
        expert = tl.load(experts + pair, mask=pair < pairs, other=mine + 1)
        below += tl.sum((expert < mine).to(tl.int32), 0)
    for at in range(0, pairs, block):
        pair = at + tl.arange(0, block)
        is_mine = (tl.load(experts + pair, mask=pair < pairs, other=mine + 1) == mine).to(tl.int32)
        place = below + own + tl.cumsum(is_mine, 0) - 1
        tl.store(order + place, pair, mask=is_mine > 0)
        own += tl.sum(is_mine, 0)
    tl.store(bounds + 2 * mine, below)
    tl.store(bounds + 2 * mine + 1, below + own)


@triton.jit(do_not_specialize=["steps", "sum_rows"])
def _product(  # noqa: PLR0913 - a kernel's
    x: tl.tensor,
    w: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    sums: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    bounds: tl.tensor,
    columns: tl.tensor,
    size: tl.tensor,
    steps: tl.tensor,
    x_row: tl.tensor,
    w_expert: tl.tensor,
    w_row: tl.tensor,
    w_column: tl.tensor,
    scales_expert: tl.tensor,
    sum_rows: tl.tensor,
    share: tl.constexpr,
    bits: tl.constexpr,
    group: tl.constexpr,
    chunk: tl.constexpr,
    bm: tl.constexpr,
    bn: tl.constexpr,
    has_bias: tl.constexpr,
    has_zeros: tl.constexpr,
    numbers: tl.constexpr,
    even_k: tl.constexpr,
    even_n: tl.constexpr,
    interpreted: tl.constexpr,
) -> None:
    """out[pair, n] = x[pair // share] · w[expert, n] (+ bias[expert, n]): `bn` outputs of one expert, `bm` pairs."""
    block, tile, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n, k = tile * bn + tl.arange(0, bn), tl.arange(0, chunk)
    read_n = n if even_n else tl.minimum(n, columns - 1)
    w_at = w + expert * w_expert + read_n[:, None].to(tl.int64) * w_row + k[None, :] * w_column
    begin, end = tl.load(bounds + 2 * expert), tl.load(bounds + 2 * expert + 1)
    for first in range(begin + block * bm, end, bm * tl.num_programs(0)):
        m = first + tl.arange(0, bm)
        here = (m < end)[None, :]
        pair = tl.load(order + m, mask=m < end, other=0).to(tl.int64)
        x_at = x + (pair // share)[None, :] * x_row + k[:, None]
        acc = tl.zeros([bn, bm], tl.float32)
        if has_zeros:
            zeros_at, sums_at = zeros + expert * scales_expert + read_n[:, None], sums + (pair // share)[None, :]
            planes: tl.constexpr = 16 // bits
            acc = zeros_sum(zeros_at, sums_at, here, 0, steps, columns, sum_rows, acc, planes, interpreted)
        if bits < 16:
            scales_at = scales + expert * scales_expert + read_n
            acc = packed_sum(
                x_at,
                w_at,
                scales_at,
                here,
                0,
                steps,
                size,
                columns,
                acc,
                bits,
                group,
                chunk,
                even_k,
                numbers,
                interpreted,
            )
        else:
            acc = whole_sum(x_at, w_at, k, here, 0, steps, size, w_column, acc, chunk, even_k, interpreted)
        if has_bias:
            acc += tl.load(bias + expert * columns + read_n).to(tl.float32)[:, None]
        stored = here if even_n else here & (n < columns)[:, None]
        result = rounded(acc, out.dtype.element_ty, interpreted)
        tl.store(out + pair[None, :] * columns + n[:, None], result, mask=stored)


@torch.library.custom_op("canopy::expert_product", mutates_args=())
def expert_product(  # noqa: PLR0913 - an op's
    x: torch.Tensor,
    experts: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    bits: int,
    group: int,
    zeros: torch.Tensor | None = None,
    numbers: str = "",
) -> torch.Tensor:
    """Each row times its chosen experts' weights (+ their biases), with the same bits among any other rows.

    Args:
        x: [R, K], the same row for all of its experts, or [R, T, K], a row for each. Dtypes as for `packed_product`.
        experts: int64 [R, T], each within [0, E).
        words: `arrange`'s [E, N, …]; for 16 and 32 bits the weights themselves [E, N, K], of x's dtype and any
            strides: weights kept as [E, K, N] are passed as `weights.transpose(1, 2)`, and nothing is copied.
        scales: `arrange`'s [E, K / group, N], of any floating type; none for 16 and 32 bits.
        bias: [E, N] of any dtype.
        bits: 4, 8, 16 or 32.
        group: codes along K that share a scale; 0 for 16 and 32 bits.
        zeros: added to a group's values; of the scales' type and form.
        numbers: what codes mean (`swarm.compute.kernels.code_numbers`).

    Returns:
        [R, T, N] of x's dtype.
    """
    (rows, chosen), (count, n), k = experts.shape, words.shape[:2], x.shape[-1]
    out = torch.empty(rows, chosen, n, dtype=x.dtype, device=x.device)
    pairs = rows * chosen
    if not pairs:
        return out
    flat = x.reshape(-1, k)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    bounds = torch.empty(2 * count, dtype=torch.int32, device=x.device)
    tile = tile_rows(min(rows, -(-2 * pairs // count)), bits, x.dtype)
    cut = cut_of(card_of(x.device), bits, group, x.dtype, tile)
    with on_device(x.device):
        sums = None if zeros is None else group_sums(flat, zeros.shape[1], group)
        _list_pairs[(count,)](experts.contiguous(), order, bounds, pairs, block=_LISTED_AT_ONCE)
        _product[triton.cdiv(rows, tile), triton.cdiv(n, cut.columns), count](
            flat,
            words,
            words if scales is None else scales,
            words if zeros is None else zeros,
            x if sums is None else sums,
            x if bias is None else bias.contiguous(),
            out,
            order,
            bounds,
            n,
            k,
            steps_of(k, bits, group),
            flat.stride(0),
            *words.stride(),
            0 if scales is None else scales.stride(0),
            len(flat),
            share=1 if x.ndim == 3 else chosen,
            bits=bits,
            group=group,
            chunk=chunk_of(bits, group, x.dtype),
            bm=tile,
            bn=cut.columns,
            has_bias=bias is not None,
            has_zeros=zeros is not None,
            numbers=numbers,
            even_k=k % step_of(bits, group) == 0,
            even_n=n % cut.columns == 0,
            interpreted=is_interpreted(),
            num_warps=cut.warps,
            num_stages=cut.stages,
        )
    return out


@expert_product.register_fake
def _(  # noqa: PLR0913
    x: torch.Tensor,
    experts: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    bits: int,
    group: int,
    zeros: torch.Tensor | None = None,
    numbers: str = "",
) -> torch.Tensor:
    return x.new_empty(*experts.shape, words.shape[1])
