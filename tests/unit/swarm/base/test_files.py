"""A file is the old one or the new one, is nobody else's to read, and leaves nothing beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarm.base.files import create_file, replace_file


def test_the_new_content_takes_the_old_ones_place_with_its_own_mode(tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_bytes(b"old")
    path.chmod(0o666)
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600

    def write(draft: Path) -> None:
        draft.write_text("newer")

    replace_file(path, write, mode=0o644)
    assert path.read_text() == "newer"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_bytes(b"old")

    def fail(draft: Path) -> None:
        draft.write_bytes(b"half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        replace_file(path, fail)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_must_outlive_a_power_cut_is_on_disk_before_it_takes_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "one", list[bool]()
    monkeypatch.setattr(os, "fsync", lambda _: seen.append(path.exists()))
    replace_file(path, b"new")
    assert seen == []
    path.unlink()
    replace_file(path, b"new", is_durable=True)
    assert seen == [False]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    path = tmp_path / "one"
    path.symlink_to(tmp_path / "elsewhere")
    replace_file(path, b"new")
    assert not path.is_symlink()
    assert (tmp_path / "elsewhere").read_bytes() == b"theirs"


def test_a_file_that_is_there_is_not_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "one"
    create_file(path, b"first", mode=0o400)
    assert path.stat().st_mode & 0o777 == 0o400
    with pytest.raises(FileExistsError):
        create_file(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]
