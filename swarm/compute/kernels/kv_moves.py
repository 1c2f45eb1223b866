"""A commit as one kernel: the rows that stay move to the front in all layers' keys and values at once, byte by byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from swarm.compute.kernels.support import on_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

ROWS_AT_ONCE = 8
UNIT_BYTES = 2
"""Rows are moved as numbers of this size, whatever their dtype; every dtype that is computed in is a multiple."""
LINE = tl.constexpr(3)
"""Numbers of a tensor in the table: its address, its heads, units of a row."""


@triton.jit(do_not_specialize=["count", "start", "capacity"])
def _move(  # noqa: PLR0913 - a kernel's
    table: tl.tensor,
    moves: tl.tensor,
    count: tl.tensor,
    start: tl.tensor,
    capacity: tl.tensor,
    at_once: tl.constexpr,
    padded: tl.constexpr,
) -> None:
    """Rows of one head of one tensor. Targets rise and never pass their sources, so a few at a time may move."""
    line, head = table + tl.program_id(0) * LINE, tl.program_id(1)
    if head < tl.load(line + 1):
        width = tl.load(line + 2)
        rows = tl.load(line).to(tl.pointer_type(tl.int16)) + head.to(tl.int64) * capacity * width
        row, unit = tl.arange(0, at_once), tl.arange(0, padded)
        for at in range(0, count, at_once):
            there = (at + row < count)[:, None] & (unit < width)[None, :]
            source = tl.load(moves + at + row, at + row < count, 0)
            kept = tl.load(rows + source[:, None] * width + unit[None, :], there, 0)
            tl.debug_barrier()  # other threads write where these have read
            target = (start + at + row).to(tl.int64)
            tl.store(rows + target[:, None] * width + unit[None, :], kept, there)


class RowMover:
    """Moves rows of one session in all its tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note where the tensors lie, each [heads, capacity, width] and contiguous; they must stay there."""
        self._device = tensors[0].device
        self._capacity = tensors[0].shape[1]
        lines = [(each.data_ptr(), each.shape[0], each.shape[2] * each.itemsize // UNIT_BYTES) for each in tensors]
        self._table = torch.tensor(lines, device=self._device)
        self._heads = max(heads for _, heads, _ in lines)
        self._padded = triton.next_power_of_2(max(units for _, _, units in lines))

    def move(self, moves: NDArray[np.int64], start: int) -> None:
        """Put rows `moves` [k] at `[start, start + k)`.

        Args:
            moves: strictly rising slots, none in front of its target.
        """
        source = torch.from_numpy(moves)
        if self._device.type == "cuda":
            source = source.pin_memory().to(self._device, non_blocking=True)
        with on_device(self._device):
            _move[len(self._table), self._heads](
                self._table, source, len(moves), start, self._capacity, ROWS_AT_ONCE, self._padded, num_warps=4
            )
