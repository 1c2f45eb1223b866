"""The table of several runs: rows that were measured again replace their own, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import benchmarks.sheet
from benchmarks.redteam.attack import Kind
from benchmarks.redteam.listing import all_attacks
from benchmarks.redteam.table import COLUMNS, merged, recorded, table


def row(name: str, verdict: str, pairs: int = 3, kind: Kind = Kind.FILES) -> dict[str, Any]:
    cells = [name, *["1"] * (len(COLUMNS) - 2), verdict]
    why = [f"{name}: it is {verdict}"]
    return {"cells": cells, "why": why, "verdict": verdict, "pairs": pairs, "seconds": 4.0, "kind": kind}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(benchmarks.sheet, "PAGES", tmp_path)
    monkeypatch.setattr(benchmarks.sheet, "RESULTS", tmp_path / "results")
    path = tmp_path / "redteam.md"
    path.write_text("<!-- redteam: begin -->\n<!-- redteam: end -->\n")
    return path


def test_nothing_is_recorded_at_first(page: Path) -> None:
    assert recorded() == {}


def test_a_row_that_was_measured_again_replaces_its_own(page: Path) -> None:
    first, second, *_ = attacks = all_attacks()
    table({second: row(second, "held"), first: row(first, "slowed", pairs=5)}).record()
    rows = merged(recorded(), {first: row(first, "named"), "gone": row("gone", "held")}, attacks)
    assert list(rows) == [first, second]
    table(rows).record()
    assert recorded()[first]["verdict"] == "named"
    assert recorded()[second] == row(second, "held")
    text = page.read_text()
    assert f"{first}: it is named" in text
    assert "it is slowed" not in text
    assert "1 named, 1 held." in text


def test_controls_are_shown_and_are_no_attacks(page: Path) -> None:
    rows = {
        "half-a-core": row("half-a-core", "control", kind=Kind.CONTROLS),
        "bare-preface": row("bare-preface", "held"),
    }
    table(rows).record()
    text = page.read_text()
    assert "| half-a-core |" in text
    assert "**1 attacks" in text
    assert "1 held." in text
    assert "1 control" not in text
