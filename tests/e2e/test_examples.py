"""The examples as a user runs them, against a swarm of two nodes on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from swarm.demo import DRAFT, TARGET
from tests.e2e.programs import bootstrap, environment, program, run, serve
from tests.forked.program import SCRIPT

EXAMPLES = Path(__file__).parents[2] / "examples"
OPENING = "It was a dark night, and the old captain"
MYPY = """
[mypy]
strict = true
explicit_package_bases = true
follow_imports = skip
[mypy-client.*,swarm.*]
follow_imports = silent
"""
"""All that the notebook can name is Canopy's; to read torch and transformers too took a minute."""


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a peer."""
    folder = tmp_path_factory.mktemp("swarm")
    with ExitStack() as stack:
        peer = stack.enter_context(bootstrap(folder))
        nodes = [
            stack.enter_context(program(serve(TARGET, span, peer, folder), folder / f"{span}.log"))
            for span in ("0-6", "6-12")
        ]
        for node in nodes:
            node.wait_for("serving at")
        yield peer


def example(folder: Path, name: str, *arguments: str, typed: str = "") -> str:
    """What it prints, run as a file of its own in a folder."""
    shutil.copy(EXAMPLES / name, folder / f"{SCRIPT}.py")
    done = run(SCRIPT, *arguments, folder=folder, typed=typed)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == {"generate.py", "chat.py", "notebook.ipynb"}


def test_a_text_streams(peer: str, tmp_path: Path) -> None:
    said = example(tmp_path, "generate.py", str(TARGET), peer, "--draft", str(DRAFT), "--tokens", "24")
    text, figures = said.split("\n\n")
    assert text.startswith(OPENING)
    assert len(text.split()) > len(OPENING.split()) + 8
    assert float(figures.split()[0]) > 0
    assert float(figures.split()[2]) > 1


def test_a_conversation_has_turns(peer: str, tmp_path: Path) -> None:
    typed = "Where is the captain?\nAnd his ship?\n\n"
    said = example(tmp_path, "chat.py", str(TARGET), peer, "--tokens", "8", typed=typed)
    assert said.count("you: ") == 3
    assert all(len(answer.strip()) > 4 for answer in said.split("you: ")[1:3])


def read_notebook() -> nbformat.NotebookNode:
    path = EXAMPLES / "notebook.ipynb"
    notebook: nbformat.NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    return notebook


@pytest.mark.crossing
def test_the_notebook_runs_from_top_to_bottom(peer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = {"CANOPY_MODEL": str(TARGET), "CANOPY_JOIN": peer, "CANOPY_DRAFT": str(DRAFT)}
    for name, value in {**environment(), **told, "IPYTHONDIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    notebook = read_notebook()
    assert not [cell for cell in notebook.cells if cell.get("outputs")], "outputs are not committed"
    NotebookClient(notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    others = [output for output in outputs if output.get("name") != "stdout"]
    assert [output for output in others if "IProgress not found" not in output.text] == []  # tqdm's, without ipywidgets
    assert "tokens per tree" in "".join(output.text for output in outputs)


@pytest.mark.crossing  # the notebook is run as one
def test_the_notebooks_code_is_typed(tmp_path: Path) -> None:
    notebook = read_notebook()
    code = tmp_path / "notebook.py"
    code.write_text("\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code"))
    rules = tmp_path / "mypy.ini"
    rules.write_text(MYPY)
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(rules), "--cache-dir", os.devnull, str(code)]
    done = subprocess.run(mypy, capture_output=True, text=True, check=False, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stdout
