"""A control group's limit counts, wherever on the way up it stands; files that can be dropped count as free."""

from __future__ import annotations

from pathlib import Path

import psutil

from swarm.runtime.main_memory import main_memory

MIB = 1 << 20


def group(root: Path, path: str, **files: object) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def of(root: Path, line: str) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(f"9:cpu:/elsewhere\n{line}\n")


def test_the_limit_of_an_outer_group_counts(tmp_path: Path) -> None:
    of(tmp_path, "0::/pod/inner")
    group(tmp_path, "pod/inner", max="max", current=5)
    group(tmp_path, "pod", max=200 * MIB, current=150 * MIB, stat=f"anon 1\ninactive_file {30 * MIB}")
    found = main_memory(tmp_path)
    assert (found.available_bytes, found.total_bytes) == (80 * MIB, 200 * MIB)


def test_the_limit_of_an_older_kernels_group_counts(tmp_path: Path) -> None:
    of(tmp_path, "4:memory:/job")
    group(tmp_path, "memory/job", limit_in_bytes=100 * MIB, usage_in_bytes=101 * MIB)
    assert main_memory(tmp_path).available_bytes == 0


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    group(tmp_path, "", max="max", current=5)
    assert main_memory(tmp_path).total_bytes == psutil.virtual_memory().total
