"""The smallest kernel: whether Triton compiles and starts anything on a card. Imports Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _double(numbers: tl.tensor, count: tl.constexpr) -> None:
    at = numbers + tl.arange(0, count)
    tl.store(at, 2 * tl.load(at))


def doubles(device: torch.device) -> bool:
    """Whether a kernel doubles some numbers on this device.

    Raises:
        Exception: of Triton, its compiler or the driver.
    """
    numbers = torch.arange(16, dtype=torch.int32, device=device)
    _double[(1,)](numbers, 16)
    return numbers.tolist() == [2 * number for number in range(16)]
