"""Integer weights with a scale for a group of columns: GPTQ, AWQ, compressed-tensors and bitsandbytes' int8.

Values: (code - zero) × scale, as exact as float32 and then rounded to `result`, which is the scale's own type; so do
AutoAWQ, GPTQModel and compressed-tensors. bitsandbytes' int8: code × scale, times 1 / 127 in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Self

import torch

from swarm.models.stored.matrix import PartedMatrix, bits_of, rounded

AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of an AWQ word holds which of eight neighbouring outputs."""


@dataclass(frozen=True, eq=False)
class GroupedMatrix(PartedMatrix):
    """A matrix of 4-bit or 8-bit integers.

    Attributes:
        encoding: such as `gptq4`, `awq4`, `ct4`, `bnb8`.
        codes: uint8 [rows, columns / 2], an even column in a byte's low half; or [rows, columns], uint8 or int8.
        scales: bits of scales, an integer type, [rows, groups].
        zeros: [rows, groups], uint8 or int8; None where every group has `zero`.
        order: int32 [n, columns], the group of each column; None where neighbours are a group.
        place: int32 [rows], which row of `order` is this row's; None without.
        bits: of a code: 4 or 8.
        zero: what stands for 0, where `zeros` is None.
        result: the type to which values are rounded.
        factor: what values are multiplied with at the end.
    """

    TABLES: ClassVar[tuple[str, ...]] = ("order",)

    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None
    place: torch.Tensor | None
    bits: int
    zero: int
    scale_type: torch.dtype
    result: torch.dtype
    factor: float = 1.0

    @classmethod
    def of(
        cls,
        encoding: str,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | int = 0,
        order: torch.Tensor | None = None,
    ) -> Self:
        """Hold codes [rows, columns], or [rows, columns / 2] of 4 bits, with scales [rows, groups].

        Args:
            encoding: the format's name, which ends with the bits of a code.
            zeros: [rows, groups], or what stands for 0 everywhere.
            order: int [columns], the group of each column, if neighbours need not be of one.

        Raises:
            ValueError: the shapes do not fit each other.
        """
        bits = int(encoding[-1])
        rows, columns = len(codes), codes.shape[1] * 8 // bits
        if scales.shape[0] != rows or (order is None and columns % scales.shape[1]):
            raise ValueError(f"scales {list(scales.shape)} do not fit {rows} rows of {columns} columns")
        if isinstance(zeros, torch.Tensor) and zeros.shape != scales.shape:
            raise ValueError(f"zeros {list(zeros.shape)} do not fit scales {list(scales.shape)}")
        if isinstance(zeros, torch.Tensor) and zeros.numel() and bool((zeros == zeros.flatten()[0]).all()):
            zeros = int(zeros.flatten()[0])  # of a format that is symmetric, and need not be held
        if order is not None and len(order) != columns:
            raise ValueError(f"an order of {len(order)} columns does not fit {columns}")
        if order is not None and not 0 <= int(order.min()) <= int(order.max()) < scales.shape[1]:
            raise ValueError("a column's group has no scale")
        return cls(
            rows=rows,
            columns=columns,
            encoding=encoding,
            codes=codes.contiguous(),
            scales=bits_of(scales.contiguous()),
            zeros=None if isinstance(zeros, int) else zeros.contiguous(),
            order=None if order is None else order.int()[None],
            place=None if order is None else torch.zeros(rows, dtype=torch.int32),
            bits=bits,
            zero=zeros if isinstance(zeros, int) else 0,
            scale_type=scales.dtype,
            result=scales.dtype,
        )

    def decode(self, start: int, end: int) -> torch.Tensor:
        """As `StoredMatrix.decode`."""
        codes = self.codes[start:end]
        values = torch.empty(len(codes), self.columns, device=codes.device)
        if self.bits == 4:
            pairs = values.view(len(codes), -1, 2)
            pairs[..., 0], pairs[..., 1] = codes & 15, codes >> 4
        else:
            values.copy_(codes)
        scales = self.scales[start:end].view(self.scale_type).float()
        zeros = None if self.zeros is None else self.zeros[start:end].float()
        if self.order is None or self.place is None:
            grouped = values.view(len(values), scales.shape[1], -1)
            grouped.sub_(self.zero if zeros is None else zeros[..., None]).mul_(scales[..., None])
        elif len(self.order) == 1:
            values.sub_(self.zero if zeros is None else zeros.index_select(1, self.order[0]))
            values.mul_(scales.index_select(1, self.order[0]))
        else:
            groups = self.order.index_select(0, self.place[start:end]).long()
            values.sub_(self.zero if zeros is None else zeros.gather(1, groups)).mul_(scales.gather(1, groups))
        if self.factor != 1.0:
            values.mul_(self.factor)
        return rounded(values, self.result)


def column_order(g_idx: torch.Tensor, groups: int) -> torch.Tensor | None:
    """The group of each column, [columns]; None where neighbours are a group, so that nothing need be held."""
    plain = torch.arange(len(g_idx)) // max(1, len(g_idx) // groups)
    return None if torch.equal(g_idx.long(), plain) else g_idx


def bytes_of_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 words along inputs, [columns × bits / 32, rows], as bytes of rows, [rows, columns × bits / 8]."""
    assert bits in (4, 8)
    return words.t().contiguous().view(torch.uint8)


def words_along(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes in int32 words along the last dimension, [n, m] as uint8 [n, m × 32 / bits]."""
    as_bytes = words.contiguous().view(torch.uint8)
    return torch.stack((as_bytes & 15, as_bytes >> 4), -1).flatten(1) if bits == 4 else as_bytes


def awq_codes(words: torch.Tensor) -> torch.Tensor:
    """Codes in AWQ's words along outputs, [n, rows / 8], in the order of outputs: uint8 [n, rows]."""
    eights = words_along(words, 4).view(len(words), -1, 8)
    return eights[..., list(AWQ_ORDER)].flatten(1)


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [n, columns] of 4-bit codes as [n, columns / 2], an even column in a byte's low half."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)
