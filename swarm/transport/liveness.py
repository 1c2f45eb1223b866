"""Is the machine at the other end of a link still there (PROTOCOL R10)? Time is a parameter.

Every part that is written must be receipted by the other side's event loop, which answers whatever its compute thread
does: a machine in a forward of ten seconds is slow and not dead, a stopped one is silent. Parts and not bytes are
counted, so a large frame on a slow link shows progress long before it has arrived. Time in which this program itself
did not run (its owner's game, a lid that was closed) is no silence of the other side: it is excused.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

RECEIPT_S = 0.1
"""How long the receiving side gathers parts before it sends a receipt."""
SILENCE_S = 0.5 + RECEIPT_S
ROUND_TRIPS = 4
"""A link is silent when something is unreceipted for so many round trips and `SILENCE_S`."""


@dataclass(slots=True)
class LivenessWatch:
    """What was written to the other side, and what it receipted.

    Attributes:
        written: parts that were written so far.
        receipted: parts of those that the other side has.
        progress_s: when the other side was last known to live, on the caller's clock.
    """

    written: int = 0
    receipted: int = 0
    progress_s: float = 0.0

    def write(self, now_s: float) -> None:
        """A part is about to be written."""
        if self.written == self.receipted:
            self.progress_s = now_s
        self.written += 1

    def receipt(self, parts: int, now_s: float) -> None:
        """The other side has so many parts; a repeated or stale receipt is no progress."""
        if self.receipted < parts <= self.written:
            self.receipted = parts
            self.progress_s = now_s

    def excuse(self, seconds: float) -> None:
        """Leave out so many seconds in which this side itself did not run."""
        self.progress_s += seconds

    def is_silent(self, now_s: float, rtt_s: float) -> bool:
        """Whether something is unreceipted for longer than the link and an event loop can take."""
        return self.written > self.receipted and now_s - self.progress_s > ROUND_TRIPS * rtt_s + SILENCE_S


async def pause(seconds: float) -> float:
    """Sleep; returns how many seconds longer that took, because this program was not run or was busy."""
    started = time.monotonic()
    await asyncio.sleep(seconds)
    return max(time.monotonic() - started - seconds, 0.0)
