"""What a process may use: main memory, open files, threads; and imports kept out of garbage collection. Imports little.

Memory is the machine's, or less where the process's control groups allow less: containers and services are held by
limits that the machine's own figures do not show, and a process that goes beyond is killed.

Torch and transformers are hundreds of thousands of objects, and a full collection walks them all. On a busy machine
that can take longer than the silence after which peers count a machine as dead (`swarm.link.link`), and large
trees make full collections frequent.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from swarm.base.errors import ConfigError

GROUPS: Final = Path("/sys/fs/cgroup")
OWN_GROUPS: Final = Path("/proc/self/cgroup")
_VERSION_1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2: Final = ("memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True, slots=True)
class MainMemory:
    """Bytes of main memory.

    Attributes:
        available: what this program can still take, caches given up.
        total: what there is, or what it and its neighbours in the tightest group may take together.
    """

    available: int
    total: int


def main_memory(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> MainMemory:
    """What there is for this program now.

    Args:
        groups: where control groups are mounted.
        own: the file that names this program's.
    """
    host = psutil.virtual_memory()
    available, total = int(host.available), int(host.total)
    for folder, (limit_name, used_name, cached_name) in _folders(groups, own):
        limit = _number(folder / limit_name)
        if limit is None or limit >= host.total:
            continue
        used = max((_number(folder / used_name) or 0) - _counter(folder / "memory.stat", cached_name), 0)
        available, total = min(available, max(limit - used, 0)), min(total, limit)
    return MainMemory(available, total)


def _folders(groups: Path, own: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The control groups that hold this program: its own and all above; a container sees its own as the root."""
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        lines = []
    paths = {kinds: path for _, kinds, path in (line.split(":", 2) for line in lines if line.count(":") >= 2)}
    first = next((path for kinds, path in paths.items() if "memory" in kinds.split(",")), None)
    for root, path, names in ((groups, paths.get(""), _VERSION_2), (groups / "memory", first, _VERSION_1)):
        folder = Path(root, *Path(path or "/").parts[1:])
        yield from ((one, names) for one in (folder, *folder.parents) if one.is_relative_to(root))


def _number(file: Path) -> int | None:
    """What a file says; None where it is not there, or says that there is no limit."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _counter(file: Path, name: str) -> int:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return 0
    found = next((line.split()[1] for line in lines if line.startswith(f"{name} ")), "0")
    return int(found) if found.isdecimal() else 0


UNKNOWN_LIMIT = 1_024
"""Assumed where the system does not tell, as Windows."""
MOST = 1 << 20
"""More is never asked for: some systems say "no limit", and mean less."""


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one; returns what it is now."""
    if sys.platform == "win32":
        return UNKNOWN_LIMIT
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return file_limit()


def file_limit() -> int:
    """The files that may be open at a time."""
    if sys.platform == "win32":
        return UNKNOWN_LIMIT
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)


THREADS_PER_CORE = 16


def check_threads(threads: int | None, name: str) -> None:
    """Refuse a number of threads that cannot be started here.

    Args:
        threads: None leaves the choice to torch.
        name: the option, for the message.

    Raises:
        ConfigError: less than 1, or more than `THREADS_PER_CORE` per core.
    """
    max_threads = THREADS_PER_CORE * (os.cpu_count() or 1)
    if threads is not None and not 1 <= threads <= max_threads:
        raise ConfigError(f"{name} {threads}: give 1 to {max_threads} on this machine, or leave it out")


def freeze_imports() -> None:
    """Exempt every object that exists now from collection: a program calls it after its imports, before it loads."""
    gc.collect()
    gc.freeze()
