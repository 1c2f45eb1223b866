"""A GGUF file as a user has it: nodes serve it, a client writes the text that Hugging Face's class writes."""

from __future__ import annotations

from contextlib import ExitStack
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


def test_nodes_serve_a_file_and_a_client_writes_its_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = TinyGguf.of("qwen3", "qwen3")
    path = made.write(tmp_path / "Tiny-Q4_K_M.gguf")
    tokenizer = load_target(path).tokenizer
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    model: Any = made.model
    written = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=1, pad_token_id=0)[0]
    expected = str(tokenizer.decode(written[ids.shape[1] :], skip_special_tokens=True))
    with ExitStack() as stack:
        join = ""
        for layers in ("0-1", "1-3"):
            arguments = serve(path, layers, join, tmp_path)
            if not join:
                arguments = [one for one in arguments if one not in ("--join", "")]
            node = stack.enter_context(program(arguments, tmp_path / f"{layers}.log"))
            node.wait_for(r"serving at \S+")
            join = join or node.wait_for(r"/ip4/127\.0\.0\.1/tcp/\S+")
        assert "Tiny-Q4_K_M" in node.log.read_text()
        options = Options(temperature=0.0, max_new_tokens=TOKENS)
        command = Generate(model=str(path), prompt=PROMPT, join=(join,), options=options)
        capfd.readouterr()
        assert client.cli.run(command) == 0
        shown = capfd.readouterr().out
    assert len(expected) > TOKENS // 2
    assert shown.rstrip("\n").removeprefix(PROMPT) == expected.rstrip("\n")
