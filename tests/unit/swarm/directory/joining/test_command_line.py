"""An invite stands wherever a swarm is meant: in position or after --join, in every command that joins one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

import client.cli
import node.cli
import swarm.cli
from swarm.base.version import VERSION
from swarm.directory.joining.command_line import read_command, with_join

INVITE = "canopy://2AbCd"
PROGRAMS: dict[str, Mapping[str, type]] = {
    "client": client.cli.COMMANDS,
    "node": node.cli.COMMANDS,
    "swarm": swarm.cli.COMMANDS,
}
NEEDED: dict[str, list[str]] = {"swarm plan": ["--num-layers", "3"], "client train-draft": ["org/m", "--out", "f"]}
"""Words without which a command cannot be read."""
JOINING = [
    f"{program} {name}"
    for program, commands in PROGRAMS.items()
    for name, command in commands.items()
    if {"join", "serve"} & set(command.__dataclass_fields__)  # type: ignore[attr-defined]
]


def read(line: str, *words: str, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401 - one of the commands
    program, name = line.split()
    monkeypatch.setattr("sys.argv", [program, name, *words])
    command = read_command(program, "", PROGRAMS[program])
    return getattr(command, "serve", command)


def test_all_commands_that_join_are_known() -> None:
    assert len(JOINING) == 16


@pytest.mark.parametrize("line", JOINING)
def test_an_invite_needs_no_option(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = NEEDED.get(line, [])
    plain = read(line, *needed, "--join", INVITE, monkeypatch=monkeypatch)
    assert plain.join == (INVITE,)
    assert read(line, INVITE, *needed, monkeypatch=monkeypatch) == plain
    assert read(line, *needed, INVITE, monkeypatch=monkeypatch) == plain
    assert read(line, *needed, f"--join={INVITE}", monkeypatch=monkeypatch) == plain


def test_it_stands_beside_a_model_and_between_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in ([INVITE, "org/m"], ["org/m", INVITE], ["org/m", "--stats", INVITE], ["--no-lookup", INVITE, "org/m"]):
        told = read("client generate", *words, "--prompt", "Hello", monkeypatch=monkeypatch)
        assert (told.model, told.join, told.prompt) == ("org/m", (INVITE,), "Hello")
    told = read("swarm top", "--once", INVITE, "--join", "/ip4/1", monkeypatch=monkeypatch)
    assert (told.once, told.join) == (True, (INVITE, "/ip4/1"))


def test_what_an_option_is_given_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    told = read("client generate", "org/m", "--prompt", INVITE, "--max-new-tokens", "3", monkeypatch=monkeypatch)
    assert (told.prompt, told.join) == (INVITE, ())


def test_a_command_that_joins_nothing_takes_none() -> None:
    assert with_join([INVITE], node.cli.COMMANDS["files"]) == [INVITE]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_version_is_told(program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", [program, "--version"])
    with pytest.raises(SystemExit, match=re.compile("^$|None")):
        read_command(program, "", PROGRAMS[program])
    assert capsys.readouterr().out == f"{program} {VERSION}\n"
