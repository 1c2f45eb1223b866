"""Which rows of stored matrices a model's parameter consists of, found by their values. Knows no names.

A class renames, stacks, splits, permutes and turns a checkpoint's tensors as it likes. What it does not do is compute:
a row of a linear layer is a row of the checkpoint. So a layer is filled with decoded weights, and then each row of each
matrix is looked for among the decoded rows. What is found is compared in full, so a match is exact or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final

import torch

from swarm.compute.weights.packed_weight import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from swarm.files.stored.matrix import StoredMatrix

SAMPLED: Final = 64
"""Columns that the key of a row is made of, all where rows would have one key; a match is compared in all of them."""


@dataclass(frozen=True, slots=True)
class DecodedMatrix:
    """A stored matrix, and its rows in the compute type.

    Attributes:
        values: its values [rows, columns].
    """

    stored: StoredMatrix
    values: torch.Tensor


class StoredRows:
    """The rows of some stored matrices, by their values."""

    def __init__(self, matrices: Iterable[DecodedMatrix]) -> None:
        """Take the rows of matrices; their values are not kept."""
        self._matrices: list[StoredMatrix] = []
        self._kinds: list[int] = []  # of each matrix, the first one with which it can be joined
        keys: dict[int, list[torch.Tensor]] = {}
        places: dict[int, list[torch.Tensor]] = {}
        dtypes: dict[int, torch.dtype] = {}
        for number, one in enumerate(matrices):
            self._matrices.append(one.stored)
            self._kinds.append(self._kind(number))
            rows = torch.arange(one.stored.rows)
            dtypes[one.stored.columns] = one.values.dtype
            keys.setdefault(one.stored.columns, []).append(_keys(one.values))
            places.setdefault(one.stored.columns, []).append(torch.stack((torch.full_like(rows, number), rows)))
        self._by_width = {
            width: _Table(torch.cat(own), torch.cat(places[width], 1), partial(self._whole_keys, dtypes[width]))
            for width, own in keys.items()
        }

    def find(self, weight: torch.Tensor) -> list[StoredMatrix] | None:
        """The matrices that lie one below the other in a weight [rows, columns] of the compute type.

        Rows that can lie in one matrix are joined in one. None if there is a row that is not stored.
        """
        table = self._by_width.get(weight.shape[1])
        found = None if table is None else table.places(weight)
        if found is None:
            return None
        numbers, rows = found
        pieces = []
        for _, run in groupby(_runs(numbers), key=lambda part: self._kinds[part[0]]):
            parts = list(run)
            pieces.append(self._gathered(numbers, rows, parts[0][1], parts[-1][2]))
        return pieces if _equal(pieces, weight) else None

    def _whole_keys(self, dtype: torch.dtype, places: torch.Tensor) -> torch.Tensor:
        """Keys of some rows [2, rows] that are made of all of their columns."""
        keys = torch.empty(places.shape[1], dtype=torch.int64)
        for number in torch.unique(places[0]):
            (at,) = torch.where(places[0] == number)
            rows = self._matrices[int(number)].select(places[1, at])
            keys[at] = _keys(rows.decode(0, len(at)).to(dtype), sampled=False)
        return keys

    def _kind(self, number: int) -> int:
        own = self._matrices[number]
        known = dict.fromkeys(self._kinds)
        return next((kind for kind in known if self._matrices[kind].joins(own)), number)

    def _gathered(self, numbers: torch.Tensor, rows: torch.Tensor, start: int, end: int) -> StoredMatrix:
        """One matrix of the rows that stand at `[start, end)`."""
        wanted, own = numbers[start:end], rows[start:end]
        used = torch.unique(wanted)
        first, *rest = (self._matrices[int(number)] for number in used)
        counts = torch.tensor([self._matrices[int(number)].rows for number in used])
        offsets = torch.cumsum(counts, 0) - counts
        places = offsets[torch.searchsorted(used, wanted)] + own
        joined = first.join(rest) if rest else first
        is_whole = len(places) == joined.rows and torch.equal(places, torch.arange(len(places)))
        return joined if is_whole else joined.select(places)


class _Table:
    """Rows by their keys."""

    def __init__(
        self, keys: torch.Tensor, places: torch.Tensor, whole_keys: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        unique, counts = torch.unique(keys, return_counts=True)
        self._shared = unique[counts > 1]  # as of rows of a vocabulary that were never trained
        twice = torch.isin(keys, self._shared)
        if twice.any():
            keys[twice] = whole_keys(places[:, twice])
        self._keys, order = torch.sort(keys)
        self._numbers, self._rows = places[:, order]

    def places(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Numbers of matrices and of rows of a weight's rows; None if one is not there."""
        keys = _keys(weight)
        twice = torch.isin(keys, self._shared)
        if twice.any():
            keys[twice] = _keys(weight[twice], sampled=False)
        at = torch.searchsorted(self._keys, keys).clamp(max=len(self._keys) - 1)
        if not torch.equal(self._keys[at], keys):
            return None
        return self._numbers[at], self._rows[at]


def _keys(values: torch.Tensor, *, sampled: bool = True) -> torch.Tensor:
    """int64 [rows]: a key of each row, made of the bits of some of its columns, or of all."""
    columns = values.shape[1]
    chosen = torch.arange(0, columns, max(1, columns // SAMPLED) if sampled else 1)
    bits = values.index_select(1, chosen).view(torch.int16 if values.itemsize == 2 else torch.int32)
    mixed = torch.randint(-(2**62), 2**62, (len(chosen),), generator=torch.Generator().manual_seed(columns)) | 1
    return (bits.to(torch.int64) * mixed).sum(1)


def _runs(numbers: torch.Tensor) -> list[tuple[int, int, int]]:
    """Neighbours of one matrix: its number, and where they begin and end."""
    values, counts = torch.unique_consecutive(numbers, return_counts=True)
    ends = torch.cumsum(counts, 0)
    return [(int(value), int(end - count), int(end)) for value, count, end in zip(values, counts, ends, strict=True)]


def _equal(pieces: Sequence[StoredMatrix], weight: torch.Tensor) -> bool:
    """Whether matrices that lie one below the other have a weight's values."""
    at_once, before = max(1, BLOCK // weight.shape[1]), 0
    for piece in pieces:
        for start in range(0, piece.rows, at_once):
            end = min(start + at_once, piece.rows)
            own = piece.decode(start, end).to(weight.dtype)
            if not torch.equal(own, weight[before + start : before + end]):
                return False
        before += piece.rows
    return before == len(weight)
