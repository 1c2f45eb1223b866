"""Troubles of what is installed, each planted: another Python, old packages, a daemon that does not run."""

from __future__ import annotations

import sys
from pathlib import Path

from swarm.doctor.ladder import Diagnoses
from swarm.doctor.machine import (
    find_daemon,
    installed_version,
    look_at_daemon,
    look_at_packages,
    package_requirements,
    python_version,
    run_daemon,
)
from tests.one_diagnosis import assert_ok, assert_trouble, assert_unknown, ready

NEEDED = ["grpcio<2,>=1.85", "torch<3,>=2.6", 'amqtt>=0.12; extra == "health"', 'tomli; python_version < "3.0"']
INSTALLED = {"grpcio": "1.85.0", "torch": "2.6.0+cu126"}


def versions(python: str = "3.12.1", **installed: str) -> Diagnoses:
    return look_at_packages(NEEDED, (INSTALLED | installed).get, python, ">=3.11")


async def test_a_package_that_is_too_old_or_missing() -> None:
    mend = "pip install 'grpcio<2,>=1.85'"
    await assert_trouble(versions(grpcio="1.60.0"), "package-version", "grpcio 1.60.0 is installed", mend)
    check = look_at_packages(NEEDED, {"torch": "2.6.0"}.get, "3.12.1", ">=3.11")
    await assert_trouble(check, "package-missing", "grpcio is not installed", mend)
    await assert_ok(versions(), "packages")


async def test_a_python_that_is_too_old() -> None:
    await assert_trouble(versions("3.10.4"), "python", "Python 3.10.4 is not one of those", "python3.12 -m venv")


async def test_this_installation_is_sound() -> None:
    requirements, pythons = package_requirements()
    assert len(requirements) > 10
    await assert_ok(look_at_packages(requirements, installed_version, python_version(), pythons), "packages")


def program(folder: Path, text: str, mode: int = 0o755) -> Path:
    file = folder / "p2pd"
    file.unlink(missing_ok=True)
    file.write_text(text)
    file.chmod(mode)
    return file


async def test_a_daemon_that_does_not_run_here(tmp_path: Path) -> None:
    again = "pip install --force-reinstall"
    foreign = program(tmp_path, "\x7fELF of another processor")
    await assert_trouble(look_at_daemon(foreign, run_daemon), "daemon-foreign", "Exec format error", "Linux on x86-64")
    crashing = program(tmp_path, "#!/bin/sh\nkill -ILL $$\n")
    await assert_trouble(look_at_daemon(crashing, run_daemon), "daemon-broken", "ended with signal 4", again)
    odd = program(tmp_path, "#!/bin/sh\nexit 3\n")
    await assert_trouble(look_at_daemon(odd, run_daemon), "daemon-broken", "ended with status 3", again)
    closed = program(tmp_path, "#!/bin/sh\n", 0o644)
    await assert_trouble(look_at_daemon(closed, run_daemon), "daemon-closed", "may not be run", "chmod u+x")
    await assert_trouble(look_at_daemon(None, run_daemon), "no-daemon", "no p2p daemon", again)
    await assert_unknown(look_at_daemon(closed, ready(None)), "did not start in time")


async def test_the_daemon_runs_here() -> None:
    path = find_daemon()
    assert path is not None
    assert str(path).startswith(sys.prefix)
    await assert_ok(look_at_daemon(path, run_daemon), "daemon")
