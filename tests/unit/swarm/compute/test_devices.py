"""What each kind of device can do. None but the CPU is here: the others are torch's answers, forced."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

import swarm.compute.kernels.support
from swarm.base.errors import ConfigError
from swarm.base.process_limits import MainMemory
from swarm.compute import devices
from swarm.compute.devices import (
    default_device,
    device_name,
    expected_class,
    free_bytes,
    has_float64,
    numeric_class_of,
    open_device,
    refused_dtype,
    synchronize,
    used_bytes,
    with_float64,
)
from swarm.compute.int8 import pack
from swarm.compute.kernels.support import KERNEL_VERSION, KernelSupport, kernel_support
from swarm.compute.ordered_rows import codes_version
from swarm.compute.weights.format import WeightFormat
from tests.devices import on_mps

CPU, CUDA, MPS, XPU = map(torch.device, ("cpu", "cuda", "mps", "xpu"))
Patch = pytest.MonkeyPatch


def give(value: object) -> Callable[..., Any]:
    """A function that answers this, whatever it is asked."""
    return lambda *_, **__: value


def there(patch: Patch, *kinds: str) -> None:
    for module, kind in ((torch.cuda, "cuda"), (torch.xpu, "xpu"), (torch.backends.mps, "mps")):
        patch.setattr(module, "is_available", give(kind in kinds))


@pytest.mark.parametrize(
    ("kinds", "chosen"),
    [((), "cpu"), (("mps",), "mps"), (("xpu",), "xpu"), (("cuda", "xpu"), "cuda"), (("cuda", "mps"), "cuda")],
)
def test_a_gpu_of_any_kind_is_taken_where_it_is_there(kinds: tuple[str, ...], chosen: str, monkeypatch: Patch) -> None:
    there(monkeypatch, *kinds)
    assert default_device().type == chosen


def test_a_named_device_is_tried(monkeypatch: Patch) -> None:
    for name in ("mps", "xpu"):  # neither is here
        with pytest.raises(ConfigError, match=rf"device '{name}' cannot be used .*; cpu always can"):
            open_device(name)
    monkeypatch.setattr(torch, "empty", give(None))
    assert [open_device(name).type for name in ("mps", "xpu", "cuda:1", "cpu")] == ["mps", "xpu", "cuda", "cpu"]
    with pytest.raises(ConfigError, match="'meta': models run on cpu, cuda, xpu or mps only"):
        open_device("meta")


def test_apples_gpus_compute_in_bfloat16_from_macos_14_on(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *least: least <= (13, 3))
    assert "macOS 14" in refused_dtype(torch.bfloat16, MPS)
    assert not refused_dtype(torch.float16, MPS)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *least: least <= (14, 0))
    assert not refused_dtype(torch.bfloat16, MPS)
    assert not refused_dtype(torch.bfloat16, XPU)


def test_amds_cards_are_not_judged_by_nvidias_numbers(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", give((7, 5)))
    monkeypatch.setattr(torch.cuda, "get_device_name", give("Card"))
    assert "does not compute in bfloat16" in refused_dtype(torch.bfloat16, CUDA)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not refused_dtype(torch.bfloat16, CUDA)
    assert str(expected_class(CUDA, WeightFormat(torch.bfloat16))) == "rocm-bfloat16"
    assert kernel_support(CUDA) == KernelSupport(kernels=False, compiled=False, reason="rocm runs the plain path")


def test_memory_is_what_the_kind_says(monkeypatch: Patch) -> None:
    monkeypatch.setattr("swarm.compute.devices.main_memory", give(MainMemory(9, 20)))
    assert (free_bytes(CPU), used_bytes(CPU)) == (9, None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", give((3, 10)))
    assert (free_bytes(CUDA), used_bytes(CUDA)) == (3, 7)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", give(20))
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", give(15))
    assert (free_bytes(MPS), used_bytes(MPS)) == (5, 15)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", give(4))
    assert free_bytes(MPS) == 9, "one memory for both"
    monkeypatch.setattr(torch.xpu, "get_device_properties", give(SimpleNamespace(total_memory=16)))
    monkeypatch.setattr(torch.xpu, "mem_get_info", give((6, 16)))
    assert (free_bytes(XPU), used_bytes(XPU)) == (6, 10)

    def silent(*_: object) -> None:
        raise RuntimeError("the device doesn't support querying the available free memory")

    monkeypatch.setattr(torch.xpu, "mem_get_info", silent)
    monkeypatch.setattr(torch.xpu, "memory_reserved", give(2))
    assert (free_bytes(XPU), used_bytes(XPU)) == (14, 2)


def test_names_and_waits_of_each_kind(monkeypatch: Patch) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.xpu, "synchronize", waited.append)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append(MPS))
    for device in (CPU, CUDA, XPU, MPS):
        synchronize(device)
    assert waited == [CUDA, XPU, MPS]
    monkeypatch.setattr(torch.xpu, "get_device_name", give("Intel Example"))
    assert [device_name(one) for one in (CPU, MPS, XPU)] == ["cpu", "Apple GPU", "Intel Example"]


def test_float64_is_computed_where_it_can_be(monkeypatch: Patch) -> None:
    there_already, far = torch.rand(2, 3), on_mps(torch.rand(2, 3))
    assert with_float64(there_already) is there_already
    assert (far.device.type, with_float64(far).device.type) == ("mps", "cpu")
    with pytest.raises(TypeError, match="float64"):
        far.double()
    octets, empty = pack(far.cpu()), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device, **more: on_mps(empty(*size, **more)))
    assert (pack(far) == octets).all()
    monkeypatch.undo()
    for has in (True, False):
        monkeypatch.setattr(torch.xpu, "get_device_properties", give(SimpleNamespace(has_fp64=has)))
        assert has_float64(XPU) is has
    assert has_float64(CPU)
    assert has_float64(CUDA)
    assert not has_float64(MPS)


def test_the_class_says_what_decides_the_last_bits(monkeypatch: Patch) -> None:
    assert str(numeric_class_of(CPU, torch.float32)) == "cpu-float32"
    assert str(numeric_class_of(CPU, torch.float32, 4)) == "cpu-float32+w4z"
    monkeypatch.setattr(torch.cuda, "get_device_capability", give((12, 0)))
    assert str(numeric_class_of(CUDA, torch.bfloat16)) == "cuda-bfloat16"
    assert str(numeric_class_of(CUDA, torch.bfloat16, 8, 1)) == "cuda-sm120-bfloat16-k1+w8"
    here = KernelSupport(kernels=True, compiled=True)
    monkeypatch.setattr(devices, "kernel_support", give(here))
    assert str(expected_class(CUDA, WeightFormat(torch.bfloat16))) == f"cuda-sm120-bfloat16-k{KERNEL_VERSION}"
    assert str(expected_class(CUDA, WeightFormat(torch.bfloat16), has_kernels=False)) == "cuda-bfloat16"
    codes = WeightFormat(torch.bfloat16, stored="gguf", codes=True)
    assert str(expected_class(CPU, codes)) == "cpu-bfloat16-k1+gguf"
    assert str(expected_class(CPU, codes, has_kernels=False)) == "cpu-bfloat16+gguf"
    assert not expected_class(CPU, codes).is_reproducible, "attention adds up in another order beside other rows"
    ordered = expected_class(CPU, codes, codes=codes_version(LlamaConfig()))
    assert (str(ordered), ordered.is_reproducible) == ("cpu-bfloat16-k2+gguf", True)
    assert codes_version(LlamaConfig(hidden_act="gelu")) == codes_version(GPT2Config()) == 1
    plain = expected_class(CPU, WeightFormat(torch.float32))
    assert str(plain) == "cpu-float32", "kernels that are interpreted are for tests"


def test_why_a_card_runs_no_kernels(monkeypatch: Patch) -> None:
    monkeypatch.delenv(swarm.compute.kernels.support.INTERPRETER, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", give((7, 5)))
    monkeypatch.setattr(torch.cuda, "get_device_name", give("Old Card"))
    assert kernel_support(CUDA).reason == "Old Card is older than the kernels need"
    for device in (CPU, MPS, XPU):
        assert kernel_support(device).reason == f"{device.type} runs the plain path"
