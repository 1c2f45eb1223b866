"""`node install` and `node uninstall` on made-up machines: files by their structure, commands by a record."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import tyro

import node.cli
from node.life.autostart.service import (
    CARRIED,
    GROWING_RESTARTS,
    PROGRAM,
    InstallService,
    ServiceHost,
    ServiceProgram,
    UninstallService,
    arguments,
    install,
    option_fields,
    quoted,
    run_command,
    service_program,
    this_machine,
    uninstall,
    unit_text,
)
from node.model.config import ServeConfig
from swarm.base.cli import plain_words
from swarm.base.errors import ConfigError, SwarmError

SERVE = ServeConfig(layers="0-4", pause_when_busy=True, pause_on_battery=True, quiet_hours="22:00-07:00")
SAMPLE = ServiceProgram(
    ("/opt/a b/bin/swarm-node", "serve", "--name", '50% "$HOME" \\'), {"A": "b % c"}, 30.0, "node …"
)


class Computer:
    """A user's machine whose service manager does what the test says."""

    def __init__(self, home: Path, platform: str = "linux") -> None:
        self.said: list[str] = []
        self.ran: list[tuple[str, ...]] = []
        self.fails: dict[str, tuple[int, str]] = {}
        self.home = home
        self.machine = ServiceHost(platform, home, {}, 1_000, self.run)

    def run(self, command: Sequence[str]) -> tuple[int, str]:
        self.ran.append(tuple(command))
        if command[-1] == "--version":
            return 0, "systemd 252 (252.39-1~deb12u2)\n+PAM"
        return next((answer for word, answer in self.fails.items() if word in command), (0, ""))

    def install(self, config: ServeConfig = SERVE, **order: bool | str) -> list[str]:
        """What is said."""
        self.said, self.ran = [], []
        install(InstallService(config, **order), self.machine, self.said.append)  # type: ignore[arg-type]
        return self.said

    def uninstall(self, **order: bool | str) -> list[str]:
        self.said, self.ran = [], []
        uninstall(UninstallService(**order), self.machine, self.said.append)  # type: ignore[arg-type]
        return self.said

    @property
    def unit(self) -> Path:
        return self.home / ".config/systemd/user/canopy-node.service"

    @property
    def changes(self) -> list[str]:
        """The commands that change something."""
        asking = {"show-environment", "--version"}
        return [" ".join(command) for command in self.ran if not asking & set(command)]


@pytest.fixture
def computer(tmp_path: Path) -> Computer:
    return Computer(tmp_path)


def directives(text: str) -> dict[str, dict[str, list[str]]]:
    """Values by section and name."""
    found: dict[str, dict[str, list[str]]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), defaultdict(list))
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            section[name].append(value)
    return found


def unquoted(words: str) -> list[str]:
    """Words as systemd reads them, which for what `quoted` writes is as a shell would, with its own specifiers."""
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(words)]


def test_the_unit_runs_the_program_makes_way_and_stops_politely() -> None:
    parts = directives(unit_text("canopy-node", SAMPLE, 252))
    service = parts["Service"]
    assert unquoted(service["ExecStart"][0]) == list(SAMPLE.command)
    assert {unquoted(value)[0] for value in service["Environment"]} == {"A=b % c", "PYTHONUNBUFFERED=1"}
    assert parts["Install"] == {"WantedBy": ["default.target"]}
    assert parts["Unit"]["StartLimitIntervalSec"] == ["0"]
    once = {name: value for name, (value, *_) in service.items()}
    assert (once["KillSignal"], once["KillMode"]) == ("SIGTERM", "mixed")
    assert int(once["TimeoutStopSec"]) > SAMPLE.drain_s
    assert (once["Restart"], once["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert int(once["Nice"]) > 0
    assert int(once["CPUWeight"]) < 100
    assert once["IOSchedulingClass"] == "idle"
    assert once["NoNewPrivileges"] == "yes"
    shut = {
        "PrivateDevices",
        "MemoryDenyWriteExecute",
        "DevicePolicy",
        "ProtectSystem",
        "PrivateTmp",
        "SystemCallFilter",
    }
    assert not shut & service.keys(), "a GPU, or a user without namespaces, would not work"


@pytest.mark.parametrize("version", [0, 252, GROWING_RESTARTS])
def test_waits_between_restarts_grow_where_systemd_can(version: int) -> None:
    service = directives(unit_text("canopy-node", SAMPLE, version))["Service"]
    assert ("RestartSteps" in service) == (version >= GROWING_RESTARTS)
    assert int(service["RestartSec"][0]) == (10 if version >= GROWING_RESTARTS else 60)


@pytest.mark.parametrize("word", ["", "a b", '"', "\\", "\\n", "a\nb", "100%", "%h", "'", "ü", "#", ";"])
def test_words_are_quoted(word: str) -> None:
    (read,) = shlex.split(quoted(word))
    assert read.replace("%%", "%").replace("\\n", "\n") == word.replace("\\n", "\n")


@pytest.mark.needs_program("systemd-analyze", "systemd")
def test_the_unit_before_systemd(computer: Computer) -> None:
    computer.install(replace(SERVE, name='50% "$HOME" \\', mqtt="mqtt://u:p%40@h:1"))
    unit = computer.unit
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(computer.home), "HOME": str(computer.home)}
    command = ["systemd-analyze", "verify", "--user", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_installing_writes_enables_starts_and_says_so_in_four_lines(computer: Computer) -> None:
    said = computer.install()
    assert computer.changes == [
        "systemctl --user daemon-reload",
        "systemctl --user enable canopy-node.service",
        "systemctl --user restart canopy-node.service",
        "loginctl enable-linger",
    ]
    assert len(said) == 4
    told = "\n".join(said)
    for words in ("now and at every boot", "on battery", "22:00-07:00", "updates nothing",
                  "journalctl --user -u canopy-node",
                  "node status", "systemctl --user stop canopy-node", "node uninstall"):  # fmt: skip
        assert words in told
    assert computer.unit.stat().st_mode & 0o077 == 0, "a password may be in it"


def test_installing_again_restarts_only_what_is_new(computer: Computer) -> None:
    computer.install()
    before = computer.unit.read_bytes()
    assert computer.install()[0].startswith("installed already, and unchanged")
    assert computer.unit.read_bytes() == before
    assert "systemctl --user start canopy-node.service" in computer.changes
    assert not [command for command in computer.changes if "restart" in command]
    assert computer.install(replace(SERVE, port=31_338))[0].startswith("installed: ")
    assert "systemctl --user restart canopy-node.service" in computer.changes
    assert b'"--port" "31338"' in computer.unit.read_bytes()


def test_several_nodes_have_services_of_their_own(computer: Computer) -> None:
    computer.install()
    computer.install(replace(SERVE, port=31_340), service="second")
    assert {path.name for path in computer.unit.parent.iterdir()} == {"canopy-node.service", "second.service"}
    computer.uninstall(service="second")
    assert {path.name for path in computer.unit.parent.iterdir()} == {"canopy-node.service"}


def test_where_lingering_is_denied_it_starts_at_login_and_the_line_is_told(computer: Computer) -> None:
    computer.fails["enable-linger"] = (1, "Could not enable linger: Access denied")
    assert "when you log in; for every boot: sudo loginctl enable-linger $USER" in computer.install()[0]
    assert "loginctl" not in " ".join([*computer.install(linger=False), *computer.changes])


def test_a_dry_run_prints_and_changes_nothing(computer: Computer) -> None:
    said = computer.install(dry_run=True)
    assert computer.changes == []
    assert not computer.unit.exists()
    assert str(computer.unit) in said[0]
    assert directives(said[0].partition("\n")[2])["Service"]["Type"] == ["exec"]
    assert said[1:] == [
        *("$ systemctl --user daemon-reload", "$ systemctl --user enable canopy-node.service"),
        *("$ systemctl --user restart canopy-node.service", "$ loginctl enable-linger"),
    ]
    computer.install()
    assert computer.uninstall(dry_run=True)[0] == "$ systemctl --user disable --now canopy-node.service"
    assert computer.changes == []
    assert computer.unit.exists()


def test_uninstalling_stops_and_removes_and_again_is_harmless(computer: Computer) -> None:
    computer.install()
    (said,) = computer.uninstall()
    assert said.startswith("removed: canopy-node has stopped")
    assert computer.changes == ["systemctl --user disable --now canopy-node.service", "systemctl --user daemon-reload"]
    assert not computer.unit.exists()
    (said,) = computer.uninstall()
    assert said.startswith("there is no service canopy-node to remove")
    assert computer.changes == []


def refusal(computer: Computer, config: ServeConfig = SERVE, **order: bool | str) -> str:
    """The one line with which an installation is refused; nothing was changed."""
    with pytest.raises(SwarmError) as caught:
        computer.install(config, **order)
    assert "\n" not in str(caught.value)
    assert not computer.unit.exists()
    return str(caught.value)


def test_options_are_checked_before_anything_is_written(computer: Computer) -> None:
    assert "--quiet-hours" in refusal(computer, replace(SERVE, quiet_hours="late"))
    assert "start-end" in refusal(computer, replace(SERVE, layers="4"))
    assert "--service" in refusal(computer, service="../evil")
    assert computer.ran == []


def test_without_systemd_or_its_user_manager_or_as_root_it_is_one_line(computer: Computer) -> None:
    computer.fails["show-environment"] = (127, "no such program")
    assert "no systemd" in refusal(computer)
    computer.fails["show-environment"] = (1, "Failed to connect to bus: No medium found\nmore")
    said = refusal(computer)
    assert "Failed to connect to bus: No medium found)" in said
    assert "su or sudo" in said
    computer.machine = replace(computer.machine, user_id=0)
    assert "this is root" in refusal(computer)
    computer.machine = replace(computer.machine, platform="sunos5", user_id=1)
    assert "no service for sunos5" in refusal(computer)


def test_a_home_that_cannot_be_written_is_one_line(computer: Computer) -> None:
    (computer.home / ".config").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=r"canopy-node\.service cannot be (read|written): Not a directory"):
        computer.install()


def test_somebody_elses_file_is_left_alone(computer: Computer) -> None:
    computer.unit.parent.mkdir(parents=True)
    computer.unit.write_text("[Service]\n")
    for act in (computer.install, computer.uninstall):
        with pytest.raises(ConfigError, match="was not written by `node install`"):
            act()
        assert computer.changes == []
    assert computer.unit.read_text() == "[Service]\n"


@pytest.mark.parametrize("was_there", [False, True])
def test_what_cannot_be_started_leaves_everything_as_it_was(was_there: bool, computer: Computer) -> None:
    if was_there:
        computer.install()
    before = computer.unit.read_bytes() if was_there else None
    computer.fails["restart"] = (1, "Job for canopy-node.service failed.\nSee journalctl")
    with pytest.raises(ConfigError, match=r"restart canopy-node.service failed: Job for canopy-node.service failed\.$"):
        computer.install(replace(SERVE, port=31_338))
    assert (computer.unit.read_bytes() if computer.unit.exists() else None) == before


def test_a_command_that_is_missing_or_fails_has_a_status() -> None:
    assert run_command(["/no/such/program"])[0] == 127
    assert run_command(["sh", "-c", "echo out; echo err >&2; exit 3"]) == (3, "out\nerr")


FAKE = """#!/bin/sh
echo "$@" >> "$FAKE_LOG"
case "$*" in --version) echo "systemd 252 (252)";; esac
"""


def test_a_user_installs_and_uninstalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line as it is typed, with a systemctl and a loginctl that only write down what they are told."""
    tools, log = tmp_path / "bin", tmp_path / "log"
    tools.mkdir()
    for name in ("systemctl", "loginctl"):
        (tools / name).write_text(FAKE)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("CANOPY_MQTT", "mqtt://user:secret@broker:1883")
    monkeypatch.setattr(os, "geteuid", lambda: 1_000)

    def type_in(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["node", *words])
        with pytest.raises(SystemExit) as end:
            node.cli.main()
        said = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, said.out, said.err

    status, out, err = type_in("install", "org/model", "--layers", "0-4", "--max-mbit", "20", "--no-pause-on-battery")
    assert (status, err) == (0, "")
    assert len(out.splitlines()) == 4
    unit = tmp_path / "config/systemd/user/canopy-node.service"
    (start,) = directives(unit.read_text())["Service"]["ExecStart"]
    words = unquoted(start)
    assert words[words.index("serve") :] == [
        *("serve", "org/model", "--layers", "0-4", "--pause-when-busy", "--max-mbit", "20"),
    ]
    assert '"CANOPY_MQTT=mqtt://user:secret@broker:1883"' in unit.read_text()
    assert "secret" not in out
    assert log.read_text().splitlines()[-3:] == [
        *("--user enable canopy-node.service", "--user restart canopy-node.service", "enable-linger"),
    ]
    assert type_in("uninstall")[0] == 0
    assert not unit.exists()
    status, out, err = type_in("install", "--layers", "4-2")
    assert (status, out, len(err.splitlines())) == (1, "", 1)


def test_this_machine_is_this_one() -> None:
    machine = this_machine("linux", {"A": "b"})
    assert (machine.home, machine.user_id) == (Path.home(), os.geteuid())
    assert machine.run(["true"]) == (0, "")


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
        if field.name == "more":
            changed["model"] = "the/first"
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
