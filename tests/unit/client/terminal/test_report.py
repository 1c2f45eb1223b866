"""The table of where a sweep's time went never shows a negative time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from client.base.stats import PickChecks, SweepMeasurement
from client.terminal.report import summary, waterfall
from tests.sweep_measurements import measured
from tests.unit.client.terminal.test_chat import STATS


def rows_of(*sweeps: SweepMeasurement) -> list[str]:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(waterfall(replace(STATS, sweeps=sweeps, hops=("Qm 0-12",))))
    return [" ".join(line.strip("│┃ ").replace("│", " ").split()) for line in capture.get().splitlines()]


@pytest.mark.parametrize(
    ("total_ms", "row"),
    [
        (34.0, "not accounted for 4.0"),
        (30.0, "not accounted for 0.0"),
        (29.96, "not accounted for 0.0"),
        (28.5, "links were faster than pings by 1.5"),
    ],
)
def test_a_sweep_that_was_faster_than_its_pings_says_by_how_much(total_ms: float, row: str) -> None:
    rows = rows_of(measured(4, total_ms, waited_ms=0.0, computed_ms=10.0, network_ms=20.0))
    assert row in rows
    assert not any("-" in value for line in rows[3:] for value in line.split() if value != "0-12")


@pytest.mark.parametrize(
    ("numeric_class", "reproducible", "says"),
    [
        ("cuda-sm90-bfloat16-k1+w4z", True, "seed 7, reproducible"),
        ("cuda-sm90-bfloat16-k1+w4z", False, "may differ from run to run (multi-step sampling)"),
        ("cpu-float32", False, "may differ from run to run (multi-step sampling)"),
        ("cuda-bfloat16", False, "may differ from run to run (cuda-bfloat16)"),
        ("cuda-sm90-bfloat16-k1+int8", False, "may differ from run to run (cuda-sm90-bfloat16-k1+int8)"),
    ],
)
def test_the_summary_says_why_a_text_may_differ(numeric_class: str, says: str, *, reproducible: bool) -> None:
    assert summary(replace(STATS, numeric_class=numeric_class, reproducible=reproducible)).endswith(says)


@pytest.mark.parametrize(
    ("picks", "says"),
    [
        (PickChecks(judged=9), "seed 7, reproducible"),
        (PickChecks(refuted=("Qm1",)), "reproducible · what 1 machine picked was refuted and taken back"),
        (PickChecks(refuted=("Qm1", "Qm2")), "reproducible · what 2 machines picked was refuted and taken back"),
        (PickChecks(doubt=1.0), "reproducible · the draft's candidates are picked too rarely: another model?"),
        (PickChecks(doubt=0.9), "seed 7, reproducible"),
    ],
)
def test_the_summary_says_what_checks_of_picks_found(picks: PickChecks, says: str) -> None:
    assert summary(replace(STATS, picks=picks, reproducible=True)).endswith(says)


def test_the_median_decides_and_no_sweep_gives_a_dash() -> None:
    def sweep(total_ms: float) -> SweepMeasurement:
        return measured(4, total_ms, waited_ms=0.0, computed_ms=10.0, network_ms=20.0)

    assert "not accounted for 2.0" in rows_of(sweep(25.0), sweep(32.0), sweep(40.0))
    assert "links were faster than pings by 5.0" in rows_of(sweep(25.0), sweep(25.0), sweep(40.0))
    assert "not accounted for –" in rows_of()


def test_links_that_are_not_direct_say_how_they_go() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        for paths in (("direct", "direct"), ("LAN", "punched"), ("", "relayed")):
            console.print(waterfall(replace(STATS, hops=("Qm 0-6", "Rn 6-12"), paths=paths)))
    plain, better, relayed = capture.get().split("where a sweep")[1:]
    assert "(" not in plain.partition("whole")[0].partition("ms")[2]
    assert "client → hop 0 (LAN)" in better
    assert "hop 1: Rn 6-12 (punched)" in better
    assert "hop 0: Qm 0-6 " in better
    assert "client → hop 0 " in relayed
    assert "hop 1: Rn 6-12 (relayed)" in relayed
