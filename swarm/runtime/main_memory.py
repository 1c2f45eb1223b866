"""Main memory as a program may use it: the machine's, or less where a control group (a container's, say) limits it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class MainMemory:
    """Main memory, in bytes.

    Attributes:
        available_bytes: for another program, without swapping.
        total_bytes: of the machine, or the limit of its control group.
        swap_used_bytes: in use now.
        swap_total_bytes: 0 without swap.
    """

    available_bytes: int
    total_bytes: int
    swap_used_bytes: int = 0
    swap_total_bytes: int = 0


def main_memory(root: Path = Path("/")) -> MainMemory:
    """Measure it. Of several limits, each of a control group within another, the one that leaves least counts.

    Args:
        root: where `proc` and `sys` lie.
    """
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    available, total = memory.available, memory.total
    for limit, used in _limits(root):
        available, total = min(available, max(0, limit - used)), min(total, limit)
    return MainMemory(available, total, swap.used, swap.total)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of each control group of this process: inactive files in it count as free, as they do outside."""
    for folder in _groups(root):
        for limit_file, used_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(folder / limit_file)
            if limit is not None:
                yield limit, max(0, (_number(folder / used_file) or 0) - _inactive_files(folder))


def _groups(root: Path) -> Iterator[Path]:
    """Folders of this process's control groups, from its own up; in a container its own is the top."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        if kinds in {"", "memory"}:
            top = root / "sys/fs/cgroup" / kinds
            own = Path(path.lstrip("/"))
            yield from (top / part for part in dict.fromkeys((own, *own.parents)) if ".." not in part.parts)


def _inactive_files(folder: Path) -> int:
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(found.get("total_inactive_file", found.get("inactive_file", 0)))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
