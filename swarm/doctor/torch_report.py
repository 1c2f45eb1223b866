"""What torch can do on this machine, as one line of JSON: `python -m swarm.doctor.torch_report`.

A program of its own: to import torch takes seconds, a broken build ends its process, and a driver may hang.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict, dataclass
from typing import Any, Final

DTYPES: Final = ("float32", "bfloat16", "float16")
MAX_REASON: Final = 200


@dataclass(frozen=True, slots=True)
class TorchReport:
    """What torch says of itself.

    Attributes:
        version: such as `2.6.0+cpu`.
        cuda_build: the CUDA release that it was built for; empty for a CPU build.
        has_cuda: whether it can compute on a GPU.
        reason: why it cannot, in torch's words; empty if it can, or never tried.
        devices: names of the GPUs.
        is_built_for: whether this build has code for the first GPU.
        gpu_dtypes: types in which the first GPU multiplies matrices; empty without one.
        cpu_dtypes: types in which the CPU does.
        has_mps: whether Apple's GPU is there.
        has_xpu: whether Intel's is.
        capability: of the first NVIDIA card, such as (9, 0); empty for others.
        least_capability: of a card that can run the kernels.
        has_triton: whether Triton is installed.
        has_compiler: whether a C compiler is.
        has_headers: whether this Python's headers are.
    """

    version: str = ""
    cuda_build: str = ""
    has_cuda: bool = False
    reason: str = ""
    devices: tuple[str, ...] = ()
    is_built_for: bool = True
    gpu_dtypes: tuple[str, ...] = ()
    cpu_dtypes: tuple[str, ...] = ()
    has_mps: bool = False
    has_xpu: bool = False
    capability: tuple[int, ...] = ()
    least_capability: tuple[int, ...] = ()
    has_triton: bool = False
    has_compiler: bool = False
    has_headers: bool = False

    @property
    def has_gpu(self) -> bool:
        """Whether nodes compute on a GPU here."""
        return self.has_cuda or self.has_mps or self.has_xpu


def read_report(line: str) -> TorchReport:
    """What `main` printed.

    Raises:
        ValueError: it is something else.
    """
    found: dict[str, Any] = json.loads(line)
    try:
        values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in found.items()}
        return TorchReport(**values)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"no report: {line[:80]}") from error


def make_report() -> TorchReport:
    """Ask torch."""
    import torch

    from swarm.inference.devices import default_device
    from swarm.kernels.support import MIN_CAPABILITY, kind_of, toolchain

    reasons: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        has_cuda = torch.cuda.is_available()
        reasons += [str(one.message) for one in caught if "CUDA" in str(one.message)]
    build = torch.version.cuda or getattr(torch.version, "hip", None) or ""
    if build and not has_cuda and not reasons:
        reasons += _why_not()
    is_built_for, device = True, default_device()
    capability: tuple[int, ...] = ()
    if has_cuda and kind_of(device) == "cuda":
        capability = major, minor = torch.cuda.get_device_capability(0)
        built = [int(arch.rpartition("_")[2].rstrip("af")) for arch in torch.cuda.get_arch_list() if "_" in arch]
        is_built_for = any(arch // 10 == major and arch % 10 <= minor for arch in built)
    tools = toolchain()
    return TorchReport(
        version=torch.__version__,
        cuda_build=build,
        has_cuda=has_cuda,
        reason=" ".join(" ".join(reasons).split())[:MAX_REASON],
        devices=tuple(torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count())) if has_cuda else (),
        is_built_for=is_built_for,
        gpu_dtypes=_usable(device.type) if device.type != "cpu" else (),
        cpu_dtypes=_usable("cpu"),
        has_mps=torch.backends.mps.is_available(),
        has_xpu=torch.xpu.is_available(),
        capability=capability,
        least_capability=MIN_CAPABILITY,
        has_triton=tools.has_triton,
        has_compiler=tools.has_compiler,
        has_headers=tools.has_headers,
    )


def _why_not() -> list[str]:
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return [str(error)]
    return []


def _usable(device: str) -> tuple[str, ...]:
    return tuple(name for name in DTYPES if _multiplies(device, name))


def _multiplies(device: str, dtype: str) -> bool:
    import torch

    from swarm.inference.devices import refused_dtype

    if refused_dtype(getattr(torch, dtype), torch.device(device)) and device != "cpu":
        return False
    try:
        square = torch.ones(8, 8, device=device, dtype=getattr(torch, dtype))
        return bool((square @ square)[0, 0].item() == 8.0)
    except RuntimeError:
        return False


def main() -> None:
    """Print the report."""
    sys.stdout.write(json.dumps(asdict(make_report())) + "\n")


if __name__ == "__main__":
    main()
