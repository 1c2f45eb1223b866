"""The device that would compute: a graphics card, its driver, torch's build for it, the types that it computes in."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from swarm.doctor.diagnosis import Diagnosis, hint, ok, trouble
from swarm.doctor.processes import run_program
from swarm.doctor.swarm_view import SwarmView
from swarm.doctor.torch_report import TorchReport, read_report
from swarm.protocol.numeric_class import NumericClass

TORCH_S: Final = 12.0
_BUILDS: Final = ((570, "cu128"), (525, "cu126"))
"""The oldest NVIDIA driver for which a build of torch works, and the build's name; the newest first."""
_WHEELS: Final = "https://download.pytorch.org/whl"
_UNTRIED: Final = "Canopy was not run on one yet"
_SLOWER: Final = "the card runs the plain path, at a fraction of its speed"
_NVIDIA: Final = "0x10de"
_DISPLAY: Final = "0x03"
"""What PCI calls the class of graphics cards; its first digits."""

AskTorch = Callable[[], Awaitable[TorchReport | str]]
"""What torch says, or why it cannot be asked."""


@dataclass(frozen=True, slots=True)
class Card:
    """An NVIDIA card as the system shows it, whatever torch thinks.

    Attributes:
        is_there: whether a card is in the machine.
        driver: the loaded driver's release, such as 550.54; None if none is loaded.
        closed: device files that this user may not open.
    """

    is_there: bool = False
    driver: str | None = None
    closed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceCheck:
    """Whether torch computes where it could.

    Attributes:
        report: what torch says.
        card: what the system says.
        environment: the process's variables.
    """

    name: ClassVar[str] = "device"
    report: AskTorch
    card: Callable[[], Card]
    environment: Mapping[str, str]

    async def look(self) -> Sequence[Diagnosis]:
        """The first thing that is in the way of a GPU."""
        report, card = await self.report(), self.card()
        if isinstance(report, str):
            return [trouble("torch-broken", f"torch cannot be used: {report}", _reinstall("cpu"))]
        if report.has_cuda:
            return [self._usable(report, card)]
        if report.has_xpu:
            return [ok("xpu", f"Intel's GPU, torch {report.version}; {_UNTRIED}")]
        if report.has_mps:
            return [ok("mps", f"Apple's GPU, torch {report.version}; {_UNTRIED}")]
        if not card.is_there and card.driver is None:
            return [ok("cpu", f"CPU, torch {report.version}; no NVIDIA card here")]
        return [self._unused(report, card)]

    def _usable(self, report: TorchReport, card: Card) -> Diagnosis:
        names = ", ".join(report.devices)
        if not report.is_built_for:
            text = f"torch {report.version} has no code for {names}"
            return trouble("card-not-in-build", text, _reinstall(_build_for(card.driver)))
        return ok("cuda", f"{names}, torch {report.version}")

    def _unused(self, report: TorchReport, card: Card) -> Diagnosis:
        if card.driver is None:
            mend = "sudo ubuntu-drivers install (Ubuntu), or sudo apt-get install nvidia-driver (Debian)"
            return trouble("no-driver", "an NVIDIA card is here and no driver is loaded: the CPU computes", mend)
        if self.environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in {"", "-1"}:
            text = "CUDA_VISIBLE_DEVICES hides the card: the CPU computes"
            return hint("card-hidden", text, "unset CUDA_VISIBLE_DEVICES")
        if card.closed:
            text = f"you may not open {card.closed[0]}: the CPU computes"
            return trouble("card-closed", text, "sudo usermod -aG video,render $USER, then log in again")
        build = _build_for(card.driver)
        if build == "cpu" or ("driver" in report.reason and "old" in report.reason):
            text = f"the driver {card.driver} is too old for torch {report.version}: the CPU computes"
            return trouble("driver-old", text, f"update NVIDIA's driver to {_BUILDS[-1][0]} or newer")
        if not report.cuda_build:
            text = f"torch {report.version} is a build for CPUs, and driver {card.driver} is loaded: the CPU computes"
            return trouble("torch-for-cpu", text, _reinstall(build))
        why = report.reason or "it does not say why"
        return trouble(
            "cuda-fails", f"torch {report.version} cannot use the card: {why}", "nvidia-smi, then restart the machine"
        )


@dataclass(frozen=True, slots=True)
class DtypeCheck:
    """Whether the device computes in the types that the swarm uses.

    Attributes:
        report: what torch says.
        view: what the swarm's nodes compute in.
    """

    name: ClassVar[str] = "dtypes"
    report: AskTorch
    view: Callable[[], Awaitable[SwarmView | None]]

    async def look(self) -> Sequence[Diagnosis]:
        """The swarm's types against the device's."""
        report = await self.report()
        if isinstance(report, str):
            return [hint("not-known", "not known: torch cannot be used", "mend the device first")]
        device = "GPU" if report.has_gpu else "CPU"
        here = report.gpu_dtypes if report.has_gpu else report.cpu_dtypes
        view = await self.view()
        classes = map(NumericClass.parse, () if view is None else view.numeric_classes)
        used = {one.dtype for one in classes if one is not None}
        if used and not used & set(here):
            text = f"the swarm computes in {_listed(used)}, this {device} only in {_listed(here)}"
            return [trouble("other-dtype", text, "node serve --device cpu, or join a swarm of another type")]
        if missing := {"bfloat16", "float16"} - set(here):
            text = f"this {device} has no {_listed(missing)}"
            return [hint("no-16-bit", text, f"node serve --dtype {here[-1] if here else 'float32'}")]
        return [ok("dtypes", f"{device}: {_listed(here)}")]


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """Whether a card can run the kernels, which are several times as fast as the plain path and make texts repeatable.

    Attributes:
        report: what torch says.
    """

    name: ClassVar[str] = "kernels"
    report: AskTorch

    async def look(self) -> Sequence[Diagnosis]:
        """The first thing that is missing; nothing is where there is no NVIDIA card."""
        report = await self.report()
        if isinstance(report, str):
            return [hint("not-known", "not known: torch cannot be used", "mend the device first")]
        if not report.capability:
            return [ok("plain", "the plain path: kernels are for NVIDIA cards")]
        card, number = ", ".join(report.devices[:1]), ".".join(map(str, report.capability))
        if report.capability < report.least_capability:
            least = ".".join(map(str, report.least_capability))
            text = f"{card} has compute capability {number}, kernels need {least}: layers run the plain path"
            return [hint("card-old", text, "nothing but another card; it serves all the same")]
        if not report.has_triton:
            return [hint("no-triton", f"Triton is not installed: {_SLOWER}", "pip install triton")]
        if not report.has_compiler:
            mend = "sudo apt-get install gcc (Debian, Ubuntu), or sudo dnf install gcc (Fedora)"
            return [hint("no-compiler", f"no C compiler is here, and Triton needs one: {_SLOWER}", mend)]
        if not report.has_headers:
            mend = "sudo apt-get install python3-dev (Debian, Ubuntu), or sudo dnf install python3-devel (Fedora)"
            return [hint("no-headers", f"this Python's headers are not here, and Triton needs them: {_SLOWER}", mend)]
        return [ok("kernels", f"{card} (compute capability {number}), Triton, a C compiler, Python's headers")]


def _listed(names: set[str] | Sequence[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _build_for(driver: str | None) -> str:
    release = int(match[0]) if (match := re.match(r"\d+", driver or "")) else 0
    return next((build for oldest, build in _BUILDS if release >= oldest), "cpu")


def _reinstall(build: str) -> str:
    return f"pip install --force-reinstall torch --index-url {_WHEELS}/{build}"


async def ask_torch() -> TorchReport | str:
    """What torch says in a program of its own, or why it says nothing."""
    ran = await run_program([sys.executable, "-P", "-m", "swarm.doctor.torch_report"], TORCH_S, _with_path())
    if ran is None:
        return f"it did not answer within {TORCH_S:.0f} s"
    try:
        return read_report(ran.output.splitlines()[0])
    except (ValueError, IndexError):
        last = ran.output.splitlines()[-1:] or [f"it ended with {ran.status}"]
        return last[0]


def find_card(root: Path = Path("/")) -> Card:
    """Look for an NVIDIA card.

    Args:
        root: where `sys`, `proc` and `dev` lie.
    """
    is_there = any(
        _text(vendor) == _NVIDIA and _text(vendor.with_name("class")).startswith(_DISPLAY)
        for vendor in (root / "sys/bus/pci/devices").glob("*/vendor")
    )
    version = re.search(r"Module\s+(?:for \S+\s+)?(\d+\.[\d.]+)", _text(root / "proc/driver/nvidia/version"))
    nodes = sorted((root / "dev").glob("nvidia[0-9]*"))
    closed = tuple(str(Path("/", one.relative_to(root))) for one in nodes if not os.access(one, os.R_OK | os.W_OK))
    return Card(is_there or bool(nodes), version[1] if version else None, closed)


def _with_path() -> Mapping[str, str]:
    """This process's variables; the package is found also where it is not installed."""
    root = str(Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
