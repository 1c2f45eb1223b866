"""Weights for tests of the product kernels, and what they stand for, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swarm.compute.kernels.code_numbers import E4M3_NAN, numbers_of
from swarm.compute.kernels.packed_words import arrange, whole_words
from tests.devices import DEVICE


@dataclass(frozen=True)
class Weight:
    """A weight as the kernels take it.

    Attributes:
        words: the card's form, or the weight itself.
        scales: the card's form; none for whole weights.
        bits: 4, 8, 16 or 32.
        group: codes that share a scale.
        restored: float64 [..., N, K], what it stands for.
        zeros: the card's form; none where nothing is added.
        numbers: what codes mean.
    """

    words: torch.Tensor
    scales: torch.Tensor | None
    bits: int
    group: int
    restored: torch.Tensor
    zeros: torch.Tensor | None = None
    numbers: str = ""


def make_codes(lead: tuple[int, ...], n: int, k: int, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes int8 [..., N, K] and scales bfloat16 [..., K / group, N] of either sign."""
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (*lead, n, k), dtype=torch.int8, device=DEVICE)
    return codes, torch.randn(*lead, k // group, n, device=DEVICE).mul_(0.1).to(torch.bfloat16)


def make_weight(  # noqa: PLR0913
    n: int, k: int, bits: int, group: int, dtype: torch.dtype, lead: tuple[int, ...] = ()
) -> Weight:
    """A random weight."""
    if bits >= 16:
        whole = random_rows(*lead, n, k, dtype=dtype)
        return Weight(whole, None, bits, 0, whole.double())
    codes, scales = make_codes(lead, n, k, bits, group)
    by_code = scales.double().transpose(-1, -2).repeat_interleave(group, -1)
    return Weight(*arrange(codes, scales, bits, group), bits, group, codes * by_code)


def make_form(  # noqa: PLR0913
    n: int,
    k: int,
    bits: int,
    group: int,
    *,
    numbers: str = "",
    with_zeros: bool = False,
    scale_type: torch.dtype = torch.bfloat16,
    lead: tuple[int, ...] = (),
) -> Weight:
    """A random weight whose codes mean something else than integers, or with zeros."""
    codes, scales = make_codes(lead, n, k, bits, group)
    if numbers == "e4m3":
        codes = torch.where(codes & E4M3_NAN == E4M3_NAN, 0, codes)
    scales = (scales.float() * 1.01).to(scale_type)
    zeros = torch.randn_like(scales.float()).to(scale_type) if with_zeros else None
    restored = numbers_of(codes, numbers).double() * scales.double().transpose(-1, -2).repeat_interleave(group, -1)
    if zeros is not None:
        restored += zeros.double().transpose(-1, -2).repeat_interleave(group, -1)
        zeros = whole_words(zeros, bits)
    return Weight(*arrange(codes, scales, bits, group), bits, group, restored, zeros, numbers)


def random_rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, as the device's own: the same for every dtype but for rounding."""
    return torch.randn(*shape, device=DEVICE).to(dtype)


def largest_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """How far `got` is off, in units of what its dtype rounds off the largest of the exact values."""
    return float((got.double() - exact).abs().max() / exact.abs().max() / torch.finfo(got.dtype).eps)
