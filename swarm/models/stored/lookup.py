"""bitsandbytes' 4-bit weights: a code for one of 16 numbers, and the largest magnitude of each block.

Values: number × magnitude in float32, rounded to `result`, the type that the weight had before. Magnitudes may be
quantised again ("double quantisation"): number of a byte × magnitude of 256 of them, plus an offset, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from swarm.models.stored.fp4 import pairs_of
from swarm.models.stored.matrix import PartedMatrix, look_up, rounded


@dataclass(frozen=True, eq=False)
class LookupMatrix(PartedMatrix):
    """A matrix in nf4 or bitsandbytes' fp4.

    Attributes:
        rows: as of `StoredMatrix`.
        columns: as of `StoredMatrix`.
        encoding: `nf4` or `bnbfp4`.
        codes: uint8 [rows, columns / 2], an even column in a byte's high half.
        scales: [rows, columns / block]: bits of float32, int32, or uint8 where they are quantised again.
        place: int32 [rows], the number of a row's first block in `nested`; None where scales are float32.
        nested: int32 [n], bits of float32, for so many blocks each.
        offset: int32 [rows], bits of float32, added to a scale.
        block: columns that share a scale.
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
