"""What a node shows on a terminal while files come and layers load, and in plain lines elsewhere."""

from __future__ import annotations

import io
import threading

from rich.console import Console

from node.lifecycle.summary import TerminalSay
from node.model.loading import READ_SILENTLY_BYTES, ShowsProgress, progress_lines, reading_lines


def terminal() -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, force_terminal=True, width=100, color_system=None), written


def test_a_terminal_shows_a_bar_that_ends_with_the_download() -> None:
    console, written = terminal()
    threads = threading.active_count()
    with TerminalSay(console) as say:
        assert isinstance(say, ShowsProgress)
        report = progress_lines(say)
        report("model-00001-of-00002.safetensors", 0, 2 << 20)
        report("model-00002-of-00002.safetensors", 1 << 20, 2 << 20)
        say("a line in between")
        report("model-00002-of-00002.safetensors", 2 << 20, 2 << 20)
        assert threading.active_count() == threads
    assert "a line in between" in written.getvalue()
    assert "fetching model-00002-of-00002.safetensors" in written.getvalue()


def test_what_failed_in_the_middle_leaves_no_bar() -> None:
    console, _ = terminal()
    threads = threading.active_count()
    try:
        with TerminalSay(console) as say:
            say.fetching("model.safetensors", 1, 10)
            raise OSError
    except OSError:
        pass
    assert threading.active_count() == threads


def test_loading_shows_that_something_goes_on() -> None:
    console, written = terminal()
    with TerminalSay(console) as say, say.working("loading 9 MiB of weights"):
        pass
    assert "loading 9 MiB of weights" in written.getvalue()


def test_elsewhere_there_are_few_plain_lines() -> None:
    lines: list[str] = []
    report = progress_lines(lines.append)
    for here in range(0, 1_001):
        report("model.safetensors", here, 1_000)
    assert 20 <= len(lines) <= 22
    assert lines[-1].startswith("fetching model.safetensors")


def test_reading_weights_is_told_where_it_takes_long() -> None:
    lines: list[str] = []
    for total in (READ_SILENTLY_BYTES - 1, 4 << 30):
        report = reading_lines(lines.append)
        for read in range(0, total + 1, 1 << 20):
            report("model.safetensors", read, total)
    assert len(lines) == 11
    assert lines[-1] == "reading the weights once, to know them by their contents: 4.0 of 4.0 GiB"
    console, written = terminal()
    with TerminalSay(console) as say:
        report = reading_lines(say)
        for read in (1 << 30, 4 << 30):
            report("model.safetensors", read, 4 << 30)
    assert "reading model.safetensors once" in written.getvalue()
