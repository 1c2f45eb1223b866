"""Where a training computes: batches on their way to a card, and in which precision. Owns no step.

On a CPU everything is float32, as the seed alone decides. On a card that computes in bfloat16, matrix products do; the
weights, their gradients, softmax and loss stay float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch


def precision(device: torch.device) -> AbstractContextManager[object]:
    """Within it forwards and losses run in the device's precision; backward passes run outside."""
    if device.type != "cuda" or not torch.cuda.is_bf16_supported(including_emulation=False):
        return nullcontext()
    return mixed_precision(device)


def mixed_precision(device: torch.device) -> AbstractContextManager[object]:
    """Matrix products in bfloat16."""
    return torch.autocast(device.type, torch.bfloat16)


def batches(lines_of: Callable[[int], torch.Tensor], steps: range, device: torch.device) -> Iterator[torch.Tensor]:
    """The lines of some steps, on the device: int64 [lines, tokens]. To a card the next ones travel meanwhile.

    Args:
        lines_of: the lines of a step.
        steps: in order.
        device: where they are wanted.
    """
    ahead: torch.Tensor | None = None
    for step in steps:
        batch = _sent(lines_of(step), device) if ahead is None else ahead
        ahead = _sent(lines_of(step + 1), device) if step + 1 in steps else None
        yield batch


def _sent(batch: torch.Tensor, device: torch.device) -> torch.Tensor:
    return batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch.to(device)
