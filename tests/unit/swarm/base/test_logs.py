"""A log whose words come from strangers: one line per record, no controls, and a limit to how often each is said."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from swarm.base.logs import PER_WINDOW, WINDOW_S, OneLineFormatter, RepeatLimit, set_up_logging

INJECTED = "no\x1b[2J\n2026-01-01 node: all is well"


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def make_logger(said: io.StringIO, limit: RepeatLimit | None = None) -> logging.Logger:
    logger, handler = logging.Logger("node.session"), logging.StreamHandler(said)
    handler.setFormatter(OneLineFormatter("%(name)s: %(message)s"))
    if limit is not None:
        handler.addFilter(limit)
    logger.addHandler(handler)
    return logger


def test_a_record_is_one_line() -> None:
    said = io.StringIO()
    make_logger(said).warning("refused: %s", INJECTED)
    assert said.getvalue() == "node.session: refused: no�[2J\\n2026-01-01 node: all is well\n"


def test_no_line_of_a_stack_trace_looks_like_a_record() -> None:
    said = io.StringIO()
    try:
        raise ValueError(INJECTED)
    except ValueError:
        make_logger(said).exception("failed")
    first, *trace = said.getvalue().splitlines()
    assert first == "node.session: failed"
    assert all(line.startswith("    ") for line in trace)
    assert "\x1b" not in said.getvalue()


def test_a_record_is_no_longer_than_its_limit() -> None:
    said = io.StringIO()
    make_logger(said).warning("%s", "x" * 5_000_000)
    assert len(said.getvalue()) < 2_100
    assert "5,000,014 characters" in said.getvalue()


def test_what_is_said_too_often_is_counted() -> None:
    said, clock = io.StringIO(), Clock()
    logger = make_logger(said, RepeatLimit(clock))

    def refuse(number: int) -> None:
        logger.warning("stream %d refused", number)

    for number in range(20_000):
        refuse(number)
        clock.now += 50.0 / 20_000
    logger.warning("something else")
    clock.now += 10.0
    refuse(20_000)
    lines = said.getvalue().splitlines()
    assert len(lines) == PER_WINDOW + 2
    assert lines[PER_WINDOW - 1].endswith(" refused (more of this kind are not shown for 60 s)")
    assert lines[-2:] == [
        "node.session: something else",
        f"node.session: stream 20000 refused ({20_000 - PER_WINDOW:,} of this kind were not shown)",
    ]


def test_steady_work_at_a_modest_rate_is_all_shown() -> None:
    said, clock = io.StringIO(), Clock()
    logger = make_logger(said, RepeatLimit(clock))
    for _ in range(500):
        logger.info("session ended")
        clock.now += 1.01 * WINDOW_S / (PER_WINDOW - 1)
    assert said.getvalue().splitlines() == ["node.session: session ended"] * 500


def test_a_debuggers_lines_are_all_shown() -> None:
    said = io.StringIO()
    logger = make_logger(said, RepeatLimit(Clock()))
    for _ in range(2 * PER_WINDOW):
        logger.debug("sweep")
    assert len(said.getvalue().splitlines()) == 2 * PER_WINDOW


def test_a_program_sets_all_of_it_up(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    set_up_logging("WARNING", OneLineFormatter("%(message)s"))
    (handler,) = root.handlers
    assert [type(one) for one in handler.filters] == [RepeatLimit]
    root.warning("%s", INJECTED)
    try:
        raise ValueError(INJECTED)
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    handler.close()
    said = capfd.readouterr().err
    assert "\x1b" not in said
    assert "ValueError: no�[2J" in said
