"""The demo from a checkout, ended early: nothing of it stays. `test_wheel` runs it to its end, from the wheel."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.programs import program, within


def test_the_demo_ends_in_order_when_its_terminal_goes(tmp_path: Path) -> None:
    with program(["client.tools.demo"], tmp_path / "demo.log") as demo:
        demo.wait_for("starting a bootstrap peer")
        assert within(60, lambda: len(demo.tree()) > 4)
        status, left = demo.end(signal.SIGHUP)
    assert not left
    assert status == 143


@pytest.mark.crossing
def test_nothing_of_a_killed_demo_stays(tmp_path: Path) -> None:
    with program(["client.tools.demo"], tmp_path / "demo.log") as demo:
        demo.wait_for("starting a bootstrap peer")
        assert within(60, lambda: len(demo.tree()) > 10)
        status, left = demo.end(signal.SIGKILL)
    assert not left
    assert status == -signal.SIGKILL
