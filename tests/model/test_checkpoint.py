"""Finding a model's files, and whether there is room for a span."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch

import node.checkpoint
from node.checkpoint import Hub, check_disk, check_memory, open_checkpoint
from node.span import dissect, load_span
from swarm.demo import TARGET
from swarm.errors import NotEnoughSpace, UnknownModel, UnsupportedModel
from swarm.layers import Span
from tests.model.tiny import save_sharded, tiny_model

DiskUsage = namedtuple("DiskUsage", "total used free")
GIB = 2**30


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_sharded(tiny_model("llama"), tmp_path / "whole")


@pytest.mark.parametrize("model", ["/no/such/folder", "./no/such/folder", "not a model", "nobody/has-this-model"])
def test_a_model_that_is_nowhere_is_unknown_in_one_line(model: str) -> None:
    with pytest.raises(UnknownModel, match="^" + model.replace(".", r"\.")) as caught:
        open_checkpoint(model)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_config_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"no config\.json that transformers knows"):
        open_checkpoint(tmp_path)


def test_a_folder_with_other_weights_than_safetensors_is_refused(tmp_path: Path) -> None:
    shutil.copy(TARGET / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(UnsupportedModel, match="only safetensors are read"):
        open_checkpoint(tmp_path)


def test_a_broken_weight_file_is_refused(tmp_path: Path) -> None:
    shutil.copy(TARGET / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        open_checkpoint(tmp_path)


def test_a_missing_file_is_named_before_anything_is_loaded(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    anatomy = dissect(checkpoint.config)
    needed = checkpoint.files(name for name in checkpoint.weight_map if anatomy.holds(name, Span(2, 4)))
    (sharded / needed[0]).unlink()
    with pytest.raises(UnknownModel, match=f"{needed[0]} is missing"):
        load_span(checkpoint, Span(2, 4), torch.float32)


def test_a_hub_model_is_fetched_file_by_file_from_one_commit(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is a folder here: what is asked of it is recorded."""
    away = sharded.parent / "away"
    away.mkdir()
    for file in sharded.glob("*.safetensors"):
        file.rename(away / file.name)
    whole = open_checkpoint(sharded)
    asked: list[tuple[str, str]] = []

    def download(repo: str, file: str, revision: str) -> None:
        asked.append((repo, revision))
        shutil.copy(away / file, sharded / file)

    monkeypatch.setattr(node.checkpoint, "hf_hub_download", download)
    hub = node.checkpoint.Checkpoint("a/b", sharded, whole.config, whole.weight_map, Hub("a/b", "c0ffee"))
    anatomy = dissect(whole.config)
    tensors = [name for name in whole.weight_map if anatomy.holds(name, Span(2, 4))]
    told: list[tuple[str, int, int]] = []
    hub.fetch(tensors, lambda *progress: told.append(progress))
    files = hub.files(tensors)
    assert asked == [("a/b", "c0ffee")] * len(files)
    assert told == [(file, done, len(files)) for done, file in enumerate(files)]
    assert sorted(file.name for file in sharded.glob("*.safetensors")) == files
    hub.fetch(tensors)
    assert len(asked) == len(files), "nothing is fetched twice"


def test_a_hub_id_becomes_a_commit_and_the_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    info = SimpleNamespace(sha="c0ffee", siblings=[SimpleNamespace(rfilename="model.safetensors", size=7)])
    fetched: list[dict[str, Any]] = []

    def snapshot(repo: str, **options: object) -> str:
        fetched.append({"repo": repo, **options})
        return str(TARGET)

    monkeypatch.setattr("node.checkpoint.HfApi.model_info", lambda *_, **__: info)
    monkeypatch.setattr(node.checkpoint, "snapshot_download", snapshot)
    checkpoint = open_checkpoint("org/some-model", revision="main")
    assert checkpoint.hub == Hub("org/some-model", "c0ffee", {"model.safetensors": 7})
    assert (fetched[0]["repo"], fetched[0]["revision"]) == ("org/some-model", "c0ffee")
    assert not any(pattern.endswith((".safetensors", "*")) for pattern in fetched[0]["allow_patterns"])


@pytest.mark.parametrize(("free_gib", "fit"), [(11, "5 layers would fit: --layers 4-9"), (0.5, "not one layer")])
def test_too_little_memory_says_needs_has_and_what_would_fit(
    free_gib: float, fit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=int(free_gib * GIB)))
    with pytest.raises(NotEnoughSpace, match=rf"4-12 need 16.0 GiB of memory, {free_gib:.1f} GiB are free; {fit}"):
        check_memory(Span(4, 12), 16 * GIB, 2 * GIB)
    check_memory(Span(4, 12), int(free_gib * GIB), 2 * GIB)


def test_too_little_disk_counts_only_files_that_are_not_here(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = open_checkpoint(sharded)
    files = sorted(set(whole.weight_map.values()))
    hub = Hub("a/b", "c0ffee", dict.fromkeys(files, 4 * GIB))
    checkpoint = node.checkpoint.Checkpoint("a/b", sharded, whole.config, whole.weight_map, hub)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(100 * GIB, 93 * GIB, 7 * GIB))
    check_disk(checkpoint, Span(0, 6), whole.weight_map)
    for file in files[:2]:
        (sharded / file).unlink()
    with pytest.raises(NotEnoughSpace, match=r"0-6 need 8\.0 GiB of disk, 7\.0 GiB are free"):
        check_disk(checkpoint, Span(0, 6), whole.weight_map)


def test_the_weight_count_of_a_span_needs_no_weights(sharded: Path) -> None:
    for file in sharded.glob("*.safetensors"):
        file.unlink()
    anatomy = dissect(open_checkpoint(sharded).config)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert 4 * anatomy.weights_in(Span(0, 6)) == cast("int", index["metadata"]["total_size"])
