"""A weight matrix as a file holds it: packed, and decoded some rows at a time. Knows no layer and no file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


class StoredMatrix(ABC):
    """A matrix [rows, columns] in a format of its own, in which each row is decoded by itself.

    Attributes:
        rows: outputs of a product with it.
        columns: inputs of a product with it.
        encoding: the format's name, as it stands in the numeric class: `q4_k`, `mxfp4`, `fp8`.
    """

    rows: int
    columns: int
    encoding: str

    @abstractmethod
    def parts(self) -> Mapping[str, torch.Tensor]:
        """What lies in memory, by name; of integer types, so that nothing that changes a model's type changes it."""

    @abstractmethod
    def decode(self, start: int, end: int) -> torch.Tensor:
        """Rows `[start, end)` as float32 [end - start, columns]: the values that the format's own library gives."""

    @abstractmethod
    def select(self, rows: torch.Tensor) -> Self:
        """A matrix of these rows, int64 [n], in this order."""
