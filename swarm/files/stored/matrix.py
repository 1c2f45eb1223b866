"""A weight matrix as a file holds it: packed, and decoded some rows at a time. Knows no layer and no file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from swarm.files.linear_codes import LinearCodes

TAKE_FROM_THREADS: Final = 4
"""With so many threads, the way that all of them share is the faster one."""


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

    def linear_codes(self, start: int, end: int) -> LinearCodes | None:
        """Rows `[start, end)` as integers; None where their values lie on no line."""
        return None

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
        return sum(part.numel() * part.itemsize for part in self.parts().values())


@dataclass(frozen=True, eq=False)
class PartedMatrix(StoredMatrix):
    """A matrix whose fields are its parts and what they mean. A row lies in `codes`, at least.

    What several rows share lies in tables. A row's entry in `place` says where in them. A selection keeps tables whole.

    Attributes:
        codes: of an integer type, [rows, …].
    """

    TABLES: ClassVar[tuple[str, ...]] = ()
    """Fields that lie in no order of rows."""

    rows: int
    columns: int
    encoding: str
    codes: torch.Tensor

    def parts(self) -> dict[str, torch.Tensor]:
        every = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in every if isinstance(value, torch.Tensor)}

    def with_parts(self, parts: Mapping[str, torch.Tensor]) -> Self:
        changed: dict[str, Any] = {"rows": len(parts["codes"]), **parts}
        return replace(self, **changed)

    def select(self, rows: torch.Tensor) -> Self:
        parts = self.parts()
        chosen = {
            name: part if name in self.TABLES else part.index_select(0, rows.to(part.device))
            for name, part in parts.items()
        }
        return self.with_parts(chosen)

    def joins(self, other: StoredMatrix) -> bool:
        """As `StoredMatrix.joins`: what its parts mean must be the same too."""
        return super().joins(other) and isinstance(other, PartedMatrix) and self._meaning() == other._meaning()

    def join(self, below: Sequence[StoredMatrix]) -> Self:
        """As `StoredMatrix.join`: tables lie one below the other, and places move with them."""
        every = [dict(self.parts()), *(dict(one.parts()) for one in below)]
        before = 0
        for parts in every:
            if "place" in parts:
                parts["place"] = parts["place"] + before
                before += len(parts[self.TABLES[0]]) * self.places_per_entry
        return self.with_parts({name: torch.cat([parts[name] for parts in every]) for name in every[0]})

    @property
    def places_per_entry(self) -> int:
        """How far a place moves on when a table grows by one entry."""
        return 1

    def _meaning(self) -> tuple[object, ...]:
        own = (getattr(self, field.name) for field in fields(self) if field.name != "rows")
        return tuple(value for value in own if not isinstance(value, torch.Tensor))


def look_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The entries [n] of a table for codes of any shape, uint8: what `table[codes]` gives, several times as fast.

    On a CPU torch reads a table of one dimension fastest by one thread (0.2 to 0.5 ns a code), and `take` by all.
    """
    if codes.device.type == "cpu" and torch.get_num_threads() < TAKE_FROM_THREADS:
        return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)
    return torch.take(table, codes.long())


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The float32 values that these have in another floating type."""
    return values if dtype is torch.float32 else values.to(dtype).float()


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """A floating tensor's bits as integers, so that nothing rounds them; integers as they are."""
    if not values.is_floating_point():
        return values
    return values.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.itemsize])
