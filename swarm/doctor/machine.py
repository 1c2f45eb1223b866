"""The machine itself: disk, memory, open files, the identity's file."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import psutil

from swarm.discovery.identity import Identity
from swarm.doctor.diagnosis import Diagnosis, hint, ok, trouble
from swarm.doctor.model_facts import ModelFacts
from swarm.doctor.swarm_view import SwarmView
from swarm.errors import IdentityError

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


@dataclass(frozen=True, slots=True)
class Memory:
    """Main memory.

    Attributes:
        available_bytes: for another program, without swapping; a container's limit counts.
        total_bytes: of the machine or container.
        swap_used_bytes: in use now.
        swap_total_bytes: 0 without swap.
    """

    available_bytes: int
    total_bytes: int
    swap_used_bytes: int = 0
    swap_total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DiskCheck:
    """Room for a model's files in the hub's cache.

    Attributes:
        cache: its folder.
        look_at: tells about the file system of a folder.
        model: the model that was named, if one was.
    """

    name: ClassVar[str] = "disk"
    cache: Path
    look_at: Callable[[Path], FileSystem]
    model: AskModel

    async def look(self) -> Sequence[Diagnosis]:
        """Room, and whether it can be used."""
        found = self.look_at(self.cache)
        elsewhere = "export HF_HOME=/a/folder/on/another/disk"
        if not found.is_writable:
            return [trouble("not-writable", f"models are kept in {self.cache}, where you may not write", elsewhere)]
        if found.free_bytes < MIN_FREE_DISK or found.free_files == 0:
            what = "no file" if found.free_files == 0 else gib(found.free_bytes)
            return [
                trouble("disk-full", f"{what} is free for models in {self.cache}", f"hf cache prune, or {elsewhere}")
            ]
        model = await self.model()
        missing = 0 if model is None else model.missing_bytes or 0
        if missing > found.free_bytes:
            text = f"the whole model takes {gib(missing)} more, {gib(found.free_bytes)} are free"
            return [
                hint("model-larger", text, "node serve --layers START-END downloads only the files of those layers")
            ]
        return [ok("room", f"{gib(found.free_bytes)} free for models")]


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Memory for layers.

    Attributes:
        measure: reads it.
        model: the model that was named, if one was.
    """

    name: ClassVar[str] = "memory"
    measure: Callable[[], Memory]
    model: AskModel

    async def look(self) -> Sequence[Diagnosis]:
        """Whether layers fit; swap."""
        memory = self.measure()
        free, total = gib(memory.available_bytes), gib(memory.total_bytes)
        if memory.available_bytes < MIN_MEMORY:
            text = f"{free} of {total} is free; one layer and its runtime need more than {gib(MIN_MEMORY)}"
            return [trouble("little-memory", text, "close other programs, or serve from a machine with more memory")]
        model = await self.model()
        layer = None if model is None else model.layer_bytes
        if layer is not None and memory.available_bytes * AUTO_SHARE < layer:
            text = f"{free} of {total} is free; one layer of this model takes {gib(layer)}"
            mend = "node serve --weights int4, --layers 0-1 --offload, a smaller model, or more memory"
            return [trouble("layer-larger", text, mend)]
        if memory.swap_used_bytes > memory.swap_total_bytes * LITTLE_SWAP:
            used = f"{gib(memory.swap_used_bytes)} of {gib(memory.swap_total_bytes)} of swap is in use"
            return [hint("swapping", f"{used}: a node that is swapped out answers late", "close other programs")]
        return [ok("memory", f"{free} of {total} free")]


@dataclass(frozen=True, slots=True)
class FileLimitCheck:
    """How many files and connections a node may have open.

    Attributes:
        limit: the hard limit; a node raises the soft one to it.
    """

    name: ClassVar[str] = "files"
    limit: Callable[[], int]

    async def look(self) -> Sequence[Diagnosis]:
        """Whether connections are left."""
        limit = self.limit()
        mend = "sudo prlimit --nofile=65536:65536 --pid $$ in this shell; LimitNOFILE=65536 in a systemd unit"
        if limit < FEW_FILES:
            return [trouble("few-files", f"a program may open {limit} files: a node needs {FEW_FILES} and more", mend)]
        if limit < ENOUGH_FILES:
            text = f"a program may open {limit:,} files: a node then takes {limit // 2:,} connections of 4,096"
            return [hint("some-files", text, mend)]
        return [ok("files", f"{limit:,} files may be open")]


@dataclass(frozen=True, slots=True)
class IdentityCheck:
    """The machine's key: readable, closed to others, sound, and used by nobody else.

    Attributes:
        path: of the key file.
        view: what the swarm lists under this identity.
    """

    name: ClassVar[str] = "identity"
    path: Path
    view: Callable[[], Awaitable[SwarmView | None]]

    async def look(self) -> Sequence[Diagnosis]:
        """The file, then the swarm."""
        if not self.path.exists():
            return [ok("no-identity", "none yet; the first start makes one")]
        try:
            identity = Identity.load_or_create(self.path)
        except IdentityError as error:
            return [self._refused(str(error))]
        is_used = _is_locked(identity)
        view = await self.view()
        listed = None if view is None else view.own_record
        if listed is not None and not is_used:
            text = f"another machine serves under this key, {listed.span.describe(listed.model.num_layers)}"
            return [
                trouble("identity-copied", text, f"mv {self.path} {self.path}.copied; the next start makes a new one")
            ]
        if is_used:
            return [ok("identity-in-use", "sound; a program on this machine runs under it")]
        return [ok("identity", "sound, and closed to others")]

    def _refused(self, reason: str) -> Diagnosis:
        if "open to other users" in reason:
            return trouble(
                "identity-open", "other users can read the key, and could pose as you", f"chmod 600 {self.path}"
            )
        if "holds no libp2p key" in reason or "must be RSA" in reason:
            mend = f"mv {self.path} {self.path}.damaged; the next start makes a new one"
            return trouble("identity-damaged", "the key file is damaged", mend)
        return trouble("identity-unreadable", f"the key file cannot be read: {reason}", f"sudo chown $USER {self.path}")


def _is_locked(identity: Identity) -> bool:
    try:
        with identity.lock():
            return False
    except IdentityError:
        return True


def gib(size: int) -> str:
    """A number of bytes in GiB."""
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


def measure_memory(container: Path = Path("/sys/fs/cgroup")) -> Memory:
    """Main memory, and the limit of the container that this runs in.

    Args:
        container: folder of its control group.
    """
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    available, total = memory.available, memory.total
    limit, used = _number(container / "memory.max"), _number(container / "memory.current")
    if limit is not None and limit < total:
        available, total = min(available, max(0, limit - (used or 0))), limit
    return Memory(available, total, swap.used, swap.total)


def hard_file_limit() -> int:
    """The files that a program of this user may open at most."""
    if sys.platform == "win32":
        return ENOUGH_FILES
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
