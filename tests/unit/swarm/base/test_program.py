"""Whatever ends a command is one line with a way out: errors of our own, of files, of libraries, unknown ones."""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

import client.cli
import node.cli
import swarm.cli
from swarm.base.errors import ConfigError
from swarm.base.program import INTERRUPTED, MAX_REPORT, READERS, UNREAD, exit_code, report_path

MAINS = {"client": client.cli.main, "node": node.cli.main, "swarm": swarm.cli.main}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("CANOPY_DEBUG", raising=False)
    return tmp_path


def raising(error: BaseException, *modules: str) -> Callable[[], int]:
    """What fails in the last of these modules, each called by the one before."""

    names: dict[str, object] = {"__name__": modules[-1] if modules else __name__, "error": error}
    exec("def fail(): raise error", names)
    for name in reversed(modules[:-1]):
        names = {"__name__": name, "fail_within": names["fail"]}
        exec("def fail(): return fail_within()", names)
    return cast("Callable[[], int]", names["fail"])


def said_by(run: Callable[[], int], capsys: pytest.CaptureFixture[str]) -> str:
    assert exit_code("node", run) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1, "one line"
    return said


def test_an_error_of_ours_is_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert said_by(raising(ConfigError("do this")), capsys) == "node: do this\n"
    group = ExceptionGroup("tasks", [ValueError("late"), ConfigError("do this")])
    assert said_by(raising(group), capsys) == "node: do this\n"
    assert not report_path("node").exists()


@pytest.mark.parametrize(
    ("error", "modules", "says"),
    [
        (
            KeyError("hqq"),
            ("swarm.files.stored.quantised",),
            "the model's files cannot be read (KeyError: 'hqq'): take",
        ),
        (
            RuntimeError("sizes\ndiffer"),
            ("node.model.loading", "transformers.modeling_utils"),
            r"the model's files cannot be read by transformers (RuntimeError: sizes\ndiffer): take another file",
        ),
        (
            KeyError("x"),
            ("node.session.table",),
            "unexpected error, raised by Canopy (KeyError: 'x'): please report it",
        ),
        (
            ValueError(),
            ("node.life.serve", "grpc.aio"),
            "unexpected error, raised by grpc (ValueError): please report it",
        ),
        (ImportError("libcudart.so"), ("node.life.serve",), "a library cannot be loaded (ImportError: libcudart.so)"),
        (MemoryError(), ("node.model.loading",), "out of memory (MemoryError): end other programs"),
    ],
)
def test_any_other_error_is_one_line_that_names_its_report(
    error: Exception, modules: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = said_by(raising(error, *modules), capsys)
    assert said.startswith(f"node: {says}")
    assert said.endswith(f"; the whole report: {report_path('node')}\n")
    report = report_path("node").read_text(encoding="utf-8")
    assert f"\n{type(error).__name__}" in report
    assert report_path("node").stat().st_mode & 0o077 == 0


def test_a_long_trace_and_long_words_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    said = said_by(raising(ValueError("x" * 1_000_000)), capsys)
    assert len(said) < 800
    assert len(report_path("node").read_text(encoding="utf-8")) < MAX_REPORT + 300


def test_a_debugger_sees_the_trace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CANOPY_DEBUG", "1")
    assert exit_code("node", raising(ValueError("why"))) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last)")
    assert said.splitlines()[-1].startswith("node: unexpected error")


def test_where_no_report_can_be_kept_the_line_says_how_to_see_it(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "state").write_text("no folder")
    assert said_by(raising(ValueError("why")), capsys).endswith("; CANOPY_DEBUG=1 shows the whole report\n")


def test_a_file_that_cannot_be_used_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = said_by(raising(OSError(errno.ENOSPC, "No space left on device", str(home / "f"))), capsys)
    assert said.startswith(f"node: {home}/f: No space left on device: make room on its disk; ")


def test_a_folder_of_another_users_is_named_with_its_mend(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = home / ".config"
    config.mkdir()
    owner = config.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)  # who runs this is somebody else
    said = said_by(raising(PermissionError(errno.EACCES, "Permission denied", str(config / "canopy" / "key"))), capsys)
    assert f'{config} is another user\'s: sudo chown -R "$USER" {config}' in said


def test_ctrl_c_and_a_programs_own_end_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("node", raising(KeyboardInterrupt())) == INTERRUPTED == 130
    assert exit_code("node", raising(SystemExit(2))) == 2
    assert exit_code("node", raising(SystemExit())) == 0
    assert capsys.readouterr().err == ""


def test_a_broken_pipe_that_is_not_the_outputs_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "BrokenPipeError" in said_by(raising(BrokenPipeError(errno.EPIPE, "Broken pipe")), capsys)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["list"]])
def test_a_reader_that_went_away_ends_a_command_without_a_word(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "swarm.cli", *words], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (UNREAD, "")


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("swarm list", "swarm.cli.list_swarms"),
        ("node status", "node.cli.show"),
        ("node serve", "node.cli.with_swarm"),
        ("node doctor", "swarm.doctor.command.run_doctor"),
        ("client chat", "client.cli.with_swarm"),
        ("client demo", "client.tools.demo.command.run"),
    ],
)
def test_every_program_has_the_boundary(
    line: str,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise KeyError("hqq")

    program = line.partition(" ")[0]
    monkeypatch.setattr("sys.argv", line.split())
    monkeypatch.setattr("sys.stdout", sys.stdout)  # the client puts its own in its place
    monkeypatch.setattr(f"{program}.cli.set_up_logging", lambda *_: None)
    monkeypatch.setattr(where, fails)
    with pytest.raises(SystemExit) as end:
        MAINS[program]()
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert "KeyError: 'hqq'" in said
    assert said.startswith(f"{program}: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", READERS)
def test_what_reads_models_is_there(name: str) -> None:
    assert importlib.util.find_spec(name) is not None
