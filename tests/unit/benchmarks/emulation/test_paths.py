"""The paths benchmark's arithmetic: which delay is which path's, and what is near enough to TCP."""

from __future__ import annotations

import pytest

from benchmarks.emulation.homes_paths import HomesPath
from benchmarks.emulation.paths import PLAIN, PLAIN_LAN, ROWS, Options, PathTimes, chosen, is_near, sheet
from swarm.errors import SwarmError

RELAYED = next(row for row in ROWS if row.path is HomesPath.RELAYED)
PUNCHED = next(row for row in ROWS if row.path is HomesPath.PUNCHED)


def times(small_ms: float, large_ms: float, mbit: float) -> PathTimes:
    found = PathTimes()
    values = {"small_cold_ms": small_ms, "small_warm_ms": small_ms, "large_ms": large_ms, "mbit_per_s": mbit}
    found.add({**values, "connected_ms": 100.0, "path": "direct"})
    return found


BASE = times(26, 70, 95)


@pytest.mark.parametrize(
    ("path", "delay_ms", "fits"),
    [
        (HomesPath.LAN, 0.2, True),
        (HomesPath.LAN, 25, False),
        (HomesPath.DIRECT, 26, True),
        (HomesPath.PUNCHED, 51, False),
        (HomesPath.RELAYED, 51, True),
        (HomesPath.RELAYED, 26, False),
    ],
)
def test_a_delay_tells_how_often_a_path_crosses_the_internet(path: HomesPath, delay_ms: float, fits: bool) -> None:
    assert path.fits(delay_ms, 25) is fits


def test_a_relayed_path_may_take_one_leg_more_and_no_other_may() -> None:
    assert is_near(RELAYED, times(52, 96, 94), BASE, 25)
    assert not is_near(PUNCHED, times(52, 96, 94), BASE, 25)
    assert not is_near(RELAYED, times(52, 112, 94), BASE, 25)


def test_a_path_that_carries_less_is_not_near() -> None:
    assert is_near(PUNCHED, times(26, 71, 91), BASE, 25)
    assert not is_near(PUNCHED, times(26, 71, 85), BASE, 25)


def test_a_path_is_measured_together_with_what_it_is_compared_with() -> None:
    assert [row.name for row in chosen(Options(only=("punched",)))] == [PLAIN, "punched"]
    assert [row.name for row in chosen(Options(only=("LAN",)))] == [PLAIN_LAN, "LAN"]
    with pytest.raises(SwarmError, match="no path is called pushed"):
        chosen(Options(only=("pushed",)))


def test_the_table_says_which_paths_are_near() -> None:
    made = sheet({PLAIN: BASE, "direct": times(26, 70, 94), "punched": times(40, 70, 94)}, Options())
    assert [row[-1] for row in made.rows] == ["", "yes", "no"]
    assert made.measured["punched"]["values"]["small_warm_ms"] == [40]
