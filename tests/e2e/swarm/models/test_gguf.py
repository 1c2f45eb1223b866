"""A GGUF file, of a user or on the hub: nodes serve it, a client writes the text that Hugging Face's class writes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import client.cli
from client.base.options import Options
from client.base.target import load_target
from client.terminal.commands import Generate
from tests.e2e.programs import program, serve
from tests.fake_hub import FakeHub, Repo, fake_hub, use_hub
from tests.forked.program import SMALL_PARTS_NODE
from tests.model.gguf_files import TinyGguf

PROMPT = "It was a dark night"
TOKENS = 24


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def own_text(made: TinyGguf, path: Path) -> str:
    """What the class itself writes."""
    tokenizer = load_target(path).tokenizer
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    model: Any = made.model
    written = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=1, pad_token_id=0)[0]
    return str(tokenizer.decode(written[ids.shape[1] :], skip_special_tokens=True))


def test_a_node_serves_a_file_and_a_client_writes_its_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = TinyGguf.of("qwen3", "qwen3")
    path = made.write(tmp_path / "Tiny-Q4_K_M.gguf")
    expected = own_text(made, path)
    arguments = [one for one in serve(path, "0-3", "", tmp_path) if one not in ("--join", "")]
    arguments += ["--dtype", "float32"]  # the file's own values
    with program(arguments, tmp_path / "node.log") as node:
        node.wait_for(r"serving at \S+")
        join = node.wait_for(r"/ip4/127\.0\.0\.1/tcp/\S+")
        options = Options(temperature=0.0, max_new_tokens=TOKENS)
        command = Generate(model=str(path), prompt=PROMPT, join=(join,), options=options)
        capfd.readouterr()
        assert client.cli.run(command) == 0
        shown = capfd.readouterr().out
        said = node.log.read_text()
        assert node.end(signal.SIGTERM) == (0, [])
    assert "layers 0…2 of 3 as float32 with weights in gguf on cpu" in said
    assert len(expected) > TOKENS // 2
    assert shown.rstrip("\n").removeprefix(PROMPT) == expected.rstrip("\n")


def test_two_nodes_fetch_the_bytes_of_their_layers_and_a_client_writes_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made = TinyGguf.of("qwen3", "qwen3")
    path = made.write(tmp_path / "Tiny-Q4_K_M.gguf")
    expected, size = own_text(made, path), path.stat().st_size
    with fake_hub() as hub:
        hub.repos["org/Tiny-GGUF"] = Repo({path.name: path.read_bytes()})
        use_hub(hub.url, tmp_path / "hub", monkeypatch)
        monkeypatch.setenv("CANOPY_TEST_HUB", hub.url)  # HF_ENDPOINT is read at an import, which forked nodes share
        monkeypatch.setenv("CANOPY_TEST_HUB_CACHE", str(tmp_path / "hub"))
        model = "org/Tiny-GGUF:Q4_K_M"
        first, second = (serve(model, layers, "", tmp_path) for layers in ("0-1", "1-3"))
        with program(
            [SMALL_PARTS_NODE, *(one for one in first[1:] if one not in ("--join", ""))], tmp_path / "first.log"
        ) as one:
            join = one.wait_for(r"/ip4/127\.0\.0\.1/tcp/\S+")
            second[second.index("")] = join
            with program([SMALL_PARTS_NODE, *second[1:]], tmp_path / "second.log") as other:
                for node in (one, other):
                    node.wait_for(r"serving at \S+")
                options = Options(temperature=0.0, max_new_tokens=TOKENS)
                capfd.readouterr()
                assert client.cli.run(Generate(model=model, prompt=PROMPT, join=(join,), options=options)) == 0
                shown = capfd.readouterr().out
            said = one.log.read_text() + other.log.read_text()
        fetched = [end - start for start, end in data_ranges(hub, path.name, size)]
    assert shown.rstrip("\n").removeprefix(PROMPT) == expected.rstrip("\n")
    assert said.count(f"of {path.name} only the bytes of these layers are fetched") == 2
    assert len(fetched) > 1
    assert sum(fetched) <= size, "no byte comes twice"


def data_ranges(hub: FakeHub, file: str, size: int) -> list[tuple[int, int]]:
    """Ranges of a file that were asked for, without its beginning, which is read for the header."""
    asked = [one.removeprefix("bytes=").split("-") for one in hub.ranges(file) if one]
    return [(int(start), int(end) + 1) for start, end in asked if (int(start), int(end) + 1) != (0, size)]
