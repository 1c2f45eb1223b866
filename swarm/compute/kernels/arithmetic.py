"""Device functions whose interpreted form would round, or add up, in another way than a card does."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply_add(a: tl.tensor, b: tl.tensor, acc: tl.tensor, interpreted: tl.constexpr) -> tl.tensor:
    """acc [n, m] + a [n, k] · b [k, m], in float32 and in one order for any m.

    Interpreted, the sum is written out: the interpreter's product takes bfloat16 for integers, and BLAS adds up in
    another order for another m on some CPUs.
    """
    if interpreted:
        return acc + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounded(values: tl.tensor, dtype: tl.constexpr, interpreted: tl.constexpr) -> tl.tensor:
    """Float32 values in `dtype`, to nearest even; the interpreter would cut bfloat16's digits off."""
    if interpreted and dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(dtype)
