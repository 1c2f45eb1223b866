"""The machine itself: disk, memory, open files, Canopy's own folders and the identity in them."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarm.discovery.identity import Identity
from swarm.discovery.node_record import NodeRecord
from swarm.doctor.ladder import Diagnosis, hint, ok, trouble
from swarm.doctor.model_facts import ModelFacts
from swarm.errors import IdentityError
from swarm.runtime.files import foreign_part, why_unusable
from swarm.runtime.memory_limit import MainMemory

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
    """Whether layers fit into memory; swap.

    Args:
        memory: main memory.
        swap: bytes of swap in use, and of all.
        model: the model that was named, if one was.
    """
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
    """The machine's key: readable, closed to others, sound, and used by nobody else.

    Args:
        path: of the key file.
        listed: what the swarm lists under this identity.
    """
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


def hard_file_limit() -> int:
    """The files that a program of this user may open at most."""
    if sys.platform == "win32":
        return ENOUGH_FILES
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard
