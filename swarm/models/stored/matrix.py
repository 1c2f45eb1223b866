"""A weight matrix as a file holds it: packed, and decoded some rows at a time. Knows no layer and no file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
        """What lies in memory, by name; of integer types, so that nothing that changes a model's type changes it.

        The first dimension of each part is the rows, unless a form has its own `select` and `join`.
        """

    @abstractmethod
    def with_parts(self, parts: Mapping[str, torch.Tensor]) -> Self:
        """A matrix of the same form with these parts, of as many rows as they have: moved, selected or joined ones."""

    @abstractmethod
    def decode(self, start: int, end: int) -> torch.Tensor:
        """Rows `[start, end)` as float32 [end - start, columns]: the values that the format's own library gives."""

    def select(self, rows: torch.Tensor) -> Self:
        """A matrix of these rows, int64 [n], in this order."""
        return self.with_parts(
            {name: part.index_select(0, rows.to(part.device)) for name, part in self.parts().items()}
        )

    def joins(self, other: StoredMatrix) -> bool:
        """Whether the rows of another matrix can lie below these in one matrix."""
        if type(self) is not type(other) or (self.columns, self.encoding) != (other.columns, other.encoding):
            return False
        mine, its = self.parts(), other.parts()
        return mine.keys() == its.keys() and all(
            mine[name].dtype == its[name].dtype and mine[name].shape[1:] == its[name].shape[1:] for name in mine
        )

    def join(self, below: Sequence[StoredMatrix]) -> Self:
        """A matrix of these rows and of those of others that `joins` takes, in order."""
        every = [self.parts(), *(one.parts() for one in below)]
        return self.with_parts({name: torch.cat([parts[name] for parts in every]) for name in every[0]})

    @property
    def size_bytes(self) -> int:
        """What the parts take."""
        return sum(part.numel() * part.itemsize for part in self.parts().values())
