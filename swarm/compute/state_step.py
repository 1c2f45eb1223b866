"""What kernels read of a batch's states, at fixed addresses. Imports no Triton: a plan is made without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

NONE: Final = -1
"""No entry, no scratch; a source that is before the text, and so zero."""
NO_PARENT: Final = -2
"""Of a row whose parent is not in the batch; -1 would be the row before the first one."""


@dataclass(frozen=True, slots=True)
class StateStep:
    """The states of a batch of B rows; int32 on the device, but for the scratch.

    Attributes:
        line: [B] of each row's session in the table of addresses; NONE for a row of nobody.
        slot: [B] its slot.
        parent: [B] its parent's row, or NO_PARENT.
        base: [B] the entry that its path goes on from; NONE where its text begins.
        keep: [B] the entry that its state is written to, or NONE.
        spill: [B] where in the scratch its state lies for children that do not come next, or NONE.
        sources: [B, taps] where the inputs before it are: a row, or -1 - k for the k-th last one of the base, or NONE.
        segments: [sessions, 2] the rows of each.
        scratch: float32, states of rows.
    """

    line: torch.Tensor
    slot: torch.Tensor
    parent: torch.Tensor
    base: torch.Tensor
    keep: torch.Tensor
    spill: torch.Tensor
    sources: torch.Tensor
    segments: torch.Tensor
    scratch: torch.Tensor
