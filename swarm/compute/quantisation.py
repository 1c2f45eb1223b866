"""Weights as small integers: int8 in groups of 128, int4 in groups of 64, one bf16 scale a group. Values only.

    weight [N, K] = codes [N, K] × scales [K / group, N]      a group: neighbours along K, which a product sums over

No zero points and no data: a layer is rounded by itself in one pass. An int8 scale maps the group's largest magnitude
to 127. An int4 scale is the one of fourteen, of either sign, that leaves the least squared error: -8 has no
counterpart, so the sign decides which end of a group gets it.

**The same integers everywhere.** Machines of one numeric class hold the same weights, so CPU and GPU must round alike.
Only operations that IEEE 754 rounds in one way are used, each as a kernel of its own, so that none is fused into
another: no division by a Python number, which torch turns into a product on a GPU, and no `sum`, whose order is a
device's own. Squared errors are added up in pairs (`_pair_sum`). How a tensor is cut into pieces changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from swarm.base.errors import UnsupportedModel

GROUPS: Final = {8: 128, 4: 64}
"""Weights that share a scale, by the bits of a weight."""
MIN_GROUP: Final = 16
"""Smaller groups are not made: scales would take as much as what they save."""
CODES: Final = {8: (-127, 127), 4: (-8, 7)}
"""The smallest and the largest code."""
TRIED: Final = (8.0, 8.4, 8.9, 9.4, 10.0, 10.7, 11.4)
"""What an int4 scale may map the largest magnitude to; above 8 it is cut off, and the others get finer steps."""
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
        zeros: as the scales, added to a group's values; None adds nothing.
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
    at_once = max(1, (PIECE if flat.device.type == "cpu" else PIECE_ON_CARD) // columns)
    for start in range(0, len(flat), at_once):
        piece = flat[start : start + at_once]
        grouped = piece.to(torch.float32, copy=True).view(len(piece), -1, group)
        most = grouped.abs().amax(-1)
        if not bool(most.isfinite().all()):
            raise UnsupportedModel(f"a weight is not finite: int{bits} cannot hold it; use --weights auto")
        scale = _scale8(most) if bits == 8 else _scale4(grouped, most)
        scales[start : start + at_once] = scale
        rounded = grouped.div_(scale.float()[..., None]).round_().clamp_(*CODES[bits])
        codes[start : start + at_once] = rounded.view(len(piece), columns).to(torch.int8)
    shape = weight.shape[:-1]
    turned = scales.view(*shape, -1).transpose(-1, -2).contiguous()
    return QuantisedWeight(codes.view(weight.shape), turned, bits, group)


def restore(weight: QuantisedWeight) -> torch.Tensor:
    """What the integers stand for: float32, exact, of the codes' shape."""
    codes, scales = weight.codes, weight.scales.float().transpose(-1, -2)
    grouped = codes.float().view(*codes.shape[:-1], -1, weight.group)
    return (grouped * scales[..., None]).view(codes.shape)


def _scale8(most: torch.Tensor) -> torch.Tensor:
    """bfloat16 [rows, groups] of the largest magnitudes [rows, groups]."""
    return _usable(most.div(torch.full_like(most, CODES[8][1])))


def _scale4(grouped: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """bfloat16 [rows, groups] with the least squared error over groups [rows, groups, group]; ties: the first tried."""
    best = torch.full_like(most, torch.inf)
    chosen = torch.ones_like(most, dtype=torch.bfloat16)
    steps = torch.empty_like(grouped)
    for levels in TRIED:
        positive = _usable(most.div(torch.full_like(most, levels)))
        for tried in (positive, positive.neg()):
            wide = tried.float()[..., None]
            torch.div(grouped, wide, out=steps).round_().clamp_(*CODES[4]).mul_(wide).sub_(grouped)
            error = _pair_sum(steps.mul_(steps))
            better = error < best
            best, chosen = torch.where(better, error, best), torch.where(better, tried, chosen)
    return chosen


def _usable(scale: torch.Tensor) -> torch.Tensor:
    """Never zero, so that no division by it fails."""
    return scale.clamp_(min=MIN_SCALE).to(torch.bfloat16)


def _pair_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, a power of two: halves are added up, so in one order on every device."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]
