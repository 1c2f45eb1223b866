"""Weights as small integers: int8 in groups of 128, int4 in groups of 32 with zero points. Values only.

    int8    weight [N, K] = codes [N, K] × scales [K / group, N]          a group: neighbours along K, which a product
    int4    weight [N, K] = codes × scales + zeros [K / group, N]         sums over; scales and zeros are bfloat16

No data: a layer is rounded by itself in one pass. An int8 scale maps the group's largest magnitude to 127. An int4
scale is one of seven shares of the group's range. Its zero is moved until errors add up to nothing, since inputs share
a mean; then the scale with the least sum of |error|^1.5 wins. Squares would let one far value coarsen a group.

**The same integers everywhere.** Machines of one numeric class hold the same weights, so CPU and GPU must round alike.
Only operations that IEEE 754 rounds in one way are used, square roots among them, each as a kernel of its own, so that
none is fused into another: no power, no division by a Python number, which torch turns into a product on a GPU, and no
`sum`, whose order is a device's own. Errors are added up in pairs (`_pair_sum`). A code times its scale is exact in
float32, so code × scale + zero is rounded once, fused or not. How a tensor is cut into pieces changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from swarm.base.errors import UnsupportedModel

GROUPS: Final = {8: 128, 4: 32}
"""Weights that share a scale, by the bits of a weight."""
MIN_GROUP: Final = 16
"""Smaller groups are not made: scales would take as much as what they save."""
CODES: Final = {8: (-127, 127), 4: (-8, 7)}
"""The smallest and the largest code."""
TRIED: Final = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Shares of a group's range that fifteen int4 scales may span; what lies beyond is cut off, and the others get finer
steps."""
CENTRED: Final = 2
"""How often an int4 zero is moved by the mean error."""
MIN_SCALE: Final = torch.finfo(torch.bfloat16).tiny
"""Of a group of zeros."""
PIECE: Final = 1 << 18
"""Weights that are rounded at a time: what a step leaves stays in a core's cache."""
PIECE_ON_CARD: Final = 1 << 24
"""The same on a GPU, where a step of fewer weights takes as long as starting it: 64 MiB a step."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """Integers and what they stand for.

    Attributes:
        codes: int8 [N, K], or [E, N, K] of E experts: -127 … 127, or -8 … 7 for int4.
        scales: bfloat16 [K / group, N], or [E, K / group, N].
        bits: of a code: 8 or 4.
        group: neighbours along K that share a scale.
        zeros: what a code of 0 stands for, of the form of `scales`; None for int8, where it is 0.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bits: int
    group: int
    zeros: torch.Tensor | None = None


def group_of(columns: int, bits: int) -> int | None:
    """How many weights share a scale in a matrix of so many columns; None for one that stays as it is."""
    group = math.gcd(columns, GROUPS[bits])
    return group if group >= MIN_GROUP else None


def quantise(weight: torch.Tensor, bits: int) -> QuantisedWeight:
    """Round a weight to integers, to the nearest, ties to even; the same ones on every device.

    Args:
        weight: [N, K], or [E, N, K] of E experts; of any floating type and on any device.
        bits: 8 or 4.

    Raises:
        UnsupportedModel: a value is not finite.
        ValueError: K is no multiple of 16 (`group_of`).
    """
    columns = weight.shape[-1]
    group = group_of(columns, bits)
    if group is None:
        raise ValueError(f"{columns} columns do not split into groups of {MIN_GROUP} or more")
    flat = weight.detach().reshape(-1, columns)
    codes = torch.empty(flat.shape, dtype=torch.int8, device=flat.device)
    scales = torch.empty(len(flat), columns // group, dtype=torch.bfloat16, device=flat.device)
    zeros = torch.empty_like(scales) if bits == 4 else None
    at_once = max(1, (PIECE if flat.device.type == "cpu" else PIECE_ON_CARD) // columns)
    for start in range(0, len(flat), at_once):
        rows = slice(start, start + at_once)
        piece = flat[rows].reshape(-1, group)
        low, high = piece.amin(-1).float(), piece.amax(-1).float()
        if not bool((high - low).isfinite().all()):
            raise UnsupportedModel(f"a weight is not finite: int{bits} cannot hold it; use --weights auto")
        if zeros is None:
            scale = _scale8(torch.maximum(high, low.neg()))
            rounded = _codes(piece.float(), scale.float()[:, None], bits)
        else:
            grouped = piece.t().to(torch.float32, memory_format=torch.contiguous_format)  # [group, groups]
            scale, zero = _line4(grouped, low, high)
            zeros[rows] = zero.view(-1, columns // group)
            rounded = _codes(grouped - zero.float(), scale.float(), bits).t()
        scales[rows] = scale.view(-1, columns // group)
        codes[rows].view(-1, group).copy_(rounded)
    shape = weight.shape[:-1]
    turned = [None if one is None else one.view(*shape, -1).transpose(-1, -2).contiguous() for one in (scales, zeros)]
    assert turned[0] is not None
    return QuantisedWeight(codes.view(weight.shape), turned[0], bits, group, turned[1])


def restore(weight: QuantisedWeight) -> torch.Tensor:
    """What the integers stand for: float32, of the codes' shape; int8 is exact, int4 is rounded once."""
    codes, scales = weight.codes, weight.scales.float().transpose(-1, -2)
    values = codes.float().view(*codes.shape[:-1], -1, weight.group) * scales[..., None]
    if weight.zeros is not None:
        values += weight.zeros.float().transpose(-1, -2)[..., None]
    return values.view(codes.shape)


def _scale8(most: torch.Tensor) -> torch.Tensor:
    """bfloat16 [groups] of the largest magnitudes [groups]."""
    return _usable(most.div(torch.full_like(most, CODES[8][1])))


def _line4(grouped: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero of each group, bfloat16 [groups]; of equal errors the first scale that was tried.

    Args:
        grouped: [group, groups]: a group is a column, so that its sums are those of rows.
        low: [groups] the smallest of each group.
        high: [groups] the largest.
    """
    range_, best = high - low, torch.full_like(low, torch.inf)
    middle = (low + high).mul_(0.5)
    found = torch.ones_like(low), torch.zeros_like(low)
    left, steps = torch.empty_like(grouped), torch.empty_like(grouped)
    for share in TRIED:
        scale = _usable(range_.mul(share).div_(torch.full_like(low, 15))).float()
        zero = middle + scale.mul(0.5)  # codes reach from -8 to 7
        for turn in range(CENTRED + 1):
            zero = zero.to(torch.bfloat16).float() if turn == CENTRED else zero
            torch.sub(grouped, zero, out=left)
            left.sub_(_codes(left, scale, 4, steps).mul_(scale))
            if turn < CENTRED:
                zero = zero + _pair_sum(left).mul_(1 / len(grouped))  # a power of two: exact
        error = _pair_sum(torch.sqrt(left.abs_(), out=steps).mul_(left))
        better = error < best
        best = torch.where(better, error, best)
        found = torch.where(better, scale, found[0]), torch.where(better, zero, found[1])
    return found[0].to(torch.bfloat16), found[1].to(torch.bfloat16)


def _codes(values: torch.Tensor, scale: torch.Tensor, bits: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """The nearest codes, as floating point."""
    return torch.div(values, scale, out=out).round_().clamp_(*CODES[bits])


def _usable(scale: torch.Tensor) -> torch.Tensor:
    """Never zero, so that no division by it fails."""
    return scale.clamp_(min=MIN_SCALE).to(torch.bfloat16)


def _pair_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, a power of two: halves are added up, so in one order on every device."""
    while len(values) > 1:
        half = len(values) // 2
        values = values[:half] + values[half:]
    return values[0]
