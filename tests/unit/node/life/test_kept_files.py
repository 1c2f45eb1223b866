"""`node files` shows the parts of files that take room here, and deletes those of a model."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from node.life.kept_files import ShowFiles, files
from swarm.base.cli import PlainConsole
from swarm.base.errors import ConfigError
from swarm.files.parts.part_file import PartFile, parts_folder

MB = 1_000_000
FIRST, SECOND = "one/Model-GGUF", "two/Model"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def kept(digit: str, repo: str, name: str, here: int = 2 * MB) -> PartFile:
    """A part of a file of 100 MB, of which the first bytes are here."""
    part = PartFile(digit * 64, 100 * MB)
    with part.locked():
        part.prepare((repo, "c" * 40, name))
        with part.data.open("r+b") as opened:
            opened.write(b"x" * here)
        part.note([(0, here)])
    return part


def said(order: ShowFiles, *, is_serving: bool = False) -> str:
    output = io.StringIO()
    files(order, lambda: is_serving, PlainConsole(file=output, width=200))
    return output.getvalue()


def test_parts_are_shown_with_what_they_take() -> None:
    assert "no part of a file is here; whole files lie in Hugging Face's cache" in said(ShowFiles())
    older = kept("a", FIRST, "model-Q4_K_M.gguf")
    kept("b", SECOND, "model.safetensors")
    os.utime(older.data.with_suffix(".json"), (1, 1))
    rows = [line.split("│")[1:-1] for line in said(ShowFiles()).splitlines() if "Model" in line]
    assert [[cell.strip() for cell in row[:4]] for row in rows] == [
        [SECOND, "model.safetensors", "2.0 MB", "100.0 MB"],
        [FIRST, "model-Q4_K_M.gguf", "2.0 MB", "100.0 MB"],
    ]
    assert f"4.0 MB in {parts_folder()}" in said(ShowFiles())


def test_the_parts_of_one_model_are_deleted_or_all() -> None:
    first, second, third = kept("a", FIRST, "one"), kept("b", SECOND, "two"), kept("c", SECOND, "three")
    assert said(ShowFiles(FIRST)).startswith(f"deleted {FIRST} one: 2.0 MB")
    assert (first.is_here, second.is_here, third.is_here) == (False, True, True)
    assert said(ShowFiles(f"{SECOND}:three")).startswith(f"deleted {SECOND} three")
    assert (second.is_here, third.is_here) == (True, False)
    assert said(ShowFiles("all")).count("deleted") == 1
    assert not [path for path in parts_folder().iterdir() if path.suffix != ".lock"]


def test_what_cannot_be_deleted_is_refused_and_stays() -> None:
    with pytest.raises(ConfigError, match="no part of its files is here; whole files lie in"):
        said(ShowFiles(FIRST))
    part = kept("a", FIRST, "one")
    with pytest.raises(ConfigError, match=f"{SECOND}: no part of its files is here; here are parts of {FIRST}"):
        said(ShowFiles(SECOND))
    with pytest.raises(ConfigError, match="a node runs here and may read its files; stop it first"):
        said(ShowFiles(FIRST), is_serving=True)
    with part.locked():
        assert said(ShowFiles(FIRST)) == f"{FIRST} one stays: another program fetches it\n"
    assert part.is_here


def test_a_part_whose_list_is_damaged_is_shown_and_goes_with_all() -> None:
    part = kept("a", FIRST, "one")
    part.data.with_suffix(".json").write_text("{")
    shown = said(ShowFiles())
    assert "aaaaaaaaaaaa…, its list is damaged" in shown
    assert "2.0 MB" in shown
    assert "deleted" in said(ShowFiles("all"))
    assert not part.data.exists()
