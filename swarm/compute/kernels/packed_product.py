"""The product of few rows with a weight: whole, int8 or int4, each weight read once per tile of rows.

A row's bits depend on the row and the weight alone: not on how many rows there are, nor on which. Sums go along K in
ranges that the weight's shape fixes (`swarm.compute.kernels.product_cuts`); whichever program of a tile ends last adds
the ranges up in their order, from float32 partial sums.

The partial sums lie in one scratch per device, which all products share. So the products of a device must run one
after another: on one stream, or ordered by events. `prepare` makes it; a CUDA graph can only be captured after that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from swarm.compute.kernels.arithmetic import rounded
from swarm.compute.kernels.group_sums import group_sums
from swarm.compute.kernels.packed_words import arrange, disarrange, takes
from swarm.compute.kernels.product_cuts import (
    TILE_ROWS,
    CardClass,
    chunk_of,
    cut_of,
    most_partial_columns,
    ranges_of,
    step_of,
    steps_of,
    tile_rows,
)
from swarm.compute.kernels.range_sum import packed_sum, whole_sum, zeros_sum
from swarm.compute.kernels.support import is_interpreted, on_device

__all__ = ["arrange", "disarrange", "packed_product", "prepare", "takes"]

MOST_ROWS = 256
"""Rows of one launch; more rows are several launches. It bounds the scratch, and changes no bit."""


@triton.jit(do_not_specialize=["rows", "padded_rows", "steps", "sum_rows"])
def _product(  # noqa: PLR0913 - a kernel's
    x: tl.tensor,
    w: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    sums: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    tickets: tl.tensor,
    rows: tl.tensor,
    padded_rows: tl.tensor,
    columns: tl.tensor,
    size: tl.tensor,
    steps: tl.tensor,
    x_row: tl.tensor,
    w_row: tl.tensor,
    w_column: tl.tensor,
    sum_rows: tl.tensor,
    ranges: tl.constexpr,
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
    """out[m, n] = x[m] · w[n] (+ bias[n]): a program has `bn` outputs, `bm` rows and one range of K.

    The rows' blocks are neighbours on the card, so that those of one tile of weights find it in the cache.
    """
    block, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, m, k = tile * bn + tl.arange(0, bn), block * bm + tl.arange(0, bm), tl.arange(0, chunk)
    here = (m < rows)[None, :]
    read_n = n if even_n else tl.minimum(n, columns - 1)
    x_at = x + m[None, :] * x_row + k[:, None]
    w_at = w + read_n[:, None].to(tl.int64) * w_row + k[None, :] * w_column
    begin, end = steps * part // ranges, steps * (part + 1) // ranges
    acc = tl.zeros([bn, bm], tl.float32)
    if has_zeros:
        zeros_at, sums_at = zeros + read_n[:, None], sums + m[None, :]
        planes: tl.constexpr = 16 // bits
        acc = zeros_sum(zeros_at, sums_at, here, begin, end, columns, sum_rows, acc, planes, interpreted)
    if bits < 16:
        s_at = scales + read_n
        acc = packed_sum(
            x_at, w_at, s_at, here, begin, end, size, columns, acc, bits, group, chunk, even_k, numbers, interpreted
        )
    else:
        acc = whole_sum(x_at, w_at, k, here, begin, end, size, w_column, acc, chunk, even_k, interpreted)
    stored = here if even_n else here & (n < columns)[:, None]
    at = m[None, :] * columns + n[:, None]
    last = True
    if ranges > 1:
        tl.store(partial + part * padded_rows * columns + at, acc, mask=stored)
        tl.debug_barrier()  # the ticket below is one thread's: it must not pass the others' partial sums
        ticket = tickets + block * tl.num_programs(1) + tile
        last = tl.atomic_add(ticket, 1, sem="acq_rel") == ranges - 1
        if last:
            acc = tl.load(partial + at, mask=stored, other=0.0, cache_modifier=".cg")
            for other in range(1, ranges):
                acc += tl.load(
                    partial + other * padded_rows * columns + at, mask=stored, other=0.0, cache_modifier=".cg"
                )
            tl.store(ticket, 0)
    if last:
        if has_bias:
            acc += tl.load(bias + read_n).to(tl.float32)[:, None]
        tl.store(out + at, rounded(acc, out.dtype.element_ty, interpreted), mask=stored)


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What the products of a device write to beside their outputs, at fixed addresses for its whole life.

    Attributes:
        partial: float32, sums of ranges.
        tickets: int32, how many ranges of a tile have ended; all zeros between products.
    """

    partial: torch.Tensor
    tickets: torch.Tensor
    card: CardClass


_SCRATCH: dict[torch.device, _Scratch] = {}


def prepare(device: torch.device) -> None:
    """Make the device's scratch of 32 MiB, once. To be called before the first capture; products do it elsewhere.

    Raises:
        RuntimeError: a graph is being captured, whose memory others may be given after it.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device in _SCRATCH:
        return
    card = CardClass.LARGE
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("packed_product.prepare must run before a graph is captured")
        card = CardClass.of(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])
    columns = most_partial_columns()
    tickets = columns // min(64, *TILE_ROWS) * (MOST_ROWS // TILE_ROWS[0])
    _SCRATCH[device] = _Scratch(
        torch.empty(columns * MOST_ROWS, dtype=torch.float32, device=device),
        torch.zeros(tickets, dtype=torch.int32, device=device),
        card,
    )


def card_of(device: torch.device) -> CardClass:
    """Which cuts the device takes."""
    prepare(device)
    return _SCRATCH[device].card


@torch.library.custom_op("canopy::packed_product", mutates_args=())
def packed_product(  # noqa: PLR0913 - an op's
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    bits: int,
    group: int,
    zeros: torch.Tensor | None = None,
    numbers: str = "",
) -> torch.Tensor:
    """x · weightᵀ (+ bias), with the same bits for a row among any others.

    Args:
        x: [..., K], float32 (exact: no TF32), bfloat16 or float16.
        words: `arrange`'s; for 16 and 32 bits the weight itself [N, K], of x's dtype and any strides: a transposed
            [K, N] does as well.
        scales: `arrange`'s, of any floating type; none for 16 and 32 bits.
        bias: [N] of any dtype.
        bits: 4, 8, 16 or 32.
        group: codes along K that share a scale; 0 for 16 and 32 bits.
        zeros: added to a group's values; of the scales' type and form.
        numbers: what codes mean (`swarm.compute.kernels.code_numbers`).

    Returns:
        [..., N] of x's dtype.
    """
    k, n = x.shape[-1], words.shape[0]
    flat = x.reshape(-1, k)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    out = torch.empty(len(flat), n, dtype=x.dtype, device=x.device)
    weight = PackedForm(words, scales, zeros, bits, group, numbers)
    with on_device(x.device):
        for begin in range(0, len(flat), MOST_ROWS):
            some = slice(begin, begin + MOST_ROWS)
            _launch(flat[some], weight, bias, out[some])
    return out.view(*x.shape[:-1], n)


@packed_product.register_fake
def _(  # noqa: PLR0913
    x: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    bits: int,
    group: int,
    zeros: torch.Tensor | None = None,
    numbers: str = "",
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], words.shape[0])


@dataclass(frozen=True, slots=True)
class PackedForm:
    """A weight as `packed_product` is given it."""

    words: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    bits: int
    group: int
    numbers: str


def _launch(x: torch.Tensor, weight: PackedForm, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """At most `MOST_ROWS` rows, [rows, K], into `out` [rows, N]."""
    (rows, k), n, words = x.shape, weight.words.shape[0], weight.words
    bits, group = weight.bits, weight.group
    prepare(x.device)
    scratch = _SCRATCH[x.device]
    tile = tile_rows(rows, bits, x.dtype)
    cut = cut_of(scratch.card, bits, group, x.dtype, tile)
    blocks, ranges = triton.cdiv(rows, tile), ranges_of(n, k, bits, group)
    sums = None if weight.zeros is None else group_sums(x, len(weight.zeros), group)
    _product[blocks, triton.cdiv(n, cut.columns), ranges](
        x,
        words,
        words if weight.scales is None else weight.scales,
        words if weight.zeros is None else weight.zeros,
        x if sums is None else sums,
        x if bias is None else bias,
        out,
        scratch.partial,
        scratch.tickets,
        rows,
        blocks * tile,
        n,
        k,
        steps_of(k, bits, group),
        x.stride(0),
        *words.stride(),
        rows,
        ranges=ranges,
        bits=bits,
        group=group,
        chunk=chunk_of(bits, group, x.dtype),
        bm=tile,
        bn=cut.columns,
        has_bias=bias is not None,
        has_zeros=weight.zeros is not None,
        numbers=weight.numbers,
        even_k=k % step_of(bits, group) == 0,
        even_n=n % cut.columns == 0,
        interpreted=is_interpreted(),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
