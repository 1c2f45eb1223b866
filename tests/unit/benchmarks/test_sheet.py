"""Benchmark tables: on the page in their own section, as JSON beside it; and what a sweep's floor is made of."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import benchmarks.sheet
from benchmarks.sheet import Sheet
from benchmarks.speed.bare import BareTimes
from client.tools.demo.link_shape import LinkShape
from swarm.base.cli import make_console
from swarm.base.errors import ConfigError

PAGE = "above\n<!-- one: begin -->\nold\n<!-- one: end -->\nbetween\n<!-- two: begin -->\nother\n<!-- two: end -->\n"


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a page that has two tables, and one that has none."""
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "speed.md").write_text(PAGE)
    (folder / "other.md").write_text("nothing here\n")
    monkeypatch.setattr(benchmarks.sheet, "PAGES", folder)
    monkeypatch.setattr(benchmarks.sheet, "RESULTS", tmp_path / "results")
    return folder


def sheet(name: str) -> Sheet:
    return Sheet(name, "Speeds", ("way", "ms"), [("plain", "1.0")], ["a note"], {"runs": [1, 2]})


def test_a_table_replaces_its_own_section_and_nothing_else(pages: Path) -> None:
    sheet("one").record()
    sheet("one").record()
    body = "**Speeds**\n\n| way | ms |\n| --- | --: |\n| plain | 1.0 |\n\na note"
    assert (pages / "speed.md").read_text() == PAGE.replace("old", body)
    assert (pages / "other.md").read_text() == "nothing here\n"


def test_a_bar_within_a_cell_ends_no_column(pages: Path) -> None:
    Sheet("one", "Changes", ("codec", "|Δ|"), [("fp32", "0")]).record()
    assert "| codec | \\|Δ\\| |\n" in (pages / "speed.md").read_text()


def test_the_measurements_lie_beside_it_with_their_machine(pages: Path) -> None:
    sheet("one").record()
    found = json.loads((pages.parent / "results" / "one.json").read_text())
    assert found["runs"] == [1, 2]
    assert found["machine"]["cores"] > 0


def test_lists_of_numbers_have_a_line_each(tmp_path: Path) -> None:
    measured = {"runs": [1, -2.5e-3], "told": ["a [1,\n 2] b", [], None, [3]], "rows": [[1, 2], [3]]}
    Sheet("one", "", (), [], [], measured).write(tmp_path / "one.json")
    text = (tmp_path / "one.json").read_text()
    found = json.loads(text)
    del found["machine"]
    assert found == measured
    assert "[1, -0.0025]" in text


def test_a_table_that_no_page_has_is_an_error(pages: Path) -> None:
    with pytest.raises(ConfigError, match="no page has <!-- three: begin -->"):
        sheet("three").record()


def test_a_table_that_two_pages_have_is_an_error(pages: Path) -> None:
    (pages / "other.md").write_text(PAGE)
    with pytest.raises(ConfigError, match=r"must be there once, and are in other\.md, speed\.md"):
        sheet("one").record()
    assert not (pages.parent / "results").exists()


@pytest.mark.parametrize("text", ["<!-- one: begin -->", "<!-- one: end -->", "<!-- one: end --><!-- one: begin -->"])
def test_half_a_section_is_an_error(pages: Path, text: str) -> None:
    (pages / "speed.md").write_text(text)
    with pytest.raises(ConfigError, match="must come before"):
        sheet("one").record()
    assert (pages / "speed.md").read_text() == text


def test_in_a_pipe_every_cell_is_whole_on_its_line() -> None:
    columns = [f"a title of column {number}" for number in range(16)]
    row = [f"{number} … {number + 1} of [these] {number}" for number in range(16)]
    out = io.StringIO()
    made = Sheet("one", "A title with [brackets] " * 20, columns, [row], ["a note " * 40])
    for console in (make_console(out), make_console(out, soft_wrap=True)):
        made.show(console)
        lines = out.getvalue().splitlines()
        assert lines[0].strip() == made.title.strip()
        assert all(column in lines[2] for column in columns)
        assert all(cell in lines[4] for cell in row)
        assert lines[6].strip() == made.notes[0].strip()
        assert len(lines) == 7
        out.seek(0)
        out.truncate()


def test_a_floor_is_delays_bytes_compute_and_draft() -> None:
    bare = BareTimes(
        nodes=16, temperature=0.0, compute_ms=20.0, draft_ms=15.0, message_bytes=(1_000, 12_500, 12_500, 500)
    )
    assert bare.floor_ms(LinkShape(delay_ms=25)) == pytest.approx(4 * 25 + 20 + 15)
    assert bare.floor_ms(LinkShape(delay_ms=25, mbit=100)) == pytest.approx(135 + 26_500 * 8 / 100e6 * 1e3)
