"""A GGUF file as a user has it: a node serves it, a client writes the text that Hugging Face's class writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import client.cli
from client.options import Options
from client.target import load_target
from client.terminal.commands import Generate
from tests.e2e.programs import program, serve
from tests.model.gguf_files import TinyGguf

PROMPT = "It was a dark night"
TOKENS = 24


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_node_serves_a_file_and_a_client_writes_its_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = TinyGguf.of("qwen3", "qwen3")
    path = made.write(tmp_path / "Tiny-Q4_K_M.gguf")
    tokenizer = load_target(path).tokenizer
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    model: Any = made.model
    written = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=1, pad_token_id=0)[0]
    expected = str(tokenizer.decode(written[ids.shape[1] :], skip_special_tokens=True))
    arguments = [one for one in serve(path, "0-3", "", tmp_path) if one not in ("--join", "")]
    with program(arguments, tmp_path / "node.log") as node:
        node.wait_for(r"serving at \S+")
        join = node.wait_for(r"/ip4/127\.0\.0\.1/tcp/\S+")
        options = Options(temperature=0.0, max_new_tokens=TOKENS)
        command = Generate(model=str(path), prompt=PROMPT, join=(join,), options=options)
        capfd.readouterr()
        assert client.cli.run(command) == 0
        shown = capfd.readouterr().out
        said = node.log.read_text()
    assert "layers 0…2 of 3 as float32 with weights in gguf on cpu" in said
    assert len(expected) > TOKENS // 2
    assert shown.rstrip("\n").removeprefix(PROMPT) == expected.rstrip("\n")
