"""The benchmark of a card: what was measured is kept span by span, and shown where a run is broken off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.sheet import Sheet
from benchmarks.speed import card
from benchmarks.speed.card import CardBench, CardSweep, Options


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    """Two spans, of which nothing is loaded; int4 of the second one fails as the test says."""

    @contextmanager
    def nothing(*_: object) -> Iterator[Path]:
        yield tmp_path

    monkeypatch.setattr(card, "grown_model", nothing)
    monkeypatch.setattr(card, "open_checkpoint", lambda _: None)
    monkeypatch.setattr(card, "copy_rate", lambda _: 1e9)
    monkeypatch.setattr(CardBench, "_run_plain", lambda *_: None)
    return Options(layers=(32, 10), weights=("auto", "int4"), device="cpu", json=tmp_path / "card.json")


def fast_until(layers: int, reason: BaseException, monkeypatch: pytest.MonkeyPatch, options: Options) -> list[int]:
    """Let a span's int4 fail; how many sweeps the file has whenever a format begins."""
    kept: list[int] = []

    def fast(self: CardBench, span: int, weights: str) -> None:
        assert options.json is not None
        kept.append(len(json.loads(options.json.read_text())["sweeps"]) if options.json.exists() else 0)
        if (span, weights) == (layers, "int4"):
            raise reason
        self.found.sweeps.append(CardSweep(span, weights, 1_024, 16, 0.0, 2.0, 1.5, 1.0))

    monkeypatch.setattr(CardBench, "_run_fast", fast)
    return kept


def test_the_file_is_written_after_every_format_and_an_interrupt_shows_the_table(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = fast_until(10, KeyboardInterrupt(), monkeypatch, options)
    with pytest.raises(SystemExit, match="interrupted"):
        card.measure(options, Console(width=200))
    assert kept == [0, 1, 2, 3]
    lines = [line for line in capsys.readouterr().out.splitlines() if "1,024" in line]
    assert [line.split()[1] for line in lines] == ["32", "32", "10"]


def test_a_failure_shows_the_table_too_and_records_nothing(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fast_until(32, RuntimeError("out of memory"), monkeypatch, options)
    monkeypatch.setattr(Sheet, "record", lambda _: pytest.fail("half a table was recorded"))
    with pytest.raises(RuntimeError, match="out of memory"):
        card.measure(replace(options, record=True), Console(width=200))
    assert "1,024" in capsys.readouterr().out
