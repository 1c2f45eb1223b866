"""When a node pauses, and when it goes on: causes that are looked at, each with its hysteresis. Pure.

A cause begins when it was seen for `begin_s` without a break, and is over when it was not seen for `end_s`. So neither
a menu that flickers over the screen nor a loose plug moves sessions about. What is on at the first look holds at once:
a node that starts on battery does not serve for a moment first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

UNKNOWN_S: Final = 600.0
"""A cause that held and of which nothing is known for so long is over: its sensor is gone, and would hold for ever."""

Look = Callable[[], bool | None]
"""Whether a cause is there now; None: it is not known."""


@dataclass(frozen=True, slots=True)
class PauseCause:
    """One reason to pause."""

    reason: str
    """Completes "paused: "."""
    look: Look
    begin_s: float
    """How long it must be there before the node pauses."""
    end_s: float
    """How long it must be away before the node goes on."""


@dataclass(slots=True)
class _Watched:
    """A cause over time.

    Attributes:
        cause: it.
        holds: whether the node pauses for it.
        changing_since: when it was first seen otherwise than it holds, without a break since; None: it was not.
        is_first: it was not looked at yet.
    """

    cause: PauseCause
    holds: bool = False
    changing_since: float | None = None
    is_first: bool = True

    def look(self, now: float) -> bool:
        """Look once more; whether it holds."""
        seen = self.cause.look()
        is_known = seen is not None
        if self.is_first:
            self.is_first, self.holds = False, bool(seen)
        if bool(seen) == self.holds:
            self.changing_since = None
            return self.holds
        if self.changing_since is None:
            self.changing_since = now
        wait_s = self.cause.begin_s if seen else self.cause.end_s if is_known else UNKNOWN_S
        if now - self.changing_since >= wait_s:
            self.holds, self.changing_since = not self.holds, None
        return self.holds


class PauseJudge:
    """All causes of one node."""

    def __init__(self, causes: Sequence[PauseCause], clock: Callable[[], float]) -> None:
        """Have seen nothing yet.

        Args:
            causes: what the owner wants to pause for.
            clock: seconds.
        """
        self._watched = [_Watched(cause) for cause in causes]
        self._clock = clock

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self._watched)

    def look(self) -> str | None:
        """Look at every cause; why the node should pause now, None if it should not."""
        now = self._clock()
        reasons = [watched.cause.reason for watched in self._watched if watched.look(now)]
        return " and ".join(reasons) or None
