"""Builds are told apart: by the commit, where a version lies between two releases; a release says its number alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.base.source_commit import NOTE, source_commit
from swarm.base.version import build_version, which_side

ONE, OTHER = "0123456789abcdef" * 2 + "01234567", "f" * 40


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The folder of the module in some tree."""
    folder = tmp_path / "tree" / "swarm" / "base"
    folder.mkdir(parents=True)
    return folder


def test_a_version_between_releases_says_its_commit() -> None:
    assert build_version("0.3.0.dev0", ONE) == "0.3.0.dev0+g012345678"
    assert build_version("0.3.0.dev0", None) == "0.3.0.dev0"
    assert build_version("0.3.0", ONE) == "0.3.0"
    assert len(build_version("100.100.100.dev100", ONE)) <= 32, "a record's version has 32 characters"
    assert which_side("0.2.0", "0.3.0.dev0+g012345678") is not None
    assert which_side("0.3.0.dev0+gffffffff", "0.3.0.dev0+g012345678") is None, "nobody can tell which is newer"


@pytest.mark.parametrize("where", ["HEAD", "loose", "packed", "worktree"])
def test_a_checkout_says_its_commit(where: str, here: Path) -> None:
    root = here.parents[1]
    git = root / ".git"
    git.mkdir()
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    match where:
        case "HEAD":
            (git / "HEAD").write_text(f"{ONE}\n")
        case "loose":
            (git / "refs" / "heads").mkdir(parents=True)
            (git / "refs" / "heads" / "main").write_text(f"{ONE}\n")
        case "packed":
            (git / "packed-refs").write_text(
                f"# pack-refs with: peeled\n{OTHER} refs/heads/x/main\n{ONE} refs/heads/main\n"
            )
        case "worktree":
            own = root / "elsewhere" / "worktrees" / "tree"
            own.mkdir(parents=True)
            git.rename(root / "main.git")
            (root / ".git").write_text(f"gitdir: {own}\n")
            (own / "HEAD").write_text("ref: refs/heads/main\n")
            (own / "commondir").write_text("../../../main.git\n")
            (root / "main.git" / "packed-refs").write_text(f"{ONE} refs/heads/main\n")
    assert source_commit(here) == ONE


def test_what_a_build_noted_counts_and_nonsense_does_not(here: Path) -> None:
    assert source_commit(here) is None
    (here.parents[1] / ".git").mkdir()
    assert source_commit(here) is None
    (here / NOTE).write_text(f"{OTHER}\n")
    assert source_commit(here) == OTHER
    (here / NOTE).write_text("a tag")
    assert source_commit(here) is None
