"""What kinds of device there are, and in what they differ. Owns no model and no memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm.kernels.support import arch_of, kind_of
from swarm.protocol.numeric_class import NumericClass

if TYPE_CHECKING:
    import torch


def numeric_class_of(
    device: torch.device, dtype: torch.dtype, weight_bits: int = 0, kernel_version: int = 0
) -> NumericClass:
    """The class of what computes there.

    Args:
        device: that computes.
        dtype: compute type.
        weight_bits: of a weight where weights are not of the compute type; 0 where they are.
        kernel_version: of the kernels that every forward runs; 0 on the plain path, whose class names no architecture.
    """
    return NumericClass(
        kind_of(device),
        str(dtype).removeprefix("torch."),
        arch_of(device) if kernel_version else "",
        kernel_version,
        weight_bits,
    )
