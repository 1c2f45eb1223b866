"""Lines that others bring about are bounded, and none is lost without being counted."""

from __future__ import annotations

import logging

import pytest

from swarm.base.errors import RegistryError
from swarm.base.logs import MAX_KEYS, CountedLog, describe


def test_the_first_line_comes_at_once_and_the_next_after_a_minute_with_a_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    log = CountedLog(logging.getLogger("test"), lambda: now)
    for second in range(120):
        now = float(second)
        log.say("a", "refused a stream of 192.0.2.1")
    assert caplog.messages == [
        "refused a stream of 192.0.2.1",
        "refused a stream of 192.0.2.1 (and 59 more before)",
    ]


def test_a_flood_of_kinds_is_one_kind(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = CountedLog(logging.getLogger("test"), lambda: now)
    for number in range(10_000):
        log.say(str(number), "refused")
    assert len(caplog.messages) == MAX_KEYS + 1
    now = 60.0
    log.say("new", "refused")
    log.say("others", "refused")
    assert len(caplog.messages) == MAX_KEYS + 3
    assert len(log._said) <= MAX_KEYS + 1


def test_an_error_is_one_line_that_names_its_kind_unless_it_is_ours() -> None:
    assert describe(RegistryError("nobody\nanswers")) == "nobody answers"
    assert describe(OSError(24, "Too many open files")) == "OSError: [Errno 24] Too many open files"
