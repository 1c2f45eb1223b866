"""Quiet hours by the clock on the wall, past midnight and on the days when the clock is set."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from swarm.base.errors import ConfigError
from swarm.base.quiet_hours import QuietHours


def at(clock: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-27T{clock}")


@pytest.mark.parametrize(
    ("hours", "quiet", "loud"),
    [
        ("22:00-07:00", ["22:00", "23:59:59", "00:00", "06:59:59"], ["07:00", "12:00", "21:59:59"]),
        ("9:30-17:05", ["09:30", "17:04:59"], ["09:29:59", "17:05", "00:00"]),
        ("00:00-06:00", ["00:00", "05:59"], ["06:00", "23:59:59"]),
        ("23:00-00:00", ["23:00", "23:59:59"], ["00:00", "22:59"]),
    ],
)
def test_a_range_is_half_open_and_may_pass_midnight(hours: str, quiet: list[str], loud: list[str]) -> None:
    parsed = QuietHours.parse(hours)
    assert all(parsed.holds(at(clock)) for clock in quiet)
    assert not any(parsed.holds(at(clock)) for clock in loud)


@pytest.mark.parametrize(
    "text", ["", "22-7", "22:00", "22:00-", "24:00-07:00", "22:60-07:00", "22:00-07:00-08:00", "22:00–07:00", "a:b-c:d"]
)
def test_what_is_no_range_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 22:00-07:00"):
        QuietHours.parse(text)


def test_a_range_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="never end"):
        QuietHours.parse("07:00-7:00")


@pytest.mark.parametrize(
    ("before", "after", "quiet_minutes"),
    [
        (1, 2, 60),  # 02:00 to 03:00 does not exist
        (2, 2, 120),
        (2, 1, 180),  # 02:00 to 03:00 comes twice
    ],
)
def test_on_the_days_when_the_clock_is_set_the_clock_counts(before: int, after: int, quiet_minutes: int) -> None:
    """Offsets from UTC in hours before and after 01:00 UTC, when Europe sets its clocks."""
    hours, midnight = QuietHours.parse("01:00-03:00"), datetime(2026, 3, 29)
    minutes = [
        midnight + timedelta(hours=before if minute < 60 else after, minutes=minute) for minute in range(-60, 12 * 60)
    ]
    assert sum(map(hours.holds, minutes)) == quiet_minutes
    assert str(hours) == "01:00-03:00"
