"""Writes requirements.lock: the versions of constraints.txt with the hashes of their files: `python -m tools.lock`.

Needs the program uv (`pip install uv`), which asks the package index for the hashes. torch stays outside: its builds
for CPUs and cards come from other indexes, so each machine takes its own, as the Makefile says.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[1]
CONSTRAINTS: Final = ROOT / "constraints.txt"
LOCK: Final = ROOT / "requirements.lock"
OUTSIDE: Final = frozenset({"torch"})
PYTHON: Final = "3.11.9"
_HEAD: Final = (
    "# Made of constraints.txt by `python -m tools.lock`: pip install --require-hashes --no-deps -r requirements.lock\n"
)
_PINNED: Final = re.compile(r"^([\w.-]+)==([^ ;\\\s]+)", re.MULTILINE)


def pinned(text: str) -> dict[str, str]:
    """Versions by name, of a file of constraints or of a lock."""
    return {canonicalize_name(name): version for name, version in _PINNED.findall(text)}


def markers() -> dict[str, str]:
    """Packages that pyproject.toml wants on some machines only, and the marker that says on which."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [Requirement(one) for extra in project["optional-dependencies"].values() for one in extra]
    return {canonicalize_name(one.name): str(one.marker) for one in wanted if one.marker is not None}


def marked(lock: str) -> str:
    """A lock whose packages are installed where pyproject.toml wants them."""
    where = markers()

    def line(found: re.Match[str]) -> str:
        marker = where.get(canonicalize_name(found[1]))
        return found[0] if marker is None else f"{found[0]} ; {marker}"

    return _PINNED.sub(line, lock)


def main() -> None:
    """Ask for the hashes and write the file."""
    inside = {name: version for name, version in pinned(CONSTRAINTS.read_text()).items() if name not in OUTSIDE}
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in inside.items()), encoding="utf-8")
        command = ["uv", "pip", "compile", "--quiet", "--no-deps", "--generate-hashes", "--no-annotate", "--no-header"]
        done = subprocess.run(
            [*command, "--python-version", PYTHON, str(wanted)], stdout=subprocess.PIPE, text=True, check=False
        )
    if done.returncode:
        sys.exit(done.returncode)
    LOCK.write_text(_HEAD + marked(done.stdout), encoding="utf-8")


if __name__ == "__main__":
    main()
