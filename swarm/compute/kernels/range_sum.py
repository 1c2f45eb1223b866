"""Device functions of the product kernels: the sum over one range of K, for outputs × rows of one program.

The weight is the matrix unit's *first* operand, so its tile of outputs fills the unit's 64 lanes and 16 rows cost what
one costs. Sums are float32 and go along K in one order, step after step; a step's width depends on the weight's form
alone (`swarm.compute.kernels.product_cuts`), never on the card or on the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from swarm.compute.kernels.arithmetic import multiply_add
from swarm.compute.kernels.code_numbers import (
    E4M3_ASSEMBLY,
    FP4_ASSEMBLY,
    FP4_TABLE,
    INT4_ASSEMBLY,
    INT8_ASSEMBLY,
    IQ4_ASSEMBLY,
    IQ4_TABLE,
    NF4_ASSEMBLY,
    NF4_TABLE,
)


@triton.jit
def _looked_up(places: tl.tensor, table: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """The numbers at places 0 … 15 of a table."""
    found = tl.zeros(places.shape, tl.float32)
    for at in tl.static_range(16):
        found = tl.where(places == at, table[at], found)
    return found.to(dtype)


@triton.jit
def _four_numbers(q: tl.tensor, numbers: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """What codes 0 … 15 mean."""
    if numbers == "fp4":
        return _looked_up(q, FP4_TABLE, dtype)
    elif numbers == "iq4":
        return _looked_up(q, IQ4_TABLE, dtype)
    elif numbers == "nf4":
        return _looked_up(q, NF4_TABLE, dtype)
    else:
        return (q - 8).to(dtype)


@triton.jit
def four_bit_planes(words: tl.tensor, dtype: tl.constexpr, assembly: tl.constexpr, numbers: tl.constexpr) -> tl.tuple:
    """What the 4 codes of each word mean (`swarm.compute.kernels.code_numbers`), two words at a time in assembly."""
    if assembly:
        floats: tl.constexpr = NF4_ASSEMBLY if numbers == "nf4" else INT4_ASSEMBLY
        wholes: tl.constexpr = IQ4_ASSEMBLY if numbers == "iq4" else floats
        text: tl.constexpr = FP4_ASSEMBLY if numbers == "fp4" else wholes
        return tl.inline_asm_elementwise(
            text,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        q = words.to(tl.int32)
        first, second = _four_numbers(q & 15, numbers, dtype), _four_numbers(q >> 4 & 15, numbers, dtype)
        third, fourth = _four_numbers(q >> 8 & 15, numbers, dtype), _four_numbers(q >> 12 & 15, numbers, dtype)
        return first, second, third, fourth


@triton.jit
def _eight_numbers(q: tl.tensor, numbers: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """What bytes mean, int32 with the sign of the byte; of FP8 the bits are moved to where those of float32 are."""
    if numbers == "e4m3":
        bits = (q & 0x80) << 24 | (q & 0x7F) << 20
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2^120
    else:
        return q.to(dtype)


@triton.jit
def eight_bit_planes(words: tl.tensor, dtype: tl.constexpr, assembly: tl.constexpr, numbers: tl.constexpr) -> tl.tuple:
    """What the 2 codes of each word mean, two words at a time in assembly."""
    if assembly:
        text: tl.constexpr = E4M3_ASSEMBLY if numbers == "e4m3" else INT8_ASSEMBLY
        return tl.inline_asm_elementwise(
            text, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        q = words.to(tl.int32)
        return _eight_numbers(q << 24 >> 24, numbers, dtype), _eight_numbers(q >> 8, numbers, dtype)


@triton.jit
def zeros_sum(  # noqa: PLR0913 - a kernel's
    zeros_at: tl.tensor,
    sums_at: tl.tensor,
    here: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    columns: tl.tensor,
    sum_rows: tl.tensor,
    acc: tl.tensor,
    planes: tl.constexpr,
    interpreted: tl.constexpr,
) -> tl.tensor:
    """acc [n, m] + the zeros of the groups in the steps [begin, end) times the sums of the input over these groups.

    Args:
        zeros_at: addresses of the first group's zeros, [n, 1].
        sums_at: addresses of the first group's sums, [1, m].
        here: which rows there are, [1, m].
        columns: from one group's zeros to the next one's.
        sum_rows: the same of the sums.
        planes: groups of a step.
    """
    g = tl.arange(0, 16)  # the fewest that a product takes
    for first in range(begin * planes, end * planes, 16):
        group = first + g
        inside = group < end * planes
        z = tl.load(zeros_at + group[None, :].to(tl.int64) * columns, mask=inside[None, :], other=0.0)
        s = tl.load(sums_at + group[:, None] * sum_rows, mask=inside[:, None] & here, other=0.0)
        acc = multiply_add(z.to(tl.float32), s, acc, interpreted)
    return acc


@triton.jit
def read_rows(x_at: tl.tensor, offset: tl.tensor, size: tl.tensor, here: tl.tensor, even: tl.constexpr) -> tl.tensor:
    """A tile of the input, [k, m]; zeros for rows that are not there, and past K, which ends between tiles."""
    if even:
        return tl.load(x_at + offset, mask=here, other=0.0)
    else:
        return tl.load(x_at + offset, mask=here & (offset < size), other=0.0)


@triton.jit
def whole_sum(  # noqa: PLR0913 - a kernel's
    x_at: tl.tensor,
    w_at: tl.tensor,
    k: tl.tensor,
    here: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    size: tl.tensor,
    w_column: tl.tensor,
    acc: tl.tensor,
    step: tl.constexpr,
    even: tl.constexpr,
    interpreted: tl.constexpr,
) -> tl.tensor:
    """acc [n, m] + the sum over the steps [begin, end) for weights of 16 or 32 bits.

    Args:
        x_at: addresses of the input's first tile, [k, m].
        w_at: addresses of the weight's first tile, [n, k].
        k: 0 … step.
        here: which rows there are, [1, m].
        w_column: elements from one column of the weight to the next.
        even: whether K ends with a step.
        interpreted: whether this is the interpreter.
    """
    for index in range(begin, end):
        done = index * step
        if even:
            w = tl.load(w_at + done * w_column)
            x = tl.load(x_at + done, mask=here, other=0.0)
        else:
            w = tl.load(w_at + done * w_column, mask=(k + done < size)[None, :], other=0.0)
            x = tl.load(x_at + done, mask=here & (k + done < size)[:, None], other=0.0)
        acc = multiply_add(w, x, acc, interpreted)
    return acc


@triton.jit
def packed_sum(  # noqa: PLR0913 - a kernel's
    x_at: tl.tensor,
    w_at: tl.tensor,
    scales_at: tl.tensor,
    here: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    size: tl.tensor,
    columns: tl.tensor,
    acc: tl.tensor,
    bits: tl.constexpr,
    group: tl.constexpr,
    chunk: tl.constexpr,
    even: tl.constexpr,
    numbers: tl.constexpr,
    interpreted: tl.constexpr,
) -> tl.tensor:
    """acc [n, m] + the sum over the steps [begin, end) for weights of 4 or 8 bits: a step is a group of each plane.

    Args:
        x_at: addresses of the input's first tile, [chunk, m].
        w_at: addresses of the first words, [n, chunk].
        scales_at: addresses of the first group's scales, [n].
        here: which rows there are, [1, m].
        bits: 4 or 8.
        chunk: codes of a group that are multiplied at once.
        even: whether K ends with a step.
        numbers: what codes mean.
        interpreted: whether this is the interpreter.
    """
    planes: tl.constexpr = 16 // bits
    dtype: tl.constexpr = tl.float32 if interpreted else x_at.dtype.element_ty
    assembly: tl.constexpr = dtype == tl.bfloat16
    at = scales_at + begin * planes * columns  # scales are asked for a step before their turn
    s0, s1 = tl.load(at), tl.load(at + columns)
    if bits == 4:
        s2, s3 = tl.load(at + 2 * columns), tl.load(at + 3 * columns)
    for index in range(begin, end):
        at = scales_at + tl.minimum(index + 1, end - 1) * planes * columns
        t0, t1 = tl.load(at), tl.load(at + columns)
        y0 = tl.zeros_like(acc)
        y1 = tl.zeros_like(acc)
        if bits == 4:
            t2, t3 = tl.load(at + 2 * columns), tl.load(at + 3 * columns)
            y2 = tl.zeros_like(acc)
            y3 = tl.zeros_like(acc)
        for part in tl.static_range(0, group, chunk):
            done = index * planes * group + part
            words = tl.load(w_at + index * group + part)
            x0 = read_rows(x_at, done, size, here, even)
            x1 = read_rows(x_at, done + group, size, here, even)
            if bits == 8:
                w0, w1 = eight_bit_planes(words, dtype, assembly, numbers)
            else:
                w0, w1, w2, w3 = four_bit_planes(words, dtype, assembly, numbers)
                y2 = multiply_add(w2, read_rows(x_at, done + 2 * group, size, here, even), y2, interpreted)
                y3 = multiply_add(w3, read_rows(x_at, done + 3 * group, size, here, even), y3, interpreted)
            y0 = multiply_add(w0, x0, y0, interpreted)
            y1 = multiply_add(w1, x1, y1, interpreted)
        acc = tl.fma(y0, s0.to(tl.float32)[:, None], acc)
        acc = tl.fma(y1, s1.to(tl.float32)[:, None], acc)
        s0, s1 = t0, t1
        if bits == 4:
            acc = tl.fma(y2, s2.to(tl.float32)[:, None], acc)
            acc = tl.fma(y3, s3.to(tl.float32)[:, None], acc)
            s2, s3 = t2, t3
    return acc
