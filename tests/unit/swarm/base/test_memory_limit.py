"""A container's or a service's limit counts as the machine's memory: the tightest of the groups above a program."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from swarm.base import process_limits
from swarm.base.process_limits import main_memory
from swarm.compute.devices import free_bytes

MIB = 1 << 20


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "own"


def test_without_a_limit_it_is_the_machines(tmp_path: Path, own: Path) -> None:
    group(tmp_path / "cgroup", memory_max="max\n")
    own.write_text("0::/\n")
    assert main_memory(tmp_path / "cgroup", own).total == psutil.virtual_memory().total
    assert main_memory(tmp_path / "nothing", tmp_path / "nothing").total == psutil.virtual_memory().total


def test_the_tightest_group_counts_without_what_can_be_given_up(tmp_path: Path, own: Path) -> None:
    root = tmp_path / "cgroup"
    group(root / "system.slice", memory_max=f"{90 * MIB}\n", memory_current=f"{50 * MIB}\n")
    stat = f"anon 5\ninactive_file {10 * MIB}\n"
    group(root / "system.slice/n.service", memory_max=f"{60 * MIB}", memory_current=f"{30 * MIB}", memory_stat=stat)
    own.write_text("0::/system.slice/n.service\n")
    found = main_memory(root, own)
    assert (found.available, found.total) == (40 * MIB, 60 * MIB)
    group(root / "system.slice", memory_current=f"{89 * MIB}\n")
    assert main_memory(root, own).available == MIB, "its neighbours have taken the rest"
    group(root / "system.slice", memory_current=f"{99 * MIB}\n")
    assert main_memory(root, own).available == 0


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path, own: Path) -> None:
    folder = tmp_path / "cgroup/memory/docker/x"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{60 * MIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{20 * MIB}\n")
    own.write_text("9:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n")
    found = main_memory(tmp_path / "cgroup", own)
    assert (found.available, found.total) == (40 * MIB, 60 * MIB)


def test_what_a_node_takes_is_measured_on_it(tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group(tmp_path / "cgroup", memory_max=f"{64 * MIB}", memory_current=f"{4 * MIB}")
    monkeypatch.setattr(process_limits.main_memory, "__defaults__", (tmp_path / "cgroup", own))
    assert free_bytes(torch.device("cpu")) == 60 * MIB
