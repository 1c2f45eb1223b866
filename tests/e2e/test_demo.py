"""`make demo` as a user runs it, on faster links; that nothing is left running is checked for every test."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.e2e.programs import environment, program, within


def test_the_demo_streams_compares_and_cleans_up() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "client.cli", "demo"],
        capture_output=True,
        text=True,
        timeout=110,
        env={**environment(), "DELAY_MS": "10", "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "same text: yes" in done.stdout
    assert "links with 10 ms artificial one-way delay" in done.stdout
    text = re.search(r"It was a dark night[^\n]+", done.stdout)
    assert text is not None
    assert len(text[0].split()) > 40
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    accepted = {row[0]: float(row[3]) for row in cells}
    assert accepted["plain decoding"] == 1.0
    assert accepted["as it comes"] > 2.0
    assert accepted["a tree of 32 at a time"] > 2.0


def test_the_demo_ends_in_order_when_its_terminal_goes(tmp_path: Path) -> None:
    with program(["client.demo"], tmp_path / "demo.log") as demo:
        demo.wait_for("starting a bootstrap peer")
        assert within(60, lambda: len(demo.tree()) > 4)
        status, left = demo.end(signal.SIGHUP)
    assert not left
    assert status == 143


def test_nothing_of_a_killed_demo_stays(tmp_path: Path) -> None:
    with program(["client.demo"], tmp_path / "demo.log") as demo:
        demo.wait_for("0-4: up")
        assert len(demo.tree()) > 10
        status, left = demo.end(signal.SIGKILL)
    assert not left
    assert status == -signal.SIGKILL
