"""Device functions of the product kernels: the sum over one range of K, for outputs × rows of one program.

The weight is the matrix unit's *first* operand, so its tile of outputs fills the unit's 64 lanes and 16 rows cost what
one costs. Sums are float32 and go along K in one order, step after step; a step's width depends on the weight's form
alone (`swarm.compute.kernels.product_cuts`), never on the card or on the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from swarm.compute.kernels.arithmetic import multiply_add


@triton.jit
def four_bit_planes(words: tl.tensor, dtype: tl.constexpr, assembly: tl.constexpr) -> tl.tuple:
    """The 4 codes of each word, −8 … 7, exactly.

    In assembly two words at a time: 0x4300 | q is the bfloat16 128 + q, from which one fma takes 136.
    """
    if assembly:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 s, t, u, a, b, c, d, one, off;
            shr.u32 s, $4, 4; shr.u32 t, $4, 8; shr.u32 u, $4, 12; mov.b32 one, 0x3F803F80; mov.b32 off, 0xC308C308;
            lop3.b32 a, $4, 0x000F000F, 0x43004300, 0xEA; lop3.b32 b, s, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 c, t, 0x000F000F, 0x43004300, 0xEA; lop3.b32 d, u, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, a, one, off; fma.rn.bf16x2 $1, b, one, off;
            fma.rn.bf16x2 $2, c, one, off; fma.rn.bf16x2 $3, d, one, off; }""",
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        q = words.to(tl.int32)
        first, second = ((q & 15) - 8).to(dtype), ((q >> 4 & 15) - 8).to(dtype)
        return first, second, ((q >> 8 & 15) - 8).to(dtype), ((q >> 12 & 15) - 8).to(dtype)


@triton.jit
def eight_bit_planes(words: tl.tensor, dtype: tl.constexpr, assembly: tl.constexpr) -> tl.tuple:
    """The 2 codes of each word, −128 … 127, exactly.

    In assembly two words at a time: 0x4300 | the low 7 bits is 128 + q; the sign bit turns −128 into −256.
    """
    if assembly:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 s, a, b, c, d, one;
            shr.u32 s, $2, 8; mov.b32 one, 0x3F803F80;
            lop3.b32 a, $2, 0x007F007F, 0x43004300, 0xEA; lop3.b32 b, $2, 0x00800080, 0xC300C300, 0xEA;
            lop3.b32 c, s, 0x007F007F, 0x43004300, 0xEA; lop3.b32 d, s, 0x00800080, 0xC300C300, 0xEA;
            fma.rn.bf16x2 $0, a, one, b; fma.rn.bf16x2 $1, c, one, d; }""",
            "=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        q = words.to(tl.int32)
        return (q << 24 >> 24).to(dtype), (q >> 8).to(dtype)


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
                w0, w1 = eight_bit_planes(words, dtype, assembly)
            else:
                w0, w1, w2, w3 = four_bit_planes(words, dtype, assembly)
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
