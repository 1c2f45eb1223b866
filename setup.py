"""Notes in whatever is built which commit it is of, so that builds between two releases are told apart."""

from __future__ import annotations

import runpy
from collections.abc import Iterable
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

FOLDER = Path("swarm", "base")
_READ = runpy.run_path(str(Path(__file__).parent / FOLDER / "source_commit.py"))


def note(root: str) -> None:
    """Write the commit's hash into a tree that is packed; nothing where none is known."""
    commit = _READ["source_commit"]((Path(__file__).parent / FOLDER).absolute())
    folder = Path(root) / FOLDER
    if commit is not None and folder.is_dir():
        (folder / _READ["NOTE"]).write_text(commit, encoding="ascii")


class BuildPy(build_py):
    """For a wheel; an editable install reads its checkout each time."""

    def run(self) -> None:
        """Copy, then note."""
        super().run()
        if not self.editable_mode:
            note(self.build_lib)


class Sdist(sdist):
    """For a source archive, which has no checkout around it any more."""

    def make_release_tree(self, base_dir: str, files: Iterable[str]) -> None:
        """Copy, then note."""
        super().make_release_tree(base_dir, files)
        note(base_dir)


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist})
