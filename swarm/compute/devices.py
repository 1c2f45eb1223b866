"""What kinds of device there are, and in what they differ: `cpu`, `cuda` (NVIDIA, and AMD's by ROCm), `mps`, `xpu`.

Owns no model. Everything here works where a kind is not there: torch's own answer is asked for by its kind's name.
Apple's and Intel's GPUs run the plain path and were not run on one yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from swarm.base.errors import ConfigError
from swarm.base.process_limits import main_memory
from swarm.compute.kernels.support import CODES_VERSION, KERNEL_VERSION, arch_of, kernel_support, kind_of
from swarm.compute.weights.format import WeightFormat
from swarm.protocol.numeric_class import NumericClass

KINDS: Final = ("cpu", "cuda", "mps", "xpu")
"""As torch names them."""
BF16_CAPABILITY: Final = (8, 0)
"""The first CUDA devices that compute in bfloat16; older ones imitate it."""
MPS_BF16: Final = (14, 0)
"""The first macOS whose GPUs compute in bfloat16."""


def numeric_class_of(
    device: torch.device, dtype: torch.dtype, weight_bits: int = 0, kernel_version: int = 0, stored: str = ""
) -> NumericClass:
    """The class of what computes there.

    Args:
        weight_bits: of a weight where weights are not of the compute type; 0 where they are.
        kernel_version: of the kernels that every forward runs; 0 on the plain path, whose class names no architecture.
        stored: format of weights that are held as a quantised checkpoint has them; empty where none are.
    """
    return NumericClass(
        kind_of(device),
        str(dtype).removeprefix("torch."),
        arch_of(device) if kernel_version else "",
        kernel_version,
        weight_bits,
        stored=stored,
    )


def expected_class(
    device: torch.device, form: WeightFormat, *, has_kernels: bool = True, codes: int = CODES_VERSION
) -> NumericClass:
    """The class that a model will have there once it is loaded, unless it turns out to run another path.

    Args:
        form: what its weights are held in.
        has_kernels: whether kernels are wanted, and read the weights; they are used where the device can run them.
        codes: version of a CPU's products with integers, as the model's kind has it
            (`swarm.compute.ordered_rows.codes_version`).
    """
    kernels = 0
    if has_kernels and form.codes:
        kernels = codes
    elif has_kernels and device.type == "cuda" and kernel_support(device).kernels:
        kernels = KERNEL_VERSION
    return numeric_class_of(device, form.dtype, form.bits, kernels, form.stored)


def default_device() -> torch.device:
    """A GPU if there is one, else the CPU."""
    there: dict[str, Callable[[], bool]] = {
        "cuda": torch.cuda.is_available,
        "xpu": torch.xpu.is_available,
        "mps": torch.backends.mps.is_available,
    }
    return torch.device(next((kind for kind, is_there in there.items() if is_there()), "cpu"))


def open_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ConfigError: there is none, or it is of a kind on which nothing of ours runs.
    """
    try:
        device = torch.device(name)
        if device.type in KINDS:
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"device {name!r} cannot be used ({reason}); cpu always can") from None
    if device.type not in KINDS:
        raise ConfigError(f"device {name!r}: models run on cpu, cuda, xpu or mps only")
    return device


def refused_dtype(dtype: torch.dtype, device: torch.device) -> str:
    """Why a device does not compute in a type, or only imitates it, at a fraction of its speed; empty if it does."""
    if dtype is torch.float16 and device.type == "cpu":
        return "--dtype float16 is far slower than float32 on a CPU; use float32, or bfloat16 to save memory"
    if dtype is not torch.bfloat16:
        return ""
    if device.type == "mps" and not torch.backends.mps.is_macos_or_newer(*MPS_BF16):
        return "mps computes in bfloat16 from macOS 14 on; use --dtype float16 or float32"
    is_old = device.type == "cuda" and torch.version.hip is None
    if is_old and torch.cuda.get_device_capability(device) < BF16_CAPABILITY:
        return f"{device} ({device_name(device)}) does not compute in bfloat16; use --dtype float16 or float32"
    return ""


def device_name(device: torch.device) -> str:
    """`cpu`, or the product's name such as `NVIDIA H100 80GB HBM3`; never a host's."""
    if device.type in {"cuda", "xpu"}:
        return str(_module(device).get_device_name(device))
    return "Apple GPU" if device.type == "mps" else device.type


def free_bytes(device: torch.device) -> int:
    """Free memory of the device; what a GPU shares with the processor is counted once."""
    host = main_memory().available
    if device.type == "mps":
        return min(host, max(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory(), 0))
    found = _memory(device)
    return host if found is None else found[0]


def used_bytes(device: torch.device) -> int | None:
    """Device memory in use, by all programs, of Apple's by this one; None for a CPU."""
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    found = _memory(device)
    return None if found is None else found[1] - found[0]


def synchronize(device: torch.device) -> None:
    """Wait until the device has computed everything; a CPU has."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type != "cpu":
        _module(device).synchronize(device)


def empty_cache() -> None:
    """Give what is free in torch's caches back to the devices; does nothing where no GPU was used."""
    torch.cuda.empty_cache()
    torch.xpu.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def has_float64(device: torch.device) -> bool:
    """Whether it computes in float64: Apple's GPUs and some of Intel's do not."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def with_float64(values: torch.Tensor) -> torch.Tensor:
    """The same values where float64 can be computed: on their own device, or on the CPU."""
    return values if has_float64(values.device) else values.cpu()


def _memory(device: torch.device) -> tuple[int, int] | None:
    """Free bytes and all of them; None for a CPU, and for a GPU whose driver does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    if device.type != "xpu":
        return None
    total = int(torch.xpu.get_device_properties(device).total_memory)
    try:
        return torch.xpu.mem_get_info(device)
    except (RuntimeError, AttributeError):  # some drivers keep it for themselves, and so does an older torch
        return total - torch.xpu.memory_reserved(device), total


def _module(device: torch.device) -> Any:  # noqa: ANN401 - torch's modules of one kind have no common type
    return getattr(torch, device.type)
