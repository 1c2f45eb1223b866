"""Finding a model's files, and whether there is room for a span."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import cast

import pytest
import torch

from node.model.checkpoint import check_memory, open_checkpoint
from node.model.span import dissect, load_span
from swarm.base.errors import NotEnoughSpace, UnknownModel, UnsupportedModel
from swarm.base.layers import Span
from swarm.base.process_limits import MainMemory
from swarm.demo import TARGET
from tests.model.tiny_models import save_sharded, tiny_model

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
    layout = dissect(checkpoint.config)
    needed = checkpoint.files(layout.needed(checkpoint.weight_map, Span(2, 4)))
    (sharded / needed[0]).unlink()
    with pytest.raises(UnknownModel, match=f"{needed[0]} is missing"):
        load_span(checkpoint, Span(2, 4), torch.float32)


@pytest.mark.parametrize(
    ("free_gib", "fit"),
    [(11, "5 layers would fit: --layers 4-9"), (3, "1 layer would fit: --layers 4-5"), (0.5, "not one layer")],
)
def test_too_little_memory_says_needs_has_and_what_would_fit(
    free_gib: float, fit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.compute.devices.main_memory", lambda: MainMemory(int(free_gib * GIB), 1 << 60))
    with pytest.raises(
        NotEnoughSpace, match=rf"layers 4…11 need 16.0 GiB of memory, {free_gib:.1f} GiB are free; {fit}"
    ):
        check_memory(Span(4, 12), 16 * GIB, 2 * GIB)
    check_memory(Span(4, 12), int(free_gib * GIB), 2 * GIB)


def test_the_weight_count_of_a_span_needs_no_weights(sharded: Path) -> None:
    for file in sharded.glob("*.safetensors"):
        file.unlink()
    layout = dissect(open_checkpoint(sharded).config)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert 4 * layout.weights_in(Span(0, 6)) == cast("int", index["metadata"]["total_size"])
