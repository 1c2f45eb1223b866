"""Weights of 4 bits that stand for one of 16 numbers: MXFP4 and NVFP4 (E2M1), and bitsandbytes' nf4 and fp4.

Values, in float32 and then rounded to `result`:

    mxfp4   number × 2^(scale - 127)                    gpt-oss and compressed-tensors; exact in bfloat16
    nvfp4   number × (scale / overall), to bfloat16     compressed-tensors
    nvfp4   number × (scale × overall)                  ModelOpt
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Final

import torch

from swarm.models.stored.eight_bits import scale_values
from swarm.models.stored.matrix import PartedMatrix, look_up, rounded

NUMBERS: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, eq=False)
class LookupMatrix(PartedMatrix):
    """A matrix in nf4 or bitsandbytes' fp4.

    Attributes:
        encoding: `nf4` or `bnbfp4`.
        codes: uint8 [rows, columns / 2], an even column in a byte's high half.
        scales: [rows, columns / block]: bits of float32, int32, or uint8 where they are quantised again.
        place: int32 [rows], the number of a row's first block in `nested`; None where scales are float32.
        nested: int32 [n], bits of float32, for so many blocks each.
        offset: int32 [rows], bits of float32, added to a scale.
        numbers: what the 16 codes mean.
        nested_numbers: what the 256 bytes of scales mean.
        nested_block: scales that share an entry of `nested`.
        result: the type to which values are rounded.
    """

    TABLES: ClassVar[tuple[str, ...]] = ("nested",)

    scales: torch.Tensor
    place: torch.Tensor | None
    nested: torch.Tensor | None
    offset: torch.Tensor | None
    block: int
    numbers: tuple[float, ...]
    nested_numbers: tuple[float, ...]
    nested_block: int
    result: torch.dtype

    @property
    def places_per_entry(self) -> int:
        """As of `PartedMatrix`."""
        return self.nested_block

    def decode(self, start: int, end: int) -> torch.Tensor:
        """As `StoredMatrix.decode`."""
        values = pairs_of(self.numbers, self.codes[start:end], high_first=True)
        scales = self._scales(start, end)
        values.view(len(values), -1, self.block).mul_(scales[..., None])
        return rounded(values, self.result)

    def _scales(self, start: int, end: int) -> torch.Tensor:
        """float32 [end - start, columns / block]"""
        scales = self.scales[start:end]
        if self.place is None or self.nested is None or self.offset is None:
            return scales.view(torch.float32)
        numbers = torch.tensor(self.nested_numbers, dtype=torch.float32, device=scales.device)
        found = look_up(numbers, scales)
        which = (self.place[start:end, None] + torch.arange(scales.shape[1], device=scales.device)) // self.nested_block
        found.mul_(self.nested.view(torch.float32).index_select(0, which.reshape(-1).int()).view(scales.shape))
        return found.add_(self.offset[start:end].view(torch.float32)[:, None])


@dataclass(frozen=True, eq=False)
class Fp4Matrix(PartedMatrix):
    """A matrix in FP4.

    Attributes:
        encoding: `mxfp4` or `nvfp4`.
        codes: uint8 [rows, columns / 2], an even column in a byte's low half.
        scales: uint8 [rows, columns / group], bits of scales.
        overall: int32 [rows], a float32 for the whole matrix; None where there is none.
        scale_type: what a scale is; uint8 is a power of two.
        divides: whether scales are divided by `overall`, and not multiplied.
        result: the type to which values are rounded.
    """

    scales: torch.Tensor
    overall: torch.Tensor | None
    group: int
    scale_type: torch.dtype
    divides: bool
    result: torch.dtype

    def decode(self, start: int, end: int) -> torch.Tensor:
        """As `StoredMatrix.decode`."""
        values = pairs_of(NUMBERS, self.codes[start:end], high_first=False)
        scales = scale_values(self.scales[start:end], self.scale_type)
        if self.overall is not None:
            overall = self.overall[start:end].view(torch.float32)[:, None]
            scales = scales / overall if self.divides else scales * overall
        values.view(len(values), -1, self.group).mul_(scales[..., None])
        return rounded(values, self.result)


def pairs_of(numbers: tuple[float, ...], codes: torch.Tensor, *, high_first: bool) -> torch.Tensor:
    """What bytes [n, columns / 2] of two codes each mean: float32 [n, columns].

    Args:
        numbers: of the 16 codes.
        codes: uint8.
        high_first: whether a byte's high half is the first column.
    """
    return look_up(_pair_table(numbers, high_first, codes.device), codes).view(torch.float32)


@cache
def _pair_table(numbers: tuple[float, ...], high_first: bool, device: torch.device) -> torch.Tensor:
    """int64 [256]: the bits of two float32 for each byte, so that one look-up gives both."""
    with torch.inference_mode(mode=False):
        byte = torch.arange(256)
        low, high = (torch.tensor(numbers)[half] for half in (byte & 15, byte >> 4))
        pair = torch.stack((high, low) if high_first else (low, high), -1)
        return pair.contiguous().view(torch.int64).flatten().to(device)
