"""`client generate --proof`: what cannot be proved is said before a swarm is joined, and at the end what is lacking."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from client.base.stats import Proof, Result, Stats
from client.cli import _proof_choice, _save_proof
from client.terminal.commands import Generate
from swarm.base.errors import ConfigError

RESULT = Result("text", (1, 2, 3), "length", Stats(3, 1, 0, 0, 1, True, "cpu-float32", 0.1, 0.2, (), ()))


@pytest.fixture
def command(tmp_path: Path) -> Generate:
    return Generate(prompt="it", proof=tmp_path / "text.evidence")


def test_rows_are_added_where_they_are_asked_for(command: Generate) -> None:
    assert _proof_choice(command) == "signed"
    assert _proof_choice(replace(command, proof_rows=True)) == "rows"
    assert _proof_choice(Generate(prompt="it")) == "none"


def test_what_cannot_be_proved_is_refused_at_once(command: Generate, tmp_path: Path) -> None:
    for wrong, reason in (
        (replace(command, hedge=True), "two machines"),
        (replace(command, resume=tmp_path / "begun"), "another session"),
        (replace(command, proof=tmp_path / "nowhere" / "file"), "folder"),
        (replace(command, proof=None, proof_rows=True), "--proof names"),
    ):
        with pytest.raises(ConfigError, match=reason):
            _proof_choice(wrong)


def test_a_file_is_written_and_what_it_lacks_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text.evidence"
    _save_proof(path, replace(RESULT, proof=Proof(b"file", 2, ("Qm",), ("node Qm: did not answer in time",))))
    assert path.read_bytes() == b"file"
    said = capsys.readouterr().err
    assert "node Qm: did not answer in time" in said
    assert "2 of 3 tokens are signed; Qm signed nothing" in said


def test_no_file_is_written_where_machines_contradict_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text.evidence"
    _save_proof(path, replace(RESULT, proof=Proof(b"", problems=("no proof: text: another token",))))
    assert not path.exists()
    assert "no proof" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        _save_proof(tmp_path, replace(RESULT, proof=Proof(b"file", 3)))
