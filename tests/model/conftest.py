"""The demo pair; a tiny model and a hub that has it, for the tests of what comes from the hub."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import file_download

from benchmarks.drafting.other_tokenizers import byte_level, metaspace, passages, save_speaking
from swarm.compute.ragged_batch import RaggedModel, load_whole
from swarm.demo import DRAFT, TARGET
from tests.fake_hub import MODEL, FakeHub, Repo, fake_hub, use_hub
from tests.model.tiny_models import save_sharded, tiny_model


@pytest.fixture(scope="module")
def target() -> RaggedModel:
    return load_whole(TARGET, torch.float32)


@pytest.fixture(scope="module")
def draft() -> RaggedModel:
    return load_whole(DRAFT, torch.float32)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_sharded(tiny_model("llama"), tmp_path_factory.mktemp("whole"))
    shutil.copy(TARGET / "tokenizer.json", folder)
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


@pytest.fixture
def hub(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as running:
        running.repos[MODEL] = Repo.of(whole)
        use_hub(running.url, tmp_path / "cache", monkeypatch)
        monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda _: None))
        yield running


@pytest.fixture(scope="session", params=["byte_level", "metaspace"])
def foreign_draft(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo draft with another tokenizer: byte-level with other merges, or metaspace."""
    make = {"byte_level": byte_level, "metaspace": metaspace}[request.param]
    return save_speaking(make(passages()), tmp_path_factory.mktemp(request.param))
