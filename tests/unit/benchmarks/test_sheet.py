"""Benchmark tables: on the page in their own section, as JSON beside it; and what a sweep's floor is made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks.sheet
from benchmarks.sheet import Sheet
from benchmarks.speed.bare import Bare
from client.demo.link_shape import LinkShape
from swarm.errors import ConfigError

PAGE = "above\n<!-- one: begin -->\nold\n<!-- one: end -->\nbetween\n<!-- two: begin -->\nother\n<!-- two: end -->\n"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "BENCHMARKS.md"
    path.write_text(PAGE)
    monkeypatch.setattr(benchmarks.sheet, "PAGE", path)
    monkeypatch.setattr(benchmarks.sheet, "RESULTS", tmp_path / "results")
    return path


def sheet(name: str) -> Sheet:
    return Sheet(name, "Speeds", ("way", "ms"), [("plain", "1.0")], ["a note"], {"runs": [1, 2]})


def test_a_table_replaces_its_own_section_and_nothing_else(page: Path) -> None:
    sheet("one").record()
    sheet("one").record()
    body = "**Speeds**\n\n| way | ms |\n| --- | --: |\n| plain | 1.0 |\n\na note"
    assert page.read_text() == PAGE.replace("old", body)


def test_a_bar_within_a_cell_ends_no_column(page: Path) -> None:
    Sheet("one", "Changes", ("codec", "|Δ|"), [("fp32", "0")]).record()
    assert "| codec | \\|Δ\\| |\n" in page.read_text()


def test_the_measurements_lie_beside_it_with_their_machine(page: Path) -> None:
    sheet("one").record()
    found = json.loads((page.parent / "results" / "one.json").read_text())
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


def test_a_page_without_the_section_is_an_error(page: Path) -> None:
    with pytest.raises(ConfigError, match="no section"):
        sheet("three").record()


def test_every_table_of_the_page_has_both_its_ends() -> None:
    text = benchmarks.sheet.PAGE.read_text()
    begins = [line[5:-11] for line in text.splitlines() if line.endswith(": begin -->")]
    assert len(begins) >= 8
    for name in begins:
        assert text.index(f"<!-- {name}: begin -->") < text.index(f"<!-- {name}: end -->")


def test_a_floor_is_delays_bytes_compute_and_draft() -> None:
    bare = Bare(nodes=16, temperature=0.0, compute_ms=20.0, draft_ms=15.0, message_bytes=(1_000, 12_500, 12_500, 500))
    assert bare.floor_ms(LinkShape(delay_ms=25)) == pytest.approx(4 * 25 + 20 + 15)
    assert bare.floor_ms(LinkShape(delay_ms=25, mbit=100)) == pytest.approx(135 + 26_500 * 8 / 100e6 * 1e3)
