"""Troubles of the device, each planted: what the system shows of a card against what torch's files say.

Nothing imports torch, and no mend replaces a build that works.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from swarm.compute.kernels.toolchain import Toolchain
from swarm.doctor.ladder import Diagnosis
from swarm.doctor.machine import (
    Cards,
    TorchBuild,
    ask_cards,
    look_at_device,
    look_at_dtypes,
    look_at_kernels,
    read_torch,
)
from tests.one_diagnosis import assert_hint, assert_ok, assert_trouble, assert_unknown, found_by, ready

CPU_BUILD: Final = TorchBuild("2.6.0+cpu")
CUDA_BUILD: Final = TorchBuild("2.6.0+cu126", {"cuda": "12.6"})
CARD: Final = Cards(is_nvidia=True, driver="550.54.15", names=("NVIDIA L4",), capability=(8, 9))
OLD_CARD: Final = replace(CARD, capability=(7, 5))


def device(build: TorchBuild, cards: Cards = CARD, **environment: str) -> Awaitable[Diagnosis]:
    return look_at_device(build, ready(cards), environment)


async def test_a_torch_without_cuda_beside_a_driver_is_left_as_it_is() -> None:
    mend = "python3 -m venv new && new/bin/pip install canopy-swarm --extra-index-url https://download.pytorch.org/whl/"
    await assert_hint(device(CPU_BUILD), "torch-for-cpu", "and driver 550.54.15", f"{mend}cu126")
    await assert_hint(device(CPU_BUILD, replace(CARD, driver="580.10")), "torch-for-cpu", "without CUDA", "/whl/cu128")
    await assert_hint(device(CPU_BUILD, Cards(is_amd=True)), "torch-for-cpu", "AMD's driver is loaded", f"{mend}rocm")


async def test_a_driver_that_is_too_old_or_fails() -> None:
    old = replace(CARD, driver="470.57")
    await assert_hint(device(CUDA_BUILD, old), "driver-old", "driver 470.57 is too old", "525 or newer")
    broken = replace(CARD, failure="Failed to initialize NVML: Driver/library version mismatch", capability=())
    await assert_hint(device(CUDA_BUILD, broken), "driver-fails", "version mismatch", "restart the machine")
    none = Cards(is_nvidia=True)
    await assert_hint(device(CUDA_BUILD, none), "no-driver", "no driver is loaded", "nvidia-driver")


async def test_a_card_that_is_closed_or_hidden() -> None:
    closed = replace(CARD, closed=("/dev/nvidia0",))
    await assert_hint(device(CUDA_BUILD, closed), "card-closed", "may not open /dev/nvidia0", "usermod -aG video")
    hidden = device(CUDA_BUILD, CUDA_VISIBLE_DEVICES="")
    await assert_hint(hidden, "card-hidden", "CUDA_VISIBLE_DEVICES hides the card", "unset CUDA_VISIBLE_DEVICES")


async def test_a_card_for_which_torch_has_no_code() -> None:
    blackwell = replace(CARD, names=("NVIDIA B200",), capability=(10, 0))
    await assert_hint(device(CUDA_BUILD, blackwell), "card-not-in-build", "no code for NVIDIA B200", "venv new")
    later = TorchBuild("2.8.0", {"cuda": "12.8"})
    await assert_ok(device(later, blackwell), "cuda")


async def test_a_damaged_torch_is_replaced_by_the_very_same_build() -> None:
    again = "pip install --force-reinstall --no-deps torch==2.6.0"
    damaged = replace(CUDA_BUILD, damaged="libtorch_cpu.so")
    index = "+cu126 --index-url https://download.pytorch.org/whl/cu126"
    await assert_trouble(device(damaged), "torch-damaged", "libtorch_cpu.so is missing or cut off", f"{again}{index}")
    plain = await found_by(device(TorchBuild("2.6.0", damaged="libc10.so")))
    assert plain.mend == again


async def test_what_is_well() -> None:
    await assert_ok(device(CUDA_BUILD), "cuda")
    await assert_ok(device(CPU_BUILD, Cards()), "cpu")
    await assert_ok(device(TorchBuild("2.6.0+rocm6.2", {"hip": "6.2"}), Cards(is_amd=True)), "hip")
    await assert_ok(device(TorchBuild("2.6.0+xpu", {"xpu": "20250000"}), Cards()), "xpu")
    await assert_unknown(device(TorchBuild()), "torch's version")


async def test_what_a_card_needs_for_kernels() -> None:
    def check(
        cards: Cards = CARD, *, triton: bool = True, cc: bool = True, headers: bool = True
    ) -> Awaitable[Diagnosis]:
        return look_at_kernels(ready(cards), Toolchain(triton, cc, headers))

    await assert_ok(check(), "kernels")
    plain = "plain path, at a fraction of its speed"
    await assert_hint(check(triton=False, cc=False), "no-triton", plain, "pip install triton")
    for system in ("apt-get install gcc", "dnf install gcc"):
        await assert_hint(check(cc=False), "no-compiler", plain, system)
    for system in ("apt-get install python3-dev", "dnf install python3-devel"):
        await assert_hint(check(headers=False), "no-headers", plain, system)
    text = "NVIDIA L4 has compute capability 7.5, kernels need 8.0"
    await assert_hint(check(OLD_CARD), "card-old", text, "another card")
    await assert_ok(check(Cards()), "plain")
    await assert_unknown(check(replace(CARD, capability=())), "nvidia-smi does not say it")


def dtypes(build: TorchBuild, cards: Cards, *classes: str) -> Awaitable[Diagnosis]:
    return look_at_dtypes(build, ready(cards), classes)


async def test_a_swarm_that_computes_in_another_type() -> None:
    text = "the swarm computes in bfloat16, this GPU only in float16, float32"
    for numeric_class in ("cuda-bfloat16", "cuda-sm90-bfloat16-k1+w4z"):
        await assert_trouble(dtypes(CUDA_BUILD, OLD_CARD, numeric_class), "other-dtype", text, "--device cpu")
    other = dtypes(CUDA_BUILD, OLD_CARD, "cuda-float16", "of a later release")
    await assert_hint(other, "no-bfloat16", "no bfloat16", "--dtype float16")
    await assert_ok(dtypes(CUDA_BUILD, CARD, "cuda-bfloat16"), "dtypes")
    await assert_ok(dtypes(CPU_BUILD, OLD_CARD, "cuda-bfloat16"), "dtypes")


async def test_a_card_is_found_by_what_the_system_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await ask_cards(tmp_path) == Cards()
    pci = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    pci.mkdir(parents=True)
    (pci / "vendor").write_text("0x10de\n")
    (pci / "class").write_text("0x040300\n")
    assert not (await ask_cards(tmp_path)).is_nvidia, "its sound device alone"
    (pci / "class").write_text("0x030000\n")
    assert await ask_cards(tmp_path) == Cards(is_nvidia=True)
    told = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    told.parent.mkdir(parents=True)
    told.write_text("Model: \t\t NVIDIA L4\nIRQ:   \t\t 42\n")
    driver = tmp_path / "proc/driver/nvidia/version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n")
    assert await ask_cards(tmp_path) == Cards(is_nvidia=True, driver="550.54.15", names=("NVIDIA L4",))
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build\n")
    assert (await ask_cards(tmp_path)).driver == "570.86.10"
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 9.0'\necho 'NVIDIA L4, 8.9'\n")
    smi.chmod(0o755)
    found = await ask_cards(tmp_path)
    assert (found.names, found.capability) == (("NVIDIA H100 80GB HBM3", "NVIDIA L4"), (9, 0))
    smi.write_text("#!/bin/sh\necho 'Driver/library version mismatch'\nexit 18\n")
    assert (await ask_cards(tmp_path)).failure == "Driver/library version mismatch"
    smi.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    assert (await ask_cards(tmp_path, limit_s=0.2)).capability == ()


def site(folder: Path, version: str = "2.6.0+cu126", said: str = "cuda: Optional[str] = '12.6'") -> list[str]:
    """A folder of packages with a torch that must not be imported."""
    (folder / "torch/lib").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text("raise AssertionError('imported')\n")
    (folder / "torch/version.py").write_text(f"__version__ = '{version}'\n{said}\nhip: Optional[str] = None\n")
    (folder / "torch/lib/libc10.so").write_bytes(b"12345")
    about = folder / f"torch-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    (about / "RECORD").write_text("torch/__init__.py,,\ntorch/lib/libc10.so,sha256=x,5\n")
    return [str(folder)]


def test_torchs_files_say_for_what_it_was_built(tmp_path: Path) -> None:
    paths = site(tmp_path)
    assert read_torch(paths) == TorchBuild("2.6.0+cu126", {"cuda": "12.6"})
    (tmp_path / "torch/lib/libc10.so").write_bytes(b"123")
    assert read_torch(paths).damaged == "libc10.so"
    (tmp_path / "torch/lib/libc10.so").unlink()
    assert read_torch(paths).damaged == "libc10.so"
    (tmp_path / "torch/version.py").write_text("(")
    assert read_torch(paths).version == "2.6.0+cu126"
    assert read_torch([str(tmp_path / "none")]) == TorchBuild()


def test_the_torch_that_is_installed_is_whole_and_is_not_imported() -> None:
    program = (
        "import json, sys; from swarm.doctor.rungs import RUNGS; from swarm.doctor.machine import read_torch; "
        "found = read_torch(); print(json.dumps([found.version, found.damaged, 'torch' in sys.modules]))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    version, damaged, is_imported = json.loads(ran.stdout)
    assert version
    assert (damaged, is_imported) == ("", False)
