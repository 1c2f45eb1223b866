"""Troubles of the device, each planted: what the system shows of a card against what torch says."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from swarm.doctor.device import Card, DeviceCheck, DtypeCheck, KernelCheck, find_card
from swarm.doctor.swarm_view import SwarmView
from swarm.doctor.torch_report import DTYPES, TorchReport, make_report, read_report
from tests.one_diagnosis import assert_hint, assert_ok, assert_trouble, ready

CPU_BUILD = TorchReport(version="2.6.0+cpu", cpu_dtypes=DTYPES)
CUDA_BUILD = TorchReport(version="2.6.0+cu126", cuda_build="12.6", cpu_dtypes=DTYPES)
WORKING = replace(CUDA_BUILD, has_cuda=True, devices=("NVIDIA L4",), gpu_dtypes=DTYPES)
EQUIPPED = replace(
    WORKING, capability=(8, 9), least_capability=(8, 0), has_triton=True, has_compiler=True, has_headers=True
)
CARD = Card(is_there=True, driver="550.54.15")


def device(report: TorchReport | str, card: Card = CARD, **environment: str) -> DeviceCheck:
    return DeviceCheck(ready(report), lambda: card, environment)


async def test_a_torch_without_cuda_beside_a_driver() -> None:
    mend = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
    await assert_trouble(device(CPU_BUILD), "torch-for-cpu", "is a build for CPUs, and driver 550.54.15", mend)
    newer = Card(is_there=True, driver="580.10")
    await assert_trouble(device(CPU_BUILD, newer), "torch-for-cpu", "is a build for CPUs", "/whl/cu128")


async def test_a_driver_that_is_too_old() -> None:
    old = Card(is_there=True, driver="470.57")
    await assert_trouble(device(CPU_BUILD, old), "driver-old", "driver 470.57 is too old", "525 or newer")
    said = replace(CUDA_BUILD, reason="The NVIDIA driver on your system is too old (found version 12020).")
    await assert_trouble(
        device(said), "driver-old", "550.54.15 is too old for torch 2.6.0+cu126", "update NVIDIA's driver"
    )


async def test_a_card_that_this_user_may_not_open() -> None:
    card = replace(CARD, closed=("/dev/nvidia0",))
    await assert_trouble(device(CUDA_BUILD, card), "card-closed", "may not open /dev/nvidia0", "sudo usermod -aG video")


async def test_a_card_without_a_driver() -> None:
    await assert_trouble(device(CUDA_BUILD, Card(is_there=True)), "no-driver", "no driver is loaded", "nvidia-driver")


async def test_a_card_that_a_variable_hides() -> None:
    check = device(CUDA_BUILD, CUDA_VISIBLE_DEVICES="")
    await assert_hint(check, "card-hidden", "CUDA_VISIBLE_DEVICES hides the card", "unset CUDA_VISIBLE_DEVICES")


async def test_a_card_for_which_torch_has_no_code() -> None:
    report = replace(WORKING, is_built_for=False)
    await assert_trouble(device(report), "card-not-in-build", "has no code for NVIDIA L4", "--force-reinstall torch")


async def test_a_torch_that_does_not_start() -> None:
    check = device("ImportError: libcudart.so.12: cannot open shared object file")
    await assert_trouble(check, "torch-broken", "libcudart", "--force-reinstall torch")


async def test_a_driver_that_fails() -> None:
    report = replace(CUDA_BUILD, reason="CUDA unknown error")
    await assert_trouble(device(report), "cuda-fails", "CUDA unknown error", "nvidia-smi")


async def test_what_is_well() -> None:
    await assert_ok(device(WORKING), "cuda")
    await assert_ok(device(CPU_BUILD, Card()), "cpu")
    await assert_ok(device(replace(CPU_BUILD, has_mps=True), Card()), "mps")
    await assert_ok(device(replace(CPU_BUILD, has_xpu=True), Card()), "xpu")


async def test_what_a_card_needs_for_kernels() -> None:
    def check(**lacks: Any) -> KernelCheck:  # noqa: ANN401
        return KernelCheck(ready(replace(EQUIPPED, **lacks)))

    await assert_ok(check(), "kernels")
    plain = "plain path, at a fraction of its speed"
    await assert_hint(check(has_triton=False, has_compiler=False), "no-triton", plain, "pip install triton")
    for system in ("apt-get install gcc", "dnf install gcc"):
        await assert_hint(check(has_compiler=False), "no-compiler", plain, system)
    for system in ("apt-get install python3-dev", "dnf install python3-devel"):
        await assert_hint(check(has_headers=False), "no-headers", plain, system)
    text = "NVIDIA L4 has compute capability 7.5, kernels need 8.0"
    await assert_hint(check(capability=(7, 5)), "card-old", text, "another card")
    await assert_ok(KernelCheck(ready(CPU_BUILD)), "plain")
    await assert_ok(check(capability=()), "plain")
    await assert_hint(KernelCheck(ready("it crashed")), "not-known", "torch cannot be used", "mend the device")


def dtypes(report: TorchReport | str, *classes: str) -> DtypeCheck:
    return DtypeCheck(ready(report), ready(SwarmView(numeric_classes=frozenset(classes))))


async def test_a_swarm_that_computes_in_another_type() -> None:
    old = replace(WORKING, gpu_dtypes=("float32", "float16"))
    text = "the swarm computes in bfloat16, this GPU only in float16, float32"
    await assert_trouble(dtypes(old, "cuda-bfloat16", "cuda-bfloat16+int8"), "other-dtype", text, "--device cpu")
    await assert_trouble(dtypes(old, "cuda-sm90-bfloat16-k1+w4"), "other-dtype", text, "--device cpu")
    await assert_hint(dtypes(old, "cuda-float16", "of a later release"), "no-16-bit", "no bfloat16", "--dtype float16")
    await assert_ok(dtypes(WORKING, "cuda-bfloat16"), "dtypes")
    await assert_ok(dtypes(CPU_BUILD), "dtypes")
    await assert_hint(dtypes("it crashed"), "not-known", "torch cannot be used", "mend the device")


def test_a_card_is_found_by_what_the_system_shows(tmp_path: Path) -> None:
    assert find_card(tmp_path) == Card()
    pci = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    pci.mkdir(parents=True)
    (pci / "vendor").write_text("0x10de\n")
    (pci / "class").write_text("0x040300\n")
    assert not find_card(tmp_path).is_there, "its sound device alone"
    (pci / "class").write_text("0x030000\n")
    assert find_card(tmp_path) == Card(is_there=True)
    driver = tmp_path / "proc/driver/nvidia/version"
    driver.parent.mkdir(parents=True)
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n")
    assert find_card(tmp_path).driver == "550.54.15"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build\n")
    assert find_card(tmp_path).driver == "570.86.10"


def test_torch_reports_itself() -> None:
    report = make_report()
    assert "float32" in report.cpu_dtypes
    assert not report.has_gpu
    assert read_report(json.dumps(asdict(report))) == report


@pytest.mark.parametrize("line", ["", "Illegal instruction", "[]", '{"version": "2.6", "more": 1}', "7"])
def test_what_is_no_report_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_report(line)
