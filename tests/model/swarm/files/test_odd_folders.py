"""Folders of other tools: nothing that a config or a tokenizer says is dropped; what cannot be read is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from client.base.target import load_target
from node.model.checkpoint import open_checkpoint
from swarm.base.errors import SwarmError
from swarm.compute.ragged_batch import load_whole
from swarm.demo import TARGET
from swarm.files.families import why_shorter
from swarm.files.model_config import read_config
from tests.fake_hub import FakeHub, Repo
from tests.property.tiny_tokenizers import byte_fallback, byte_level

QUANTISED: dict[str, dict[str, Any]] = {
    method: {"quantization_config": {"quant_method": method, "bits": 4}}
    for method in (
        "hqq", "auto-round", "torchao", "quanto", "aqlm", "eetq", "higgs", "vptq", "bitnet", "exl2", "exl3", "spqr",
        "quark",
    )
} | {
    "MLX": {"quantization": {"group_size": 64, "bits": 4}},
    "unknown method": {"quantization_config": {"group_size": 64, "bits": 4}},
}  # fmt: skip
READERS: dict[str, Callable[[Path], object]] = {
    "node": open_checkpoint,
    "client": load_target,
    "draft": lambda folder: load_whole(folder, torch.float32),
}
OTHERS = ("client", "draft")
"""Who reads a config as the node does."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(TARGET, tmp_path / "model")


def with_config(folder: Path, **changes: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def refused(read: Callable[[Path], object], folder: Path) -> str:
    with pytest.raises(SwarmError) as caught:
        read(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("method", "reader"), [*((one, "node") for one in QUANTISED), *(("hqq", one) for one in OTHERS)]
)
def test_formats_that_are_not_read_are_refused_by_name_whoever_reads(method: str, reader: str, folder: Path) -> None:
    said = refused(READERS[reader], with_config(folder, **QUANTISED[method]))
    assert f"is quantised ({method}), which is not handled; take the model in 16 bits, or in one of these: " in said


def test_a_text_models_own_format_is_refused_too(folder: Path) -> None:
    with_config(folder, text_config={"quantization_config": {"quant_method": "hqq"}})
    assert "(hqq)" in refused(open_checkpoint, folder)


@pytest.mark.timeout(120)
def test_the_node_command_says_it_in_one_line(folder: Path, tmp_path: Path) -> None:
    with_config(folder, quantization_config={"quant_method": "hqq"})
    options = ["--layers", "0-2", "--host", "127.0.0.1", "--port", "0", "--identity", str(tmp_path / "key")]
    command = [sys.executable, "-m", "node.cli", "serve", str(folder), *options]
    ran = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert "the checkpoint is quantised (hqq), which is not handled" in ran.stderr


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize("reader", ["node", "client"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (nested(50), "config.json is nested deeper than 32 levels"),
        (nested(100_000), "config.json is nested deeper than 32 levels"),
        ("[" * 100_000, "config.json is nested deeper than 32 levels"),
        ("[]", "config.json is no JSON object"),
        ("{", "config.json cannot be read"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "config.json"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "config.json"),
        ('{"model_type": "llama", "num_hidden_layers": 1000000000}', "says num_hidden_layers 1000000000"),
        ('{"model_type": "llama", "vocab_size": -5}', "says vocab_size -5, and a model has 1 to"),
    ],
)
def test_a_config_of_no_model_is_one_line(content: str, said: str, reader: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    assert said in refused(READERS[reader], folder)


@pytest.mark.parametrize("reader", READERS)
def test_an_adapter_names_its_model(reader: str, folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    assert "a PEFT adapter of org/base, which is not run beside a model: merge it" in refused(READERS[reader], folder)
    (folder / "config.json").unlink()
    assert "a PEFT adapter of org/base" in refused(READERS[reader], folder)


def test_an_adapter_on_the_hub_names_its_model_too(hub: FakeHub) -> None:
    adapter = b'{"peft_type": "LORA", "base_model_name_or_path": "org/base"}'
    hub.repos["org/adapter"] = Repo({"README.md": b"#", "adapter_config.json": adapter})
    with pytest.raises(SwarmError, match="a PEFT adapter of org/base, which is not run beside a model"):
        open_checkpoint("org/adapter")


def test_a_window_that_ends_before_the_configs_says_why(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    factors = [1.0] * 16
    rope = {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
    }
    with_config(folder, max_position_embeddings=512, rope_parameters=rope)
    assert load_target(folder).max_positions == 64
    assert (
        "texts end at 64 tokens, not at the 512 that its config names: its rotary embedding (longrope)" in caplog.text
    )
    assert why_shorter(read_config(TARGET, "demo")) is None


def with_tokenizer(folder: Path, tokenizer: Tokenizer, named: str) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named}))
    return folder


@pytest.mark.parametrize(
    ("make", "named"),
    [(byte_level, "GemmaTokenizer"), (byte_level, "T5Tokenizer"), (byte_fallback, "Qwen2Tokenizer")],
)
def test_a_tokenizer_splits_as_its_file_says_whatever_class_it_names(
    make: Callable[[], Tokenizer], named: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = make()
    tokenizer = load_target(with_tokenizer(folder, raw, named)).tokenizer
    text = "It was  a dark night"
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == raw.encode(text, add_special_tokens=False).ids
    assert (
        "tokenizer.json is followed: the class that tokenizer_config.json names splits texts otherwise" in caplog.text
    )


def test_the_right_class_is_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_target(folder)
    assert not caplog.text


def test_words_without_merges_are_no_tokenizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(content))
    said = refused(load_target, folder)
    assert "tokenizer.json has no merges, of which words such as " in said
    assert said.endswith("add the tokenizer.json that the same model has elsewhere")
    del content["model"]["merges"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    refused(load_target, folder)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text('{"a": 0}')
    assert "it has vocab.json without merges.txt" in refused(load_target, folder)


def test_a_template_in_a_file_of_its_own_is_read(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_target(folder).tokenizer.chat_template is None
    (folder / "chat_template.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    assert load_target(folder).tokenizer.chat_template == "{{ messages[0].content }}"
