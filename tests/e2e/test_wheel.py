"""The wheel holds the three packages with their data and nothing else, and runs from an environment of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from swarm.base.source_commit import NOTE
from tests.forked.program import CACHE

ROOT = Path(__file__).parents[2]
PACKAGES = ("swarm", "node", "client")
BUILD = "import setuptools.build_meta as backend, sys; backend.build_wheel(sys.argv[1])"
EXTRAS = {
    "health": ("swarm", "health", "--embedded-broker"),
    "plot": ("client", "bench", "--plot", "plot.png"),
    "metrics": ("node", "serve", "--layers", "0-4", "--metrics-port", "0"),
}
"""A command of each extra."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel is built from."""
    tree = tmp_path_factory.mktemp("tree")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tree)
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=tree, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an empty environment into which the wheel was installed, without any extra.

    What the wheel requires is not downloaded but linked from the running environment; nothing else is.
    """
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (own,) = (Distribution.at(path) for path in packages.glob("canopy_swarm-*.dist-info"))
    for other in required(own, {}).values():
        for name in {path.parts[0] for path in other.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(Path(str(other.locate_file(name))))
    subprocess.run([*pip, "check"], check=True)
    return folder / "bin"


def required(one: Distribution, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """Adds what a distribution requires without extras, and what that requires, by name."""
    for requirement in wanted(one, frozenset()):
        follow(requirement, found)
    return found


def follow(requirement: Requirement, found: dict[str, Distribution]) -> None:
    name = f"{canonicalize_name(requirement.name)}[{','.join(sorted(requirement.extras))}]"
    if name not in found:
        found[name] = other = distribution(requirement.name)
        for further in wanted(other, frozenset(requirement.extras)):
            follow(further, found)


def wanted(one: Distribution, extras: frozenset[str]) -> Iterator[Requirement]:
    for requirement in map(Requirement, one.requires or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of its programs, far from the checkout."""
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    return subprocess.run(
        [installed / arguments[0], *arguments[1:]],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "XDG_CACHE_HOME": CACHE.name},
        check=False,
    )


def test_the_wheel_is_three_packages_with_types_and_demo_models(tree: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    assert {name.partition("/")[0] for name in packed} == {*PACKAGES, dist_info(wheel)}
    here = {str(path.relative_to(tree)) for name in PACKAGES for path in (tree / name).rglob("*") if path.is_file()}
    assert here == {name for name in packed if ".dist-info/" not in name}
    assert {f"{name}/py.typed" for name in PACKAGES} <= here
    assert {"swarm/demo/demo-target/model.safetensors", "swarm/demo/demo-draft/tokenizer.json"} <= here


def dist_info(wheel: Path) -> str:
    """The folder of a wheel's own metadata."""
    return f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_what_is_built_of_a_checkout_notes_its_commit(tree: Path, tmp_path: Path) -> None:
    """So does what is built of a source archive of it, where no checkout is around any more."""
    checkout = shutil.copytree(tree, tmp_path / "checkout")
    (checkout / ".git").mkdir()
    (checkout / ".git" / "HEAD").write_text(f"{COMMIT}\n")
    build = "import setuptools.build_meta as backend, sys; print(backend.build_sdist(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=checkout, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)],
        cwd=tmp_path / archive.name.removesuffix(".tar.gz"), check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        assert files.read(f"swarm/base/{NOTE}").decode() == COMMIT
    assert not (checkout / "swarm/base" / NOTE).exists(), "a checkout is left as it is"


@pytest.mark.crossing
def test_the_demo_streams_compares_and_leaves_nothing(installed: Path, tmp_path: Path) -> None:
    """As `make demo`, on faster links."""
    done = run(installed, tmp_path, "client", "demo", "--delay-ms", "10")
    assert (done.returncode, done.stderr) == (0, "")
    assert "same text: yes" in done.stdout
    assert "links with 10 ms artificial one-way delay" in done.stdout
    text = re.search(r"It was a dark night[^\n]+", done.stdout)
    assert text is not None
    assert len(text[0].split()) > 40
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    accepted = {row[0]: float(row[3]) for row in cells}
    assert accepted["plain decoding"] == 1.0
    assert accepted["as it comes"] > 1.0, "how much more depends on how large trees the machine's speed allows"
    assert accepted["a tree of 32 at a time"] > 2.0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("program", ["client", "node", "swarm", "swarm-node"])
def test_every_program_says_what_it_can_be_told(installed: Path, tmp_path: Path, program: str) -> None:
    done = run(installed, tmp_path, program, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {program.removeprefix('swarm-')} ")


def test_the_options_of_every_command_are_shown_without_extras(installed: Path, tmp_path: Path) -> None:
    for program, command, *_ in EXTRAS.values():
        done = run(installed, tmp_path, program, command, "--help")
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_command_without_its_extra_says_what_installs_it(installed: Path, tmp_path: Path, extra: str) -> None:
    done = run(installed, tmp_path, *EXTRAS[extra])
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(rf"\w+: .+ needs [\w, ]+: pip install 'canopy-swarm\[{extra}\]'", line)
    assert done.stdout == ""
