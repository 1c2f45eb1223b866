"""What a node gave today, in this run and ever: nothing is counted twice, and nothing that came before is lost."""

from __future__ import annotations

from datetime import date, timedelta

import pytest

from node.autostart.given import DAYS_KEPT, Given, GivenTotals, read_days

TODAY = date(2026, 11, 27)


def test_a_run_adds_to_what_was_given_before() -> None:
    before = Given(tokens=100, sent_bytes=5_000, pauses=1)
    totals = GivenTotals(before, {TODAY.isoformat(): Given(tokens=40)})
    totals.note(Given(tokens=7, sent_bytes=10), TODAY)
    totals.note(Given(tokens=9, sent_bytes=30, serving_s=2.5), TODAY)
    assert totals.run == Given(tokens=9, sent_bytes=30, serving_s=2.5)
    assert totals.ever == Given(tokens=109, sent_bytes=5_030, serving_s=2.5, pauses=1)
    assert totals.on(TODAY) == Given(tokens=49, sent_bytes=30, serving_s=2.5)


def test_at_midnight_another_day_begins() -> None:
    totals = GivenTotals()
    totals.note(Given(tokens=5), TODAY)
    totals.note(Given(tokens=8), TODAY + timedelta(days=1))
    assert (totals.on(TODAY).tokens, totals.on(TODAY + timedelta(days=1)).tokens) == (5, 3)


def test_a_few_days_are_kept_also_where_the_clock_goes_back() -> None:
    totals = GivenTotals()
    for number in range(30):
        totals.note(Given(tokens=number + 1), TODAY + timedelta(days=number))
    assert len(totals.days) == DAYS_KEPT
    assert max(totals.days) == (TODAY + timedelta(days=29)).isoformat()
    totals.note(Given(tokens=31), TODAY)
    assert totals.ever.tokens == 31


def test_what_is_written_is_read_and_later_releases_are_read_past() -> None:
    given = Given(1, 2, 3, 4, 5, 6.5, 7.25, 8)
    assert Given.of_json(given.as_json()) == given
    assert Given.of_json({**given.as_json(), "watts": 3}) == given
    assert Given.of_json({"tokens": 1}) == Given(tokens=1)
    assert read_days({"2026-11-27": given.as_json()}) == {"2026-11-27": given}


@pytest.mark.parametrize("raw", [None, [], {"tokens": -1}, {"tokens": "1"}, {"tokens": True}, {"tokens": 1e300}])
def test_what_cannot_be_is_damage(raw: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - any: the file is set aside
        Given.of_json(raw)
    with pytest.raises(ValueError):  # noqa: PT011
        read_days({"2026-11-27": raw})


@pytest.mark.parametrize("raw", [None, {"yesterday": {}}, {str(number): {} for number in range(1_000)}])
def test_days_that_are_none(raw: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        read_days(raw)
