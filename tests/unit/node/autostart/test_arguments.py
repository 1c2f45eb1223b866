"""A service runs what was asked for: every option comes back from its command line, from any folder and any shell."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import tyro

from node.autostart.arguments import CARRIED, PROGRAM, arguments, option_fields, service_program
from node.config import ServeConfig
from swarm.runtime.cli import plain_words

PLAIN = ServeConfig(layers="auto")


def read_back(words: list[str]) -> ServeConfig:
    return tyro.cli(ServeConfig, args=words, registry=plain_words())


def another(field: dataclasses.Field[object]) -> object:
    """A value of an option that is not its default."""
    kind = get_type_hints(ServeConfig)[field.name]
    kinds = {kind, *get_args(kind)}
    if isinstance(field.default, bool):
        return not field.default
    if isinstance(field.default, tuple):
        return ("/ip4/203.0.113.1/tcp/31337/p2p/QmA", "/ip4/203.0.113.2/tcp/31337/p2p/QmB")
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != field.default)
    for own, value in ((Path, Path("/a b")), (int, 7), (float, 0.125)):
        if own in kinds:
            return value
    return "a 'b' \"c\" $HOME %h \\ ü"


@pytest.mark.parametrize("field", option_fields(), ids=lambda field: field.name)
def test_every_option_comes_back(field: dataclasses.Field[object]) -> None:
    try:
        changed: dict[str, Any] = {field.name: another(field)}
        config = dataclasses.replace(PLAIN, **changed)
        assert read_back(arguments(config)) == config
    except SystemExit:
        pytest.fail(f"{field.name}: give `another` a value that this option takes")
    assert arguments(config) != arguments(PLAIN)


def test_a_value_that_looks_like_an_option_stays_a_value() -> None:
    config = dataclasses.replace(PLAIN, name="--help")
    assert read_back(arguments(config)) == config


def test_defaults_are_left_out_so_that_a_later_releases_hold() -> None:
    assert arguments(ServeConfig(layers="0-4")) == ["--layers", "0-4"]


def test_paths_are_absolute_and_a_models_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "model").mkdir()
    config = dataclasses.replace(PLAIN, model="model", identity=Path("key"), offload_folder=Path("~/weights"))
    read = read_back(list(service_program(config, {}).command[2:]))
    assert (read.model, read.identity) == (str(tmp_path / "model"), tmp_path / "key")
    assert read.offload_folder == tmp_path / "home" / "weights"
    assert "org/model" in service_program(dataclasses.replace(PLAIN, model="org/model"), {}).command


def test_a_password_is_in_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    config = dataclasses.replace(PLAIN, mqtt="mqtts://user:secret@broker:8883")
    program = service_program(config, {"HF_TOKEN": "hf_secret", "EDITOR": "vi", "HF_HOME": ""})
    assert "secret" not in " ".join(program.command) + program.shown
    assert {name: program.environment[name] for name in ("CANOPY_MQTT", "HF_TOKEN")} == {
        "CANOPY_MQTT": "mqtts://user:secret@broker:8883",
        "HF_TOKEN": "hf_secret",
    }
    assert program.environment.keys() <= {*CARRIED, "CANOPY_MQTT", "PYTHONPATH"}
    assert program.environment.keys().isdisjoint({"EDITOR", "HF_HOME"})


def test_the_program_is_the_one_of_this_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    program = service_program(PLAIN, {})
    assert program.command[:4] == (str(tmp_path / "python"), "-m", "node.cli", "serve")
    assert (Path(program.environment["PYTHONPATH"]) / "node" / "cli.py").exists()
    (tmp_path / PROGRAM).touch()
    program = service_program(PLAIN, {})
    assert program.command[:2] == (str(tmp_path / PROGRAM), "serve")
    assert "PYTHONPATH" not in program.environment
