"""`client api --for PROGRAM`: the configuration is that of the server that runs, in the form that the program reads."""

from __future__ import annotations

import gc
import json
import shlex
import tomllib
from collections.abc import Iterator
from typing import get_args

import pytest
import yaml

from client.api.app import build_app
from client.api.context import ApiSettings
from client.cli import run
from client.terminal.commands import ApiCommand
from client.terminal.setups import ProgramName, ServerModel, setup
from tests.api_server import served
from tests.scripted_backend import ScriptedBackend, saying

KEY = "sk-long-enough"
MODEL = ServerModel("http://127.0.0.1:8000", 'a "b" $c', 4_000)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served(build_app(ScriptedBackend(saying("Hello")), ApiSettings(keys=(KEY,)))) as url:
        yield int(url.rpartition(":")[2])


@pytest.mark.parametrize("program", get_args(ProgramName))
def test_every_program_is_told_of_the_server_that_runs(
    port: int, program: ProgramName, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CANOPY_API_KEY", KEY)
    assert run(ApiCommand(program=program, port=port)) == 0
    told = capsys.readouterr().out
    assert f"http://127.0.0.1:{port}" in told
    assert "demo-model" in told
    assert "CANOPY_API_KEY" in told
    assert KEY not in told


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (ApiCommand(program="codex", port=1), "no `client api` answers at http://127.0.0.1:1; start it first"),
        (ApiCommand(program="codex", api_key=("sk-another",)), "answers 401; give its key with --api-key"),
    ],
)
def test_a_server_that_does_not_answer_is_named(
    port: int, command: ApiCommand, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CANOPY_API_KEY", raising=False)
    asked = command if command.port == 1 else ApiCommand(program="codex", api_key=command.api_key, port=port)
    assert run(asked) == 1
    assert why in capsys.readouterr().err
    gc.collect()  # a connection that is left open fails this test


def test_codex_s_is_toml() -> None:
    told = tomllib.loads(setup("codex", MODEL))
    provider = told["model_providers"][told["model_provider"]]
    assert (told["model"], told["model_context_window"]) == (MODEL.name, 4_000)
    assert (provider["base_url"], provider["wire_api"]) == ("http://127.0.0.1:8000/v1", "responses")
    assert (provider["auth"]["command"], provider["auth"]["args"]) == ("echo", ["none"])


def test_claude_code_s_is_shell() -> None:
    lines = [shlex.split(line, comments=True) for line in setup("claude", MODEL).splitlines()]
    variables = dict(words[1].split("=", 1) for words in lines if words)
    assert variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8000"
    assert variables["ANTHROPIC_MODEL"] == variables["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == MODEL.name


@pytest.mark.parametrize("program", ["zed", "opencode"])
def test_editors_are_json(program: ProgramName) -> None:
    comment, _, text = setup(program, MODEL).partition("\n")
    assert comment.startswith("// ")
    assert MODEL.name in str(json.loads(text))


def test_continue_s_is_yaml() -> None:
    (model,) = yaml.safe_load(setup("continue", MODEL))["models"]
    assert (model["model"], model["apiBase"]) == (MODEL.name, "http://127.0.0.1:8000/v1")
