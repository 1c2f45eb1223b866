"""A weight as a checkpoint holds it, and products with it: blocks of rows are decoded, and then torch's own product.

Parameters of a module may be moved, streamed and counted, so a matrix's parts are parameters, and the matrix is made
anew around them for every product. Blocks depend on the weight's shape and the kind of device alone, so machines of one
numeric class add up in the same order.
"""

from __future__ import annotations

from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import nn
from torch.nn.functional import linear

from swarm.compute.weights.codes_weight import CodesKind, CodesWeight
from swarm.compute.weights.packed_weight import BLOCK, MIN_BLOCK_ROWS, PackedWeight

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from swarm.files.stored.matrix import StoredMatrix


GPU_BLOCK: Final = 1 << 23
"""Weights that a GPU decodes at a time: a step is a kernel each, and small ones would wait for Python."""


class StoredWeight(PackedWeight):
    """A matrix [rows, columns] of pieces that lie one below the other, each in a format of its own.

    Attributes:
        edges: where each piece's rows begin, and where the last one's end.
    """

    def __init__(self, pieces: Sequence[StoredMatrix], dtype: torch.dtype) -> None:
        """Hold copies of the pieces' parts: those that were read may lie in a mapped file."""
        self.edges = (0, *accumulate(piece.rows for piece in pieces))
        super().__init__(self.edges[-1], pieces[0].columns, 0, dtype)
        self._parts = nn.ModuleList(_HeldMatrix(piece) for piece in pieces)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.product_of(x, 0, self.rows, bias)

    def product_of(self, x: torch.Tensor, start: int, end: int, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product with the rows `[start, end)` alone; bias [end - start]."""
        made = []
        for first, last, block in self._blocks(start, end):
            made.append(linear(x, block, None if bias is None else bias[first - start : last - start]))
        return made[0] if len(made) == 1 else torch.cat(made, -1)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(ids), self.columns, dtype=self.dtype, device=ids.device)
        for parts, start, end in zip(self._parts, self.edges, self.edges[1:], strict=False):
            assert isinstance(parts, _HeldMatrix)
            (places,) = torch.where((ids >= start) & (ids < end))
            if len(places):
                out[places] = parts.matrix().select(ids[places] - start).decode(0, len(places)).to(self.dtype)
        return out

    def restored(self) -> torch.Tensor:
        return torch.cat([block for _, _, block in self._blocks(0, self.rows)])

    def matrices(self) -> list[StoredMatrix]:
        """The pieces, around the parameters wherever they are now."""
        return [parts.matrix() for parts in self._parts if isinstance(parts, _HeldMatrix)]

    def _blocks(self, start: int, end: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Rows `[start, end)` in the compute type, some at a time, with where they begin and end."""
        on_cpu = next(self.parameters()).device.type == "cpu"
        at_once = max(MIN_BLOCK_ROWS, (BLOCK if on_cpu else GPU_BLOCK) // self.columns)
        for parts, piece_start, piece_end in zip(self._parts, self.edges, self.edges[1:], strict=False):
            assert isinstance(parts, _HeldMatrix)
            low, high = max(start, piece_start), min(end, piece_end)
            if low >= high:
                continue
            matrix = parts.matrix()
            for first in range(low, high, at_once):
                last = min(first + at_once, high)
                yield first, last, matrix.decode(first - piece_start, last - piece_start).to(self.dtype)


class StackedWeight(PackedWeight):
    """Weights of the same columns, one below the other, each with a product of its own."""

    def __init__(self, parts: Sequence[PackedWeight]) -> None:
        super().__init__(sum(part.rows for part in parts), parts[0].columns, parts[0].bits, parts[0].dtype)
        self._held = nn.ModuleList(parts)
        self._edges = (0, *accumulate(part.rows for part in parts))

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.cat([part.product(x) for part in self._parts()], -1)
        return out if bias is None else out + bias

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(ids), self.columns, dtype=self.dtype)
        for part, start, end in zip(self._parts(), self._edges, self._edges[1:], strict=False):
            (places,) = torch.where((ids >= start) & (ids < end))
            if len(places):
                out[places] = part.take(ids[places] - start)
        return out

    def restored(self) -> torch.Tensor:
        return torch.cat([part.restored() for part in self._parts()])

    def _parts(self) -> list[PackedWeight]:
        return [cast("PackedWeight", part) for part in self._held]


def hold(pieces: Sequence[StoredMatrix], dtype: torch.dtype, *, codes: bool) -> PackedWeight:
    """Hold matrices that lie one below the other.

    Args:
        codes: whether a CPU's products read the integers of those that have some.
    """
    if not codes:
        return StoredWeight(pieces, dtype)
    parts: list[PackedWeight] = []
    for kind, run in groupby(pieces, key=CodesKind.of):
        own = list(run)
        parts.append(StoredWeight(own, dtype) if kind is None else CodesWeight(kind, own, dtype))
    return parts[0] if len(parts) == 1 else StackedWeight(parts)


class _HeldMatrix(nn.Module):
    """A matrix's parts as parameters."""

    def __init__(self, matrix: StoredMatrix) -> None:
        super().__init__()
        parts = matrix.parts()
        for name, part in parts.items():
            assert not part.is_floating_point(), "what changes a model's type would change it"
            self.register_parameter(name, nn.Parameter(part.clone(), requires_grad=False))
        self._shell = matrix.with_parts({name: torch.empty_like(part[:0]) for name, part in parts.items()})

    def matrix(self) -> StoredMatrix:
        """The matrix around the parameters, wherever they are now."""
        return self._shell.with_parts(dict(self.named_parameters(recurse=False)))
