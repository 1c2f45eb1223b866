"""The runner of benchmarks: every name runs something, and every table belongs to a name."""

from __future__ import annotations

import ast
import io
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.__main__ import PARTS, PROGRAMS, main, module_of, names, show_all, summary_of
from benchmarks.sheet import PAGES, RESULTS, ROOT, page_of
from swarm.base.cli import make_console

LINE = 92
"""Characters that fit a line beside a name."""


def source(name: str) -> Path:
    spec = find_spec(module_of(name))
    assert spec is not None, f"{name}: {module_of(name)} is no module"
    assert spec.origin is not None
    return Path(spec.origin)


def tables() -> set[str]:
    """Names of all tables that benchmarks make."""
    return {part for name in names() for part in PARTS.get(name, (name,))}


def owner(table: str) -> str:
    """The benchmark that makes a table."""
    return next(name for name in names() if table in PARTS.get(name, (name,)))


def marked() -> set[str]:
    """Tables that the pages hold."""
    return {found for page in PAGES.glob("*.md") for found in re.findall(r"<!-- (\w+): begin -->", page.read_text())}


def test_a_name_is_a_module_with_a_main() -> None:
    for name in names():
        tree = ast.parse(source(name).read_text())
        assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body), name


def test_its_docstring_begins_with_one_sentence_on_a_line() -> None:
    for name in names():
        text = summary_of(name)
        assert text[-1:] in set("?."), name
        assert len(re.findall(r"[?.:](?:\s|$)", text.replace(": Petals'", ""))) == 1, name
        assert len(text) <= LINE, name


def test_every_program_of_the_folder_is_listed() -> None:
    listed = {source(name) for name in names()}
    programs = {path for path in (ROOT / "benchmarks").rglob("*.py") if "tyro.cli(" in path.read_text()}
    assert len(programs) > 15
    assert programs <= listed


def test_every_record_and_every_table_of_the_pages_belongs_to_a_name() -> None:
    assert set(PARTS) <= set(names())
    recorded = {path.stem for path in RESULTS.glob("*.json")}
    assert len(recorded) > 20
    assert recorded <= tables()
    assert marked() == recorded


def test_a_table_stands_in_a_page_of_its_folder() -> None:
    for table in sorted(marked()):
        room = module_of(owner(table)).split(".")[1]
        assert page_of(table).stem.partition("-")[0] == room, table


def test_the_index_has_a_claim_with_its_command_for_every_benchmark_that_records() -> None:
    index = (PAGES / "index.md").read_text()
    said = set(re.findall(r"\| `python -m benchmarks (\w+)` \|", index))
    assert said == {name for name in names() if set(PARTS.get(name, (name,))) <= marked()}


def test_a_section_has_its_question_and_its_command() -> None:
    for table in sorted(marked()):
        name = owner(table)
        text = page_of(table).read_text().partition(f"<!-- {table}: begin -->")[0]
        section = text[text.rindex("\n## ") :]
        assert f"\n\n{summary_of(name)}\n\n" in section, table
        assert f"python -m benchmarks {name} --record`" in section, table


def test_the_list_has_one_line_per_benchmark() -> None:
    out = io.StringIO()
    show_all(make_console(out))
    lines = [line.strip() for line in out.getvalue().splitlines()]
    width = max(map(len, names()))
    for name in names():
        assert [line for line in lines if line.startswith(f"{name} ")] == [f"{name:<{width}}  {summary_of(name)}"]
    assert len(lines) == len(PROGRAMS) + len(names()) + 2


def test_a_wrong_name_says_the_near_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "wide_aera", "--record"])
    with pytest.raises(SystemExit, match=r"no benchmark is called wide_aera; did you mean wide_area\?"):
        main()


def test_a_name_that_is_like_no_other_says_how_to_list_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "zzz"])
    with pytest.raises(SystemExit, match=r"called zzz \(python -m benchmarks lists them\)"):
        main()
