"""The card's form of quantised weights: 16-bit words, each with one code of every plane, and its inverse.

A **plane** is one of the 16 / bits places of a word. The codes of one word belong to *neighbouring groups* along K:
word `i` of step `s` holds code `i` of the groups `s · planes`, `s · planes + 1`, … So each plane of a tile of words is
a tile of one group: unpacking needs no shuffle between threads, and an output has one scale per plane.
"""

from __future__ import annotations

import torch

QUANTISED_BITS = (4, 8)
WHOLE_BITS = {16: (torch.bfloat16, torch.float16), 32: (torch.float32,)}
"""Bits of weights that are used as they are, with the dtypes that they may have: the same as their input's."""
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUP_SIZES = (16, 32, 64, 128)
"""A group is one product of the matrix unit: a power of two and at least 16. Tiles of more do not fit small cards."""


def takes(n: int, k: int, bits: int, group: int, dtype: torch.dtype) -> bool:
    """Whether the product kernels multiply inputs of this dtype with such a weight [n, k].

    `group` is 0 where the weight has none. Not taken: other bits than 4, 8, 16 and 32; whole weights of another dtype
    than the input; groups that are no power of two between 16 and 128; and a K that ends inside a group.
    """
    if n < 1 or k < 1:
        return False
    if bits in WHOLE_BITS:
        return dtype in WHOLE_BITS[bits]
    return bits in QUANTISED_BITS and dtype in INPUT_DTYPES and group in GROUP_SIZES and k % group == 0


def planes_of(bits: int) -> int:
    """How many codes a word holds."""
    return 16 // bits


def arrange(codes: torch.Tensor, scales: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The words and scales that the kernels read.

    Args:
        codes: int8 [..., N, K]: −8 … 7 for 4 bits, −128 … 127 for 8. Of a table of sixteen numbers, the place less 8.
        scales: [..., K / group, N] of any floating type.
        bits: 4 or 8.
        group: codes along K that share a scale.

    Returns:
        int16 words [..., N, K' · bits / 16] and scales [..., K' / group, N]. K' is K, filled up with groups of zeros to
        whole words; their scales are zero, and the kernels read no input for them.
    """
    *lead, n, k = codes.shape
    planes = planes_of(bits)
    steps = -(-k // (planes * group))
    padding = steps * planes - k // group
    if padding:
        codes = torch.cat([codes, codes.new_zeros(*lead, n, padding * group)], dim=-1)
    parts = codes.view(*lead, n, steps, planes, group)
    words = torch.zeros(*lead, n, steps, group, dtype=torch.int16, device=codes.device)
    for plane in range(planes):  # one plane at a time: a layer's words are made beside little more than its codes
        words |= _unsigned(parts[..., plane, :], bits) << (bits * plane)
    return words.view(*lead, n, steps * group), whole_words(scales, bits)


def whole_words(of_groups: torch.Tensor, bits: int) -> torch.Tensor:
    """Scales or zeros [..., groups, N], filled up by zeros to the groups of whole words."""
    *lead, groups, n = of_groups.shape
    padding = -groups % planes_of(bits)
    if padding:
        of_groups = torch.cat([of_groups, of_groups.new_zeros(*lead, padding, n)], dim=-2)
    return of_groups.contiguous()


def disarrange(words: torch.Tensor, bits: int, group: int, k: int) -> torch.Tensor:
    """The codes int8 [..., N, k] that `arrange` made these words from."""
    *lead, n, width = words.shape
    parts = words.view(*lead, n, width // group, 1, group)
    shifts = torch.arange(planes_of(bits), device=words.device, dtype=torch.int16).mul_(bits)[:, None]
    fields = (parts >> shifts) & (2**bits - 1)
    codes = fields - 8 if bits == 4 else fields.to(torch.int8)
    whole: torch.Tensor = codes.to(torch.int8).reshape(*lead, n, -1)
    return whole[..., :k].contiguous()


def _unsigned(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """What stands in a word, int16: 4 bits as code + 8, 8 bits in two's complement."""
    wide = codes.to(torch.int16)
    return wide + 8 if bits == 4 else wide & 0xFF
