"""The device that would compute: cards, driver, torch's build for them. Nothing here imports torch.

Torch takes seconds to import, on a busy machine minutes, and a broken driver may hang it. What a build is for stands in
its files, and what a card is the system knows.
"""

from __future__ import annotations

import ast
import csv
import importlib.metadata
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from swarm.doctor.ladder import Diagnosis, hint, ok, trouble, unknown
from swarm.doctor.processes import run_program
from swarm.kernels.toolchain import MIN_CAPABILITY, Toolchain
from swarm.protocol.numeric_class import NumericClass

_BUILDS: Final = ((570, "cu128"), (525, "cu126"))
"""The oldest NVIDIA driver for which a build of torch works, and the build's name; the newest first."""
_BLACKWELL: Final = ((10, 0), 12.8)
"""Cards from this compute capability on need a build for this CUDA release, or a later one."""
_WHEELS: Final = "https://download.pytorch.org/whl"
_UNTRIED: Final = "Canopy was not run on one yet"
_SLOWER: Final = "the card runs the plain path, at a fraction of its speed"
_NVIDIA: Final = "0x10de"
_DISPLAY: Final = "0x03"
"""What PCI calls the class of graphics cards; its first digits."""
_SMI: Final = ("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What torch's files say of it.

    Attributes:
        version: such as `2.6.0+cpu`; empty where it is not installed.
        made_for: `cuda`, `hip` or `xpu` and the release; none for a build for CPUs.
        damaged: a library of it that is missing or cut off; empty where all are whole.
    """

    version: str = ""
    made_for: Mapping[str, str] = field(default_factory=dict)
    damaged: str = ""


@dataclass(frozen=True, slots=True)
class Cards:
    """Graphics cards as the system shows them.

    Attributes:
        is_nvidia: whether an NVIDIA card is in the machine.
        is_amd: whether AMD's driver for computing is loaded.
        driver: the loaded NVIDIA driver's release, such as 550.54; None if none is loaded.
        closed: device files that this user may not open.
        names: of the NVIDIA cards, as far as they are known.
        capability: of the first one, such as (9, 0); empty if it is not known.
        failure: what `nvidia-smi` said where it failed.
    """

    is_nvidia: bool = False
    is_amd: bool = False
    driver: str | None = None
    closed: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    capability: tuple[int, ...] = ()
    failure: str = ""


AskCards = Callable[[], Awaitable[Cards]]


async def look_at_device(build: TorchBuild, ask: AskCards, environment: Mapping[str, str]) -> Diagnosis:
    """The first thing that is in the way of a card. No mend replaces a build that works."""
    if build.damaged:
        text = f"torch {build.version} is damaged: {build.damaged} is missing or cut off"
        return trouble("torch-damaged", text, _same_again(build.version))
    cards = await ask()
    if not cards.is_nvidia:
        return _other(build, cards)
    if cards.driver is None:
        mend = "sudo ubuntu-drivers install (Ubuntu), or sudo apt-get install nvidia-driver (Debian)"
        return hint("no-driver", "an NVIDIA card is here and no driver is loaded: the CPU computes", mend)
    if environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in {"", "-1"}:
        return hint(
            "card-hidden", "CUDA_VISIBLE_DEVICES hides the card: the CPU computes", "unset CUDA_VISIBLE_DEVICES"
        )
    if cards.closed:
        text = f"you may not open {cards.closed[0]}: the CPU computes"
        return hint("card-closed", text, "sudo usermod -aG video,render $USER, then log in again")
    if cards.failure:
        text = f"the driver {cards.driver} does not work: {cards.failure}"
        return hint("driver-fails", text, "restart the machine: the driver was changed while it ran")
    return _nvidia(build, cards)


def _nvidia(build: TorchBuild, cards: Cards) -> Diagnosis:
    fits, names = _build_for(cards.driver), ", ".join(cards.names) or "an NVIDIA card"
    if not build.version:
        return unknown("torch's version cannot be read")
    if not fits:
        text = f"the driver {cards.driver} is too old for any build of torch: the CPU computes"
        return hint("driver-old", text, f"update NVIDIA's driver to {_BUILDS[-1][0]} or newer")
    cuda = build.made_for.get("cuda")
    if cuda is None:
        text = f"torch {build.version} is a build without CUDA, and driver {cards.driver} is loaded: the CPU computes"
        return hint("torch-for-cpu", text, _beside(fits))
    least, needs = _BLACKWELL
    if cards.capability >= least and (release := _number(cuda)) and release < needs:
        text = f"torch {build.version} has no code for {names}"
        return hint("card-not-in-build", text, _beside(fits))
    return ok("cuda", f"{names}, driver {cards.driver}, torch {build.version} for CUDA {cuda}")


def _other(build: TorchBuild, cards: Cards) -> Diagnosis:
    if cards.is_amd and "hip" not in build.made_for:
        text = f"AMD's driver is loaded, and torch {build.version} is not for it: the CPU computes"
        return hint("torch-for-cpu", text, f"{_beside('rocm6.4')}; {_UNTRIED}")
    for made_for, whose in (("hip", "AMD"), ("xpu", "Intel")):
        if made_for in build.made_for:
            return ok(made_for, f"torch {build.version}, for {whose}'s cards; {_UNTRIED}")
    return ok("cpu", f"CPU, torch {build.version}; no NVIDIA card here")


async def look_at_kernels(ask: AskCards, tools: Toolchain) -> Diagnosis:
    """What a card lacks for its kernels; nothing is where there is no NVIDIA card."""
    cards = await ask()
    if not cards.is_nvidia or cards.driver is None:
        return ok("plain", "the plain path: kernels are for NVIDIA cards")
    if not cards.capability:
        return unknown("what the card can do; nvidia-smi does not say it")
    number = ".".join(map(str, cards.capability))
    if cards.capability < MIN_CAPABILITY:
        least = ".".join(map(str, MIN_CAPABILITY))
        text = f"{cards.names[0]} has compute capability {number}, kernels need {least}: layers run the plain path"
        return hint("card-old", text, "nothing but another card; it serves all the same")
    if not tools.has_triton:
        return hint("no-triton", f"Triton is not installed: {_SLOWER}", "pip install triton")
    if not tools.has_compiler:
        mend = "sudo apt-get install gcc (Debian, Ubuntu), or sudo dnf install gcc (Fedora)"
        return hint("no-compiler", f"no C compiler is here, and Triton needs one: {_SLOWER}", mend)
    if not tools.has_headers:
        mend = "sudo apt-get install python3-dev (Debian, Ubuntu), or sudo dnf install python3-devel (Fedora)"
        return hint("no-headers", f"this Python's headers are not here, and Triton needs them: {_SLOWER}", mend)
    return ok("kernels", f"{cards.names[0]} (compute capability {number}), Triton, a C compiler, Python's headers")


async def look_at_dtypes(build: TorchBuild, ask: AskCards, numeric_classes: Iterable[str]) -> Diagnosis:
    """The types in which the swarm computes, against the device's."""
    cards = await ask()
    here = {"float32", "bfloat16", "float16"}
    uses_card = cards.is_nvidia and bool(cards.capability) and "cuda" in build.made_for and not cards.closed
    if uses_card and cards.capability < MIN_CAPABILITY:
        here.remove("bfloat16")
    device = "GPU" if uses_card else "CPU"
    used = {one.dtype for one in map(NumericClass.parse, numeric_classes) if one is not None}
    if used and not used & here:
        text = f"the swarm computes in {_listed(used)}, this {device} only in {_listed(here)}"
        return trouble("other-dtype", text, "node serve --device cpu, or join a swarm of another type")
    if "bfloat16" not in here:
        return hint("no-bfloat16", f"this {device} has no bfloat16", "node serve --dtype float16")
    return ok("dtypes", f"{device}: {_listed(here)}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _build_for(driver: str | None) -> str:
    release = int(match[0]) if (match := re.match(r"\d+", driver or "")) else 0
    return next((build for oldest, build in _BUILDS if release >= oldest), "")


def _beside(build: str) -> str:
    """Another build, in an environment of its own: the one that works stays."""
    return f"python3 -m venv new && new/bin/pip install canopy-swarm --extra-index-url {_WHEELS}/{build}"


def _same_again(version: str) -> str:
    """The very same build, which cannot make anything worse."""
    _, _, build = version.partition("+")
    index = f" --index-url {_WHEELS}/{build}" if build else ""
    return f"pip install --force-reinstall --no-deps torch=={version}{index}"


def _number(release: str) -> float:
    match = re.match(r"\d+(\.\d+)?", release)
    return float(match[0]) if match else 0.0


def read_torch(paths: Sequence[str] | None = None) -> TorchBuild:
    """What the files of the installed torch say.

    Args:
        paths: folders of packages (default: where this program finds its own).
    """
    paths = list(sys.path if paths is None else paths)
    spec = PathFinder.find_spec("torch", paths)
    folders = [Path(one) for one in (spec.submodule_search_locations or ())] if spec is not None else []
    found = next(iter(importlib.metadata.distributions(name="torch", path=paths)), None)
    said = _assigned(_text(folders[0] / "version.py")) if folders else {}
    version = said.get("__version__") or (found.version if found is not None else "")
    made_for = {name: value for name in ("cuda", "hip", "xpu") if (value := said.get(name))}
    is_its = found is not None and bool(folders) and folders[0].is_relative_to(str(found.locate_file("")))
    return TorchBuild(version, made_for, _first_damaged(found.files or ()) if found is not None and is_its else "")


def _first_damaged(files: Sequence[importlib.metadata.PackagePath]) -> str:
    for file in files:
        if ".so" in file.suffixes and file.parts[0] in {"torch", "functorch"} and file.size is not None:
            try:
                is_whole = os.stat(file.locate()).st_size == file.size
            except OSError:
                is_whole = False
            if not is_whole:
                return file.name
    return ""


def _assigned(source: str) -> dict[str, str]:
    """Names and their texts in a file of plain assignments, as torch's `version.py` is."""
    try:
        lines = ast.parse(source).body
    except SyntaxError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        match line:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text)))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text)))
            ):
                found[name] = text
    return found


async def ask_cards(root: Path = Path("/"), limit_s: float = 5.0) -> Cards:
    """Look for cards.

    Args:
        root: where `sys`, `proc` and `dev` lie.
        limit_s: seconds that the driver's own program may take.
    """
    is_pci = any(
        _text(vendor) == _NVIDIA and _text(vendor.with_name("class")).startswith(_DISPLAY)
        for vendor in (root / "sys/bus/pci/devices").glob("*/vendor")
    )
    version = re.search(r"Module\s+(?:for \S+\s+)?(\d+\.[\d.]+)", _text(root / "proc/driver/nvidia/version"))
    nodes = sorted((root / "dev").glob("nvidia[0-9]*"))
    closed = tuple(str(Path("/", one.relative_to(root))) for one in nodes if not os.access(one, os.R_OK | os.W_OK))
    told = [_text(one) for one in sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))]
    names = tuple(match[1].strip() for one in told if (match := re.search(r"^Model:(.+)$", one, re.MULTILINE)))
    is_nvidia, driver = is_pci or bool(nodes), version[1] if version else None
    capability: tuple[int, ...] = ()
    failure = ""
    if is_nvidia and driver is not None:
        names, capability, failure = await _ask_driver(names, limit_s)
    is_amd = (root / "dev/kfd").exists()
    return Cards(is_nvidia, is_amd, driver, closed, names, capability, failure)


async def _ask_driver(names: tuple[str, ...], limit_s: float) -> tuple[tuple[str, ...], tuple[int, ...], str]:
    ran = await run_program(_SMI, limit_s)
    if ran is None:
        return names, (), ""
    if ran.status != 0:
        return names, (), " ".join(ran.output.split())
    rows = [row for row in csv.reader(ran.output.splitlines(), skipinitialspace=True) if len(row) == 2]
    capability = re.fullmatch(r"(\d+)\.(\d+)", rows[0][1].strip()) if rows else None
    names = tuple(name for name, _ in rows) or names
    return names, tuple(map(int, capability.groups())) if capability and names else (), ""


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
