"""How every program writes its log: a record is one line, nobody else's words can forge another, and none fills a disk.

Owns the handler and its form; the programs own the level. A library sets none of this up.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from swarm.base.errors import SwarmError
from swarm.base.plain_text import plain, plain_line

EVERY_S = 60.0
MAX_KEYS = 64
"""Kinds of lines that are told apart; all further ones are one kind."""
OTHERS = "others"


@dataclass(slots=True)
class _Said:
    at: float
    unsaid: int = 0


class CountedLog:
    """At most `MAX_KEYS` + 1 lines a minute, whoever causes them."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._said: dict[str, _Said] = {}

    def say(self, key: str, text: str) -> None:
        """Log a line, or count it where one with this key was logged within a minute.

        Args:
            key: whom or what it is about.
            text: the line; nothing in it may be a stranger's without being escaped.
        """
        now = self._clock()
        if key not in self._said and len(self._said) >= MAX_KEYS:
            self._said = {known: said for known, said in self._said.items() if now - said.at < EVERY_S}
            key = key if len(self._said) < MAX_KEYS else OTHERS
        said = self._said.get(key)
        if said is not None and now - said.at < EVERY_S:
            said.unsaid += 1
            return
        more = f" (and {said.unsaid} more before)" if said is not None and said.unsaid else ""
        self._said[key] = _Said(now)
        self._logger.warning("%s%s", text, more)


def describe(error: Exception) -> str:
    """An error in one line: its text, and its kind where it is not one of this program's own."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, SwarmError) else f"{type(error).__name__}: {text}"


PER_WINDOW: Final = 60
"""Records of one place in the program that are shown per window; a debugger's are all shown."""
WINDOW_S: Final = 60.0
MAX_LINE: Final = 2_000
"""Characters of a record, and of each line of its stack trace."""
_INDENT: Final = "\n    "


class OneLineFormatter(logging.Formatter):
    """A record on one line and without controls; a stack trace follows it, each line indented."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        lines = [self.formatMessage(record)]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        if record.stack_info:
            lines += record.stack_info.splitlines()
        lines = [_cut(plain_line(line)) for line in lines]
        return _INDENT.join([lines[0] + getattr(record, "unshown", ""), *lines[1:]])


class RepeatLimit(logging.Filter):
    """Shows at most `PER_WINDOW` records per window of each place in the program, and says how many it left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._windows: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO:
            return True
        now, place = self._clock(), (record.pathname, record.lineno)
        with self._lock:
            started, count = self._windows.get(place, (now, 0))
            if now - started >= WINDOW_S:
                record.unshown = _left_out(count - PER_WINDOW)
                started, count = now, 0
            self._windows[place] = started, count + 1
        if count + 1 == PER_WINDOW:
            record.unshown = f" (more of this kind are not shown for {WINDOW_S - (now - started):.0f} s)"
        return count < PER_WINDOW


def set_up_logging(level: str | int, formatter: OneLineFormatter) -> None:
    """Write records of this level and above to standard error, and a failure's last words as plainly as those."""
    handler = logging.StreamHandler()
    handler.addFilter(RepeatLimit())
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler])  # noqa: TID251 - the one place
    sys.excepthook = _show_uncaught


def _cut(line: str) -> str:
    return line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}… ({len(line):,} characters)"


def _left_out(count: int) -> str:
    return f" ({count:,} of this kind were not shown)" if count > 0 else ""


def _show_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(plain("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)  # noqa: T201
