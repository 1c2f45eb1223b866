"""Where a served model may be cut, by its config alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.base.errors import HubError, UnknownModel, UnsupportedModel
from swarm.base.ids import ModelIdentity
from swarm.files import borders, hub
from swarm.files.borders import borders_in, known_borders
from swarm.files.hub import MAX_CONFIG_BYTES, Hub, HubFile, find_config


def identity(name: str, num_layers: int) -> ModelIdentity:
    return ModelIdentity(name, "f" * 64, "c" * 64, "w" * 64, "t" * 64, num_layers)


MODEL = identity("org/shared", 10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"model_type": "gemma3n_text", "num_hidden_layers": 10, "num_kv_shared_layers": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_config_says_which_layers_use_each_others_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = borders_in(folder, MODEL)
    assert found.starts[0] == 0
    assert [span for span in found.together if span.end > 5], "the last five share keys with layers before them"
    monkeypatch.setattr(borders, "find_config", lambda _: folder)
    assert known_borders(MODEL) == found


def test_a_config_of_another_model_says_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModel, match="the config has 10 layers, not 12"):
        borders_in(folder, identity("org/shared", 12))
    (folder / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": "many"}')
    with pytest.raises((UnknownModel, UnsupportedModel)):
        borders_in(folder, MODEL)
    monkeypatch.setattr(borders, "find_config", lambda _: folder)
    assert known_borders(MODEL) is None


def test_no_hub_is_asked_for_a_folders_name_and_none_that_fails_ends_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> Path:
        assert "/" in name
        raise HubError("the hub cannot be reached")

    monkeypatch.setattr(borders, "find_config", fails)
    assert known_borders(MODEL) is None
    assert known_borders(identity("demo-target", 12)) is None


@pytest.mark.parametrize("size", [0, MAX_CONFIG_BYTES + 1, None])
def test_a_config_of_any_size_is_not_fetched(size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {} if size is None else {"config.json": HubFile(size)}
    monkeypatch.setattr(hub, "_open", lambda *_: Hub("org/shared", "c" * 40, tmp_path, files))
    monkeypatch.setattr(Hub, "fetch", lambda *_: pytest.fail("fetched"))
    with pytest.raises(UnsupportedModel, match=r"no config\.json that could be read"):
        find_config("org/shared")
