"""README, design, decisions and glossary against the repository: sizes, order, links, names of files and benchmarks."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Final

from benchmarks.__main__ import module_of

ROOT: Final = Path(__file__).parents[3]
README: Final = ROOT / "README.md"
DESIGN: Final = sorted((ROOT / "docs/design").glob("*.md"))
DECISIONS: Final = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
PAGES: Final = [README, *DESIGN, *DECISIONS, ROOT / "docs/decisions/index.md", ROOT / "docs/glossary.md"]
WORDS, README_LINES, DESIGN_LINES, DECISION_LINES = 80, 120, 110, 60
HISTORY: Final = ("before, it was", "of the moment", "was tried")
SECTIONS: Final = ["Install", "Quick start", "Measured", "How a sweep works", "Join a swarm", "From Python",
                   "What is safe, and what is not", "Map", "More"]  # fmt: skip


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def headings(page: Path) -> list[str]:
    """Those of the second level."""
    return re.findall(r"^## (.+)$", prose(page), re.MULTILINE)


def test_readme_is_short_and_in_order() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= README_LINES
    assert headings(README) == SECTIONS
    for paragraph in re.split(r"\n\s*\n|\n(?=[-|#])", prose(README)):
        assert len(paragraph.split()) <= WORDS, paragraph


def test_readme_names_the_two_commands_and_true_badges() -> None:
    text = README.read_text(encoding="utf-8")
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"demo", "test"} <= set(targets)
    assert "$ make demo" in text
    assert "$ make test" in text
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    badges = dict(re.findall(r"badge/(\w+)-(.+)-blue\)", text))
    assert badges == {
        "licence": project["license"].replace("-", "--"),
        "python": project["requires-python"].removeprefix(">=") + "%2B",
        "version": project["version"],
    }


def test_a_design_page_has_four_parts_on_two_screens() -> None:
    for page in DESIGN:
        assert len(page.read_text(encoding="utf-8").splitlines()) <= DESIGN_LINES, page.stem
        if page.stem != "index":
            assert headings(page) == ["Problem", "Invariant", "Mechanism", "Limits"], page.stem


def test_the_map_shows_the_levels_that_the_linter_keeps() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    levels = [layer.split(" | ") for layer in reversed(contracts[0]["layers"])]
    told: dict[str, list[str]] = defaultdict(list)
    page = (ROOT / "docs/design/index.md").read_text("utf-8")
    for level, room in re.findall(r"^\| (\d+) \| `([\w.]+)` \|", page, re.MULTILINE):
        told[level].append(room)
    assert list(told.values()) == levels


def test_decisions_have_four_parts_and_stand_in_the_index() -> None:
    index = (ROOT / "docs/decisions/index.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", index) == [page.name for page in DECISIONS]
    for number, page in enumerate(DECISIONS, 1):
        assert page.name.startswith(f"{number:04d}-"), page.name
        assert headings(page) == ["Context", "Tried", "Measured", "Decided"], page.name
        assert len(page.read_text(encoding="utf-8").splitlines()) <= DECISION_LINES, page.name


def test_how_things_are_is_said_without_their_history() -> None:
    for page in (README, *DESIGN):
        text = " ".join(page.read_text(encoding="utf-8").lower().split())
        assert [words for words in HISTORY if words in text] == [], page.name


def test_files_and_benchmarks_exist() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for named in re.findall(r"`((?:swarm|node|client|benchmarks|docs|tests|deploy)/[\w./-]+)`", text):
            assert (ROOT / named).exists(), f"{page.name}: {named}"
        for name in re.findall(r"python -m benchmarks (\w+)", " ".join(text.split())):
            module_of(name)


def test_links_to_files_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose(page)):
            if "://" not in target:
                assert (page.parent / target).resolve().exists(), f"{page.name}: {target}"
