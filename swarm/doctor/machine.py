"""The machine itself: disk, memory, open files, Canopy's own folders and the identity in them."""

from __future__ import annotations

import ast
import csv
import errno
import importlib.metadata
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from swarm.base.errors import IdentityError
from swarm.base.files import foreign_part, why_unusable
from swarm.base.process_limits import MainMemory
from swarm.base.version import VERSION
from swarm.compute.kernels.toolchain import MIN_CAPABILITY, Toolchain
from swarm.directory.identity import Identity
from swarm.directory.node_record import NodeRecord
from swarm.doctor.hub import ModelFacts
from swarm.doctor.ladder import Diagnoses, Diagnosis, hint, ok, trouble, unknown
from swarm.doctor.probes import Ran, run_program
from swarm.protocol.numeric_class import NumericClass

GIB: Final = 1 << 30
MIN_FREE_DISK: Final = GIB
MIN_MEMORY: Final = GIB
"""Python, torch and the directory take half of it before the first layer."""
AUTO_SHARE: Final = 0.6
"""Fraction of the free memory that a node fills, as `--layers auto` does."""
LITTLE_SWAP: Final = 0.5
FEW_FILES: Final = 600
"""Below this a node has no connection left: it keeps 512 files for itself."""
ENOUGH_FILES: Final = 8_192
"""A node then takes its 4,096 connections: half of its files."""

AskModel = Callable[[], Awaitable[ModelFacts | None]]


@dataclass(frozen=True, slots=True)
class FileSystem:
    """What a file system has.

    Attributes:
        free_bytes: for this user.
        free_files: how many more files fit; None where it does not count them.
        is_writable: whether this user may write into the folder, or make it.
    """

    free_bytes: int
    free_files: int | None
    is_writable: bool


async def look_at_disk(cache: Path, found: FileSystem, model: AskModel) -> Diagnosis:
    """Room for a model's files in the hub's cache, and whether it can be used."""
    elsewhere = "export HF_HOME=/a/folder/on/another/disk"
    if not found.is_writable:
        foreign = foreign_part(cache)
        mend = elsewhere if foreign is None else f'sudo chown -R "$USER" {foreign}, or {elsewhere}'
        return trouble("not-writable", f"models are kept in {cache}, where you may not write", mend)
    if found.free_bytes < MIN_FREE_DISK or found.free_files == 0:
        what = "no file" if found.free_files == 0 else gib(found.free_bytes)
        return trouble("disk-full", f"{what} is free for models in {cache}", f"hf cache prune, or {elsewhere}")
    facts = await model()
    missing = 0 if facts is None else facts.missing_bytes or 0
    if missing > found.free_bytes:
        text = f"the whole model takes {gib(missing)} more, {gib(found.free_bytes)} are free"
        return hint("model-larger", text, "node serve --layers START-END downloads only the files of those layers")
    return ok("room", f"{gib(found.free_bytes)} free for models")


async def look_at_memory(memory: MainMemory, swap: tuple[int, int], model: AskModel) -> Diagnosis:
    """Whether layers fit into memory; swap."""
    free, total = gib(memory.available), gib(memory.total)
    if memory.available < MIN_MEMORY:
        text = f"{free} of {total} is free; one layer and its runtime need more than {gib(MIN_MEMORY)}"
        mend = "close other programs, raise the container's limit, or serve from a machine with more memory"
        return trouble("little-memory", text, mend)
    facts = await model()
    layer = None if facts is None else facts.layer_bytes
    if layer is not None and memory.available * AUTO_SHARE < layer:
        text = f"{free} of {total} is free; one layer of this model takes {gib(layer)}"
        mend = "node serve --weights int4, --layers 0-1 --offload, a smaller model, or more memory"
        return trouble("layer-larger", text, mend)
    swap_used, swap_total = swap
    if swap_used > swap_total * LITTLE_SWAP:
        used = f"{gib(swap_used)} of {gib(swap_total)} of swap is in use"
        return hint("swapping", f"{used}: a node that is swapped out answers late", "close other programs")
    return ok("memory", f"{free} of {total} free")


def look_at_file_limit(limit: int) -> Diagnosis:
    """Whether files and connections are left; a node raises the soft limit to the hard one."""
    mend = "sudo prlimit --nofile=65536:65536 --pid $$ in this shell; LimitNOFILE=65536 in a systemd unit"
    if limit < FEW_FILES:
        return trouble("few-files", f"a program may open {limit} files: a node needs {FEW_FILES} and more", mend)
    if limit < ENOUGH_FILES:
        text = f"a program may open {limit:,} files: a node then takes {limit // 2:,} connections of 4,096"
        return hint("some-files", text, mend)
    return ok("files", f"{limit:,} files may be open")


def look_at_folders(folders: Iterable[Path]) -> Diagnosis:
    """Whether Canopy's own folders and what lies in them can be read and written."""
    for folder in folders:
        try:
            there = [one for one in (folder, *folder.parents) if one.exists()][:1]
            closed = [one for one in (*there, *(folder.iterdir() if folder.is_dir() else ())) if not _is_usable(one)]
        except OSError as error:
            return _closed(why_unusable(error, folder), folder)
        if closed:
            return _closed(f"{closed[0]}: {os.strerror(errno.EACCES)}", closed[0])
    return ok("own-files", "Canopy's folders can be read and written")


def _is_usable(path: Path) -> bool:
    return os.access(path, (os.R_OK | os.W_OK | os.X_OK) if path.is_dir() else os.R_OK, effective_ids=True)


def _closed(text: str, path: Path) -> Diagnosis:
    foreign = foreign_part(path)
    mend = f'sudo chown -R "$USER" {foreign}' if foreign is not None else f"chmod u+rwX {path}"
    return trouble("files-of-another", text.partition(";")[0], mend)


def look_at_identity(path: Path, listed: NodeRecord | None) -> Diagnosis:
    """The machine's key: readable, closed to others, sound, and used by nobody else."""
    try:
        identity = Identity.load(path)
    except IdentityError as error:
        return _refused_key(str(error), path)
    if identity is None:
        return ok("no-identity", "none yet; the first start makes one")
    is_used = _is_locked(identity)
    if listed is not None and not is_used:
        text = f"another machine serves under this key, {listed.span.describe(listed.model.num_layers)}"
        return trouble("identity-copied", text, f"mv {path} {path}.copied; the next start makes a new one")
    if is_used:
        return ok("identity-in-use", "sound; a program on this machine runs under it")
    return ok("identity", "sound, and closed to others")


def _refused_key(reason: str, path: Path) -> Diagnosis:
    if "open to other users" in reason:
        return trouble("identity-open", "other users can read the key, and could pose as you", f"chmod 600 {path}")
    if "holds no libp2p key" in reason or "must be RSA" in reason:
        mend = f"mv {path} {path}.damaged; the next start makes a new one"
        return trouble("identity-damaged", "the key file is damaged", mend)
    text = f"the key file cannot be read: {reason.partition(';')[0]}"
    return trouble("identity-unreadable", text, f'sudo chown "$USER" {path}')


def _is_locked(identity: Identity) -> bool:
    try:
        with identity.lock():
            return False
    except IdentityError:
        return True


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def file_system_of(folder: Path) -> FileSystem:
    """The file system of a folder, or of the nearest one above it that is there."""
    while not folder.exists():
        folder = folder.parent
    stat = os.statvfs(folder)
    counts_files = stat.f_files > 0
    return FileSystem(
        stat.f_bavail * stat.f_frsize, stat.f_favail if counts_files else None, os.access(folder, os.W_OK | os.X_OK)
    )


def hard_file_limit() -> int:
    """The files that a program of this user may open at most."""
    if sys.platform == "win32":
        return ENOUGH_FILES
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard


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
    """What the files of the installed torch say."""
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


PACKAGE: Final = "canopy-swarm"
SHOWN: Final = ("torch", "transformers", "grpcio", "hivemind")
_DAEMON_WORDS: Final = "usage of"
"""What the p2p daemon's help begins with."""


def look_at_packages(
    requirements: Sequence[str], installed: Callable[[str], str | None], python: str, pythons: str
) -> Diagnoses:
    """Whether what is installed is what this release needs: each package that is missing, too old or too new."""
    found = []
    if python not in SpecifierSet(pythons):
        text = f"Python {python} is not one of those for which Canopy is made ({pythons})"
        found.append(trouble("python", text, "python3.12 -m venv .venv, and install into that"))
    for wanted in map(Requirement, requirements):
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        mend, version = f"pip install '{wanted.name}{wanted.specifier}'", installed(wanted.name)
        if version is None:
            found.append(trouble("package-missing", f"{wanted.name} is not installed", mend))
        elif not wanted.specifier.contains(version, prereleases=True):
            needs = f"this release of Canopy needs {wanted.specifier}"
            found.append(trouble("package-version", f"{wanted.name} {version} is installed, and {needs}", mend))
    shown = ", ".join(f"{name} {installed(name)}" for name in SHOWN if installed(name))
    return found or ok("packages", f"{PACKAGE} {VERSION}, Python {python}, {shown}")


async def look_at_daemon(path: Path | None, run: Callable[[Path], Awaitable[Ran | None]]) -> Diagnosis:
    """Whether hivemind's p2p daemon runs here: it is a program for one kind of processor."""
    again = "pip install --force-reinstall --no-deps --no-cache-dir hivemind"
    if path is None:
        return trouble("no-daemon", "hivemind has no p2p daemon: without it there is no directory", again)
    try:
        ran = await run(path)
    except PermissionError:
        return trouble("daemon-closed", "the p2p daemon may not be run", f"chmod u+x {path}, or {again}")
    except OSError as error:
        text = f"the p2p daemon does not run on this machine: {error.strerror or error}"
        mend = "use a machine with Linux on x86-64, or build hivemind's p2pd for this one"
        return trouble("daemon-foreign", text, mend)
    if ran is None:
        return unknown("the p2p daemon did not start in time; the machine may be very busy")
    if _DAEMON_WORDS not in ran.output.lower():
        how = f"signal {-ran.status}" if ran.status < 0 else f"status {ran.status}"
        return trouble("daemon-broken", f"the p2p daemon ended with {how}", again)
    return ok("daemon", "the p2p daemon runs")


def installed_version(name: str) -> str | None:
    """The version of an installed package; None if it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_requirements() -> tuple[list[str], str]:
    """What this release needs, and the Pythons that it runs on."""
    metadata = importlib.metadata.metadata(PACKAGE)
    return importlib.metadata.requires(PACKAGE) or [], metadata["Requires-Python"] or ""


def python_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def find_daemon() -> Path | None:
    """Where hivemind keeps its p2p daemon; nothing of hivemind is imported."""
    spec = find_spec("hivemind")
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    return next((path for folder in folders if (path := Path(folder) / "hivemind_cli" / "p2pd").exists()), None)


async def run_daemon(path: Path) -> Ran | None:
    """Let the daemon print its help; raises OSError where the system cannot run it."""
    return await run_program([str(path), "-help"])
