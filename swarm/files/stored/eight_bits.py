"""FP8 weights: a byte a weight, and a scale for a block, a row, a group of columns or the whole matrix.

Values: the byte's number times its scale in float32, rounded to `result`: float32 where the format has no other rule
(DeepSeek's, and transformers' own dequantiser), the scale's type in compressed-tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Final, Self

import torch

from swarm.files.stored.matrix import PartedMatrix, bits_of, look_up, rounded

TYPES: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
POWERS_OF_TWO: Final = (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8))
"""Types of scales whose byte is an exponent + 127; older versions of torch know no name for it."""
KNOWN: Final = (128, 128)
"""Rows and columns of a block, where a config does not say."""


@dataclass(frozen=True, eq=False)
class Fp8Matrix(PartedMatrix):
    """A matrix in FP8.

    Attributes:
        encoding: `fp8`.
        codes: uint8 [rows, columns], the numbers' bits.
        place: int32 [rows], which row of `scales` is this row's.
        scales: bits of scales, an integer type, [n, columns / width].
        code_type: what a byte is: `float8_e4m3fn` or `float8_e5m2`.
        scale_type: what a scale is; uint8 is a power of two whose exponent is the byte - 127.
        result: the type to which values are rounded.
    """

    TABLES: ClassVar[tuple[str, ...]] = ("scales",)

    place: torch.Tensor
    scales: torch.Tensor
    width: int
    code_type: torch.dtype
    scale_type: torch.dtype
    result: torch.dtype

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        scales: torch.Tensor,
        result: torch.dtype | None = None,
        block: tuple[int, int] | None = None,
    ) -> Self:
        """Take a weight [rows, columns] of an FP8 type and its scales as files hold them.

        Args:
            weight: or [experts, rows, columns], whose rows come to lie one below the other.
            scales: one, or [row blocks, column blocks]; with experts also [experts, …].
            result: the type to which values are rounded; None is the scales' own.
            block: rows and columns of a block, the last of which may be cut off; None is as the shapes say.

        Raises:
            ValueError: the shapes do not fit each other.
        """
        if scales.ndim > weight.ndim:
            raise ValueError(f"scales {list(scales.shape)} do not fit a weight {list(weight.shape)}")
        *experts, rows, columns = weight.shape
        count = experts[0] if experts else 1
        table = scales.reshape(count, -1, scales.shape[-1]) if scales.ndim >= 2 else scales.reshape(-1, 1, 1)
        if scales.ndim == 1 and len(scales) == rows and not experts:
            table = scales.reshape(1, rows, 1)
        if len(table) not in (1, count) or not table.shape[1] or table.shape[1] > rows or table.shape[2] > columns:
            raise ValueError(f"scales {list(scales.shape)} do not fit a weight {list(weight.shape)}")
        height, width = (
            _block(size, blocks, known)
            for size, blocks, known in zip((rows, columns), table.shape[1:], block or KNOWN, strict=True)
        )
        within = torch.arange(rows, dtype=torch.int32) // height
        first = torch.arange(count, dtype=torch.int32) * (table.shape[1] if len(table) > 1 else 0)
        return cls(
            rows=count * rows,
            columns=columns,
            encoding="fp8",
            codes=weight.reshape(-1, columns).contiguous().view(torch.uint8),
            place=(first[:, None] + within).flatten(),
            scales=bits_of(scales).reshape(-1, table.shape[2]).contiguous(),
            width=width,
            code_type=weight.dtype,
            scale_type=scales.dtype,
            result=result or scales.dtype,
        )

    def decode(self, start: int, end: int) -> torch.Tensor:
        codes = self.codes[start:end]
        values = look_up(numbers(self.code_type, codes.device), codes)
        scales = scale_values(self.scales.index_select(0, self.place[start:end]), self.scale_type)
        if self.columns % scales.shape[1] == 0 and self.columns // scales.shape[1] == self.width:
            values.view(len(values), -1, self.width).mul_(scales[..., None])
        else:
            values.mul_(scales.repeat_interleave(self.width, 1)[:, : self.columns])
        return rounded(values, self.result)


def scale_values(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales' float32 values of their bits."""
    if dtype.itemsize == 1:
        return look_up(numbers(dtype, bits.device), bits)
    return bits.view(dtype).float()


@cache
def numbers(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """float32 [256]: what each byte means in an 8-bit type."""
    with torch.inference_mode(mode=False):
        if dtype in POWERS_OF_TWO:
            return torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), torch.nan], device=device)
        return torch.arange(256, dtype=torch.uint8).view(dtype).float().to(device)


def _block(size: int, blocks: int, known: int) -> int:
    """How long a block is: as long as is known if so many fit, else as evenly as it goes."""
    return min(size, known) if -(-size // known) == blocks else -(-size // blocks)
