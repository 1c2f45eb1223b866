"""Small arrays of a sweep on their way to a device: one copy, which the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

HostNumbers = Sequence[int] | NDArray[np.int64]


def to_device(numbers: HostNumbers, device: torch.device) -> torch.Tensor:
    """Integers as an int64 tensor on a device.

    A plain `torch.tensor(…, device=…)` waits until the card has done all that was asked of it before. Pinned memory is
    kept until the copy is done.
    """
    values = torch.as_tensor(numbers, dtype=torch.int64)
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
