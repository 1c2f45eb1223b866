"""Troubles of the machine, each planted: a full disk, little memory, few files, a bad key file."""

from __future__ import annotations

import os
from collections.abc import Awaitable
from pathlib import Path

import pytest

from swarm.base.process_limits import MainMemory
from swarm.directory.identity import Identity
from swarm.doctor.hub import ModelFacts, facts_of_folder
from swarm.doctor.ladder import Diagnosis
from swarm.doctor.machine import (
    GIB,
    FileSystem,
    file_system_of,
    hard_file_limit,
    look_at_disk,
    look_at_file_limit,
    look_at_folders,
    look_at_identity,
    look_at_memory,
)
from tests.one_diagnosis import assert_hint, assert_ok, assert_trouble, ready
from tests.sample_records import sample_record

NO_MODEL = ready(None)
NO_SWAP = (0, 0)
CACHE = Path("/data/hub")
KEY = Identity.ephemeral()


def disk(system: FileSystem, facts: ModelFacts | None = None) -> Awaitable[Diagnosis]:
    return look_at_disk(CACHE, system, ready(facts))


async def test_a_full_disk() -> None:
    mend = "export HF_HOME="
    await assert_trouble(disk(FileSystem(5 << 20, 10_000, True)), "disk-full", "0.0 GiB is free", mend)
    await assert_trouble(disk(FileSystem(90 * GIB, 0, True)), "disk-full", "no file is free", mend)
    await assert_trouble(disk(FileSystem(90 * GIB, None, False)), "not-writable", "may not write", mend)
    await assert_ok(disk(FileSystem(90 * GIB, None, True)), "room")


async def test_a_model_that_is_larger_than_the_disk_can_be_served_in_part() -> None:
    system = FileSystem(10 * GIB, 1_000, True)
    facts = ModelFacts(total_bytes=20 * GIB, missing_bytes=15 * GIB)
    await assert_hint(disk(system, facts), "model-larger", "15.0 GiB more, 10.0 GiB are free", "--layers START-END")
    await assert_ok(disk(system, ModelFacts(20 * GIB, 5 * GIB)), "room")


def test_a_folder_that_is_not_there_yet_lies_on_the_disk_of_the_one_above(tmp_path: Path) -> None:
    found = file_system_of(tmp_path / "not" / "there")
    assert found.is_writable
    assert found.free_bytes > 0


async def test_too_little_memory() -> None:
    little = look_at_memory(MainMemory(GIB // 2, 2 * GIB), NO_SWAP, NO_MODEL)
    await assert_trouble(little, "little-memory", "0.5 GiB of 2.0 GiB is free", "close other programs")


async def test_a_layer_that_does_not_fit() -> None:
    model = ModelFacts(total_bytes=140 * GIB, missing_bytes=0, num_layers=80)
    check = look_at_memory(MainMemory(5 * GIB, 8 * GIB), NO_SWAP, ready(model))
    await assert_trouble(check, "layer-larger", "one layer of this model takes 3.5 GiB", "--offload")
    await assert_ok(look_at_memory(MainMemory(6 * GIB, 8 * GIB), NO_SWAP, ready(model)), "memory")


async def test_a_machine_that_swaps() -> None:
    check = look_at_memory(MainMemory(4 * GIB, 8 * GIB), (3 * GIB, 4 * GIB), NO_MODEL)
    await assert_hint(check, "swapping", "3.0 GiB of 4.0 GiB of swap is in use", "close other programs")
    await assert_ok(look_at_memory(MainMemory(4 * GIB, 8 * GIB), NO_SWAP, NO_MODEL), "memory")


async def test_few_files() -> None:
    await assert_trouble(look_at_file_limit(256), "few-files", "may open 256 files", "LimitNOFILE=65536")
    await assert_hint(look_at_file_limit(1_024), "some-files", "512 connections", "prlimit --nofile")
    await assert_ok(look_at_file_limit(1 << 20), "files")
    assert hard_file_limit() > 0


async def test_a_damaged_key_file(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    await assert_ok(look_at_identity(path, None), "no-identity")
    KEY.save(path)
    whole = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(whole[:-9])
    await assert_trouble(look_at_identity(path, None), "identity-damaged", "damaged", f"mv {path} {path}.damaged")
    path.write_bytes(whole)
    await assert_ok(look_at_identity(path, None), "identity")


async def test_a_key_file_that_others_can_read(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    KEY.save(path)
    path.chmod(0o644)
    await assert_trouble(
        look_at_identity(path, None), "identity-open", "other users can read the key", f"chmod 600 {path}"
    )


async def test_a_key_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "identity.key").mkdir()
    await assert_trouble(
        look_at_identity(tmp_path / "identity.key", None), "identity-unreadable", "cannot be read", 'chown "$USER"'
    )


async def test_a_key_that_was_copied_to_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    KEY.save(path)
    listed = sample_record(KEY.peer_id)
    await assert_trouble(
        look_at_identity(path, listed), "identity-copied", "another machine serves under this key", f"mv {path}"
    )
    with Identity.load_or_create(path).lock():
        await assert_ok(look_at_identity(path, listed), "identity-in-use")


async def test_folders_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    await assert_ok(look_at_folders((tmp_path / "none" / "canopy", tmp_path)), "own-files")
    (tmp_path / ".config/canopy").mkdir(parents=True)
    (tmp_path / ".config/canopy/swarms.json").write_text("{}")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(os, "access", lambda path, *_, **__: Path(path).name != "swarms.json")
    found = look_at_folders((tmp_path / ".config/canopy",))
    owned = f'sudo chown -R "$USER" {tmp_path}/.config'
    await assert_trouble(found, "files-of-another", "swarms.json: Permission denied", owned)
    monkeypatch.setattr(os, "geteuid", os.getuid)
    found = look_at_folders((tmp_path / ".config/canopy",))
    await assert_trouble(found, "files-of-another", "swarms.json", "chmod u+rwX")


@pytest.mark.parametrize("text_config", [False, True])
def test_a_models_size_is_read_from_its_folder(tmp_path: Path, text_config: bool) -> None:
    config = '{"num_hidden_layers": 4}'
    (tmp_path / "config.json").write_text(f'{{"text_config": {config}}}' if text_config else config)
    (tmp_path / "model.safetensors").write_bytes(bytes(1_000))
    facts = facts_of_folder(tmp_path)
    assert facts == ModelFacts(1_000, 0, 4)
    assert facts.layer_bytes == 500
    (tmp_path / "config.json").write_text("[]")
    assert facts_of_folder(tmp_path).layer_bytes is None
