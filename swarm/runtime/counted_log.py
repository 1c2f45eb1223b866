"""Log lines that others bring about: the first at once, then one a minute that says how many there were."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from swarm.errors import SwarmError

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
