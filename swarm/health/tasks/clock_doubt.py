"""Whether this machine's clock can be believed: a clock that has just jumped must not say what is old. Pure."""

from __future__ import annotations

from typing import Final

JUMP_S: Final = 3_600.0
"""More than this between what the clock says and what it should say is a jump."""
DOUBT_S: Final = 86_400.0
"""How long a clock is doubted after a jump: time to set it right."""
LONGEST_S: Final = 7 * DOUBT_S
"""A clock that jumps again and again is believed after so long, or nothing would ever be deleted."""


class ClockDoubt:
    """Compares Unix time with the time that has passed since the last look, by a clock that never jumps.

    Attributes:
        since: the Unix time at which the doubt began, which must survive a restart; None where there is none.
    """

    def __init__(self, newest: float | None, since: float | None) -> None:
        """Start where an earlier run ended: its newest time, and its doubt."""
        self.since = since
        self._expected = newest
        self._looked_at: float | None = None
        self._doubted_at: float | None = None
        self._believed_at: float | None = None

    def is_believed(self, now: float, steady: float) -> bool:
        """Look at both clocks, in seconds; whether Unix time may be deleted by."""
        if self._looked_at is None:
            self._believed_at = steady
            if self.since is not None:
                self._doubted_at = steady - min(max(now - self.since, 0.0), DOUBT_S)
        passed_s = 0.0 if self._looked_at is None else steady - self._looked_at
        if self._expected is not None and abs(now - self._expected - passed_s) > JUMP_S:
            self.since, self._doubted_at = now, steady
        self._expected, self._looked_at = now, steady
        if self._doubted_at is not None and steady - self._doubted_at < DOUBT_S:
            assert self._believed_at is not None, "set by the first look"
            if steady - self._believed_at < LONGEST_S:
                return False
        self.since, self._doubted_at, self._believed_at = None, None, steady
        return True
