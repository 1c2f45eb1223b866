from __future__ import annotations

from pathlib import Path

import pytest

from node.life.nodejs import explain, find_nodejs


@pytest.mark.parametrize("first", ["x.js", "./build/Server.MJS", "-e", "--eval=1", "-p", "--inspect-brk", "a.cjs"])
def test_node_js_usage_is_explained_in_one_line(first: str) -> None:
    line = explain([first, "more"], "/usr/bin/node")
    assert line is not None
    assert "\n" not in line
    assert "not Node.js" in line
    assert "swarm-node" in line
    assert line.endswith("/usr/bin/node")


def test_says_when_there_is_no_node_js() -> None:
    line = explain(["x.js"])
    assert line is not None
    assert "no Node.js on PATH" in line


@pytest.mark.parametrize("argv", [[], ["serve"], ["serve", "model.js"], ["--help"], ["serve", "-p", "1"]])
def test_our_own_usage_passes(argv: list[str]) -> None:
    assert explain(argv) is None


def _program(folder: Path) -> Path:
    folder.mkdir()
    program = folder / "node"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


def test_finds_the_next_node_on_path(tmp_path: Path) -> None:
    ours, theirs = _program(tmp_path / "ours"), _program(tmp_path / "theirs")
    path = f"{ours.parent}:{tmp_path / 'empty'}:{theirs.parent}"
    assert find_nodejs(ours, path) == str(theirs)
    assert find_nodejs(ours, str(ours.parent)) is None
    assert find_nodejs(ours, "") is None
