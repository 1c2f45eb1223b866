"""Whether this machine can run the kernels, and why not. Imports Triton only where it is there."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch

from swarm.compute.kernels.toolchain import MIN_CAPABILITY, toolchain

KERNEL_VERSION = 2
"""Goes up with every change that may change a bit: it is part of the numeric class (`swarm.protocol.numeric_class`)."""
CODES_VERSION = 1
"""The same of a CPU that multiplies with integers as they are, where rows may depend on others beside them.

Where they do not, it is `swarm.protocol.numeric_class.ORDERED`."""
INTERPRETER = "TRITON_INTERPRET"
"""Triton's own variable: at 1 kernels run on the CPU, slowly. For tests; it must be set before Triton is imported."""


@dataclass(frozen=True, slots=True)
class KernelSupport:
    """What a device can run.

    Attributes:
        kernels: whether the Triton kernels run.
        compiled: whether `torch.compile` can compile layers besides.
        reason: why one of them cannot; empty where both can.
    """

    kernels: bool
    compiled: bool
    reason: str = ""


def kernel_support(device: torch.device, *, interpreted: bool = False) -> KernelSupport:
    """What this device can run; never raises.

    Args:
        interpreted: whether kernels that Triton interprets count. Tests ask for it; programs that they start do not.
    """
    if interpreted and is_interpreted():
        return KernelSupport(kernels=True, compiled=False, reason="Triton interprets its kernels")
    if device.type != "cuda" or torch.version.hip is not None:
        return KernelSupport(kernels=False, compiled=False, reason=f"{kind_of(device)} runs the plain path")
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return KernelSupport(kernels=False, compiled=False, reason=f"{name} is older than the kernels need")
    lacks = toolchain().lacks or trial(device)
    return KernelSupport(kernels=not lacks, compiled=not lacks, reason=lacks)


@cache
def trial(device: torch.device) -> str:
    """Why not even a small kernel runs there; empty where it does. Asked once, before weights are laid out."""
    try:
        from swarm.compute.kernels.trial import doubles

        with on_device(device):
            if doubles(device):
                return ""
    except Exception as failure:  # noqa: BLE001 - Triton, its compiler or the driver may raise anything
        return f"Triton does not run on this card ({str(failure).partition(chr(10))[0][:200]})"
    return "Triton computes wrongly on this card"


def is_interpreted() -> bool:
    """Whether kernels run on the CPU, for tests."""
    return os.environ.get(INTERPRETER) == "1" and importlib.util.find_spec("triton") is not None


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Start kernels there: Triton takes the current card, whatever its tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def kind_of(device: torch.device) -> str:
    """Its kind as numeric classes name it: `cuda` means NVIDIA's, `rocm` is AMD's, which torch calls cuda too."""
    return "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type


def arch_of(device: torch.device) -> str:
    """Its architecture as numeric classes name it, such as `sm90`; empty for a kind that has no kernels."""
    if kind_of(device) != "cuda":
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"
