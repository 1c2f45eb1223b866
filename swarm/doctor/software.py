"""What is installed: Python, the libraries that Canopy needs, and hivemind's p2p daemon."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Awaitable, Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from swarm.doctor.ladder import Diagnoses, Diagnosis, ok, trouble, unknown
from swarm.doctor.processes import Ran, run_program
from swarm.runtime.version import VERSION

PACKAGE: Final = "canopy-swarm"
SHOWN: Final = ("torch", "transformers", "grpcio", "hivemind")
_DAEMON_WORDS: Final = "usage of"
"""What the p2p daemon's help begins with."""


def look_at_packages(
    requirements: Sequence[str], installed: Callable[[str], str | None], python: str, pythons: str
) -> Diagnoses:
    """Whether what is installed is what this release needs: each package that is missing, too old or too new.

    Args:
        requirements: of the package, as its metadata lists them; those of extras are left alone.
        installed: a package's version; None if it is not there.
        python: this Python's version.
        pythons: which Pythons the package runs on.
    """
    found = []
    if python not in SpecifierSet(pythons):
        text = f"Python {python} is not one of those for which Canopy is made ({pythons})"
        found.append(trouble("python", text, "python3.12 -m venv .venv, and install into that"))
    for wanted in map(Requirement, requirements):
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        mend, version = f"pip install '{wanted.name}{wanted.specifier}'", installed(wanted.name)
        if version is None:
            found.append(trouble("package-missing", f"{wanted.name} is not installed", mend))
        elif not wanted.specifier.contains(version, prereleases=True):
            needs = f"this release of Canopy needs {wanted.specifier}"
            found.append(trouble("package-version", f"{wanted.name} {version} is installed, and {needs}", mend))
    shown = ", ".join(f"{name} {installed(name)}" for name in SHOWN if installed(name))
    return found or ok("packages", f"{PACKAGE} {VERSION}, Python {python}, {shown}")


async def look_at_daemon(path: Path | None, run: Callable[[Path], Awaitable[Ran | None]]) -> Diagnosis:
    """Whether hivemind's p2p daemon runs here: it is a program for one kind of processor.

    Args:
        path: of the program; None if hivemind brings none.
        run: starts it with `-help`.
    """
    again = "pip install --force-reinstall --no-deps --no-cache-dir hivemind"
    if path is None:
        return trouble("no-daemon", "hivemind has no p2p daemon: without it there is no directory", again)
    try:
        ran = await run(path)
    except PermissionError:
        return trouble("daemon-closed", "the p2p daemon may not be run", f"chmod u+x {path}, or {again}")
    except OSError as error:
        text = f"the p2p daemon does not run on this machine: {error.strerror or error}"
        mend = "use a machine with Linux on x86-64, or build hivemind's p2pd for this one"
        return trouble("daemon-foreign", text, mend)
    if ran is None:
        return unknown("the p2p daemon did not start in time; the machine may be very busy")
    if _DAEMON_WORDS not in ran.output.lower():
        how = f"signal {-ran.status}" if ran.status < 0 else f"status {ran.status}"
        return trouble("daemon-broken", f"the p2p daemon ended with {how}", again)
    return ok("daemon", "the p2p daemon runs")


def installed_version(name: str) -> str | None:
    """The version of an installed package; None if it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_requirements() -> tuple[list[str], str]:
    """What this release needs, and the Pythons that it runs on."""
    metadata = importlib.metadata.metadata(PACKAGE)
    return importlib.metadata.requires(PACKAGE) or [], metadata["Requires-Python"] or ""


def python_version() -> str:
    """Of this process, such as 3.11.9."""
    return ".".join(map(str, sys.version_info[:3]))


def find_daemon() -> Path | None:
    """Where hivemind keeps its p2p daemon; nothing of hivemind is imported."""
    spec = find_spec("hivemind")
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    return next((path for folder in folders if (path := Path(folder) / "hivemind_cli" / "p2pd").exists()), None)


async def run_daemon(path: Path) -> Ran | None:
    """Let the daemon print its help; raises OSError where the system cannot run it."""
    return await run_program([str(path), "-help"])
