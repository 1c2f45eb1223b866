"""What changes a model's fingerprint and what does not; and that a client can compute its part without weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm.base.errors import UnknownModel, UnsupportedModel
from swarm.demo import TARGET
from swarm.files.fingerprint import client_identity, known_identity, model_identity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copied = tmp_path / "demo-target"
    shutil.copytree(TARGET, copied)
    return copied


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.chmod(0o644)
    file.write_text(json.dumps(content, indent=1))


def flip_byte(file: Path, at: int) -> None:
    file.chmod(0o644)
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))


def test_a_copy_is_the_same_model(folder: Path) -> None:
    identity = model_identity(TARGET)
    assert model_identity(folder) == identity
    assert (identity.name, identity.num_layers) == ("demo-target", 12)
    assert len(identity.fingerprint) == 64


def test_volatile_fields_and_layout_of_the_config_say_nothing(folder: Path) -> None:
    edit(folder / "config.json", lambda config: config.update(transformers_version="9.9", _name_or_path="/x"))
    assert model_identity(folder) == model_identity(TARGET)


@pytest.mark.parametrize(
    ("file", "change", "digest"),
    [
        ("config.json", lambda config: config.update(rms_norm_eps=1e-6), "config_digest"),
        ("config.json", lambda config: config.update(dtype="float16"), "config_digest"),
        ("tokenizer.json", lambda tokenizer: tokenizer["added_tokens"].pop(), "tokenizer_digest"),
        ("tokenizer_config.json", lambda settings: settings.update(eos_token="<s>"), "tokenizer_digest"),
    ],
)
def test_what_matters_changes_its_digest_and_the_fingerprint(
    folder: Path, file: str, change: Callable[[dict[str, Any]], object], digest: str
) -> None:
    edit(folder / file, change)
    changed, original = model_identity(folder), model_identity(TARGET)
    names = ("config_digest", "weights_digest", "tokenizer_digest")
    assert [name for name in names if getattr(changed, name) != getattr(original, name)] == [digest]
    assert changed.fingerprint != original.fingerprint


@pytest.mark.parametrize("at", [100, -1, -4000, -700_001], ids=["header", "last byte", "before it", "in the middle"])
def test_other_weights_are_another_model(folder: Path, at: int) -> None:
    weights = folder / "model.safetensors"
    flip_byte(weights, at if at >= 0 else weights.stat().st_size + at)
    changed, original = model_identity(folder), model_identity(TARGET)
    assert original.unlike(changed) == "weights"
    assert changed.fingerprint != original.fingerprint


def test_the_client_needs_no_weights(folder: Path) -> None:
    identity = model_identity(folder)
    (folder / "model.safetensors").unlink()
    assert client_identity(folder) == (identity.name, identity.config_digest, identity.tokenizer_digest)
    assert known_identity(folder) is None
    with pytest.raises(UnsupportedModel, match=r"no model\.safetensors and no model\.safetensors\.index\.json"):
        model_identity(folder)


def test_a_client_knows_weights_that_a_node_of_this_machine_has_read_and_reads_none(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert known_identity(folder) is None
    identity = model_identity(folder)
    assert known_identity(folder) == identity


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"model_type": "dbrx", "n_layers": 7}, 7),
        ({"model_type": "llama"}, 32),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, 32),
    ],
)
def test_how_many_layers_a_model_has_is_read_as_its_class_reads_it(
    folder: Path, config: dict[str, Any], layers: int
) -> None:
    (folder / "config.json").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config))
    assert model_identity(folder).num_layers == layers


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", "{}", "does not say how many layers"),
        ("config.json", '{"model_type": "musicgen"}', "does not say how many layers"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_named(folder: Path, file: str, content: str, message: str) -> None:
    (folder / file).chmod(0o644)
    (folder / file).write_text(content)
    with pytest.raises(UnknownModel, match=f"{file}: {message}"):
        model_identity(folder)


def test_a_model_without_a_tokenizer_is_unknown(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnknownModel, match="a model comes with its tokenizer"):
        client_identity(folder)
