"""Integers that stand for weights on a line: what most formats are, whichever way their files pack them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LinearCodes:
    """Rows whose values are (code - shift) * step + least, a step for each group of columns.

    Attributes:
        codes: uint8 [rows, groups, columns / groups], below 2 ** bits.
        bits: of a code: 2 to 8.
        shift: what is taken off a code.
        steps: float32 [rows, groups].
        least: float32 [rows, groups], added at the end; None adds nothing.
        order: int64 [columns], which of the matrix's columns lies at each place; None where they lie in order.
    """

    codes: torch.Tensor
    bits: int
    shift: int
    steps: torch.Tensor
    least: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """float32 [rows, columns], column by column in the order of the places."""
        values = self.codes.float()
        if self.shift:
            values.sub_(self.shift)
        values.mul_(self.steps[..., None])
        if self.least is not None:
            values.add_(self.least[..., None])
        return values.flatten(1)
