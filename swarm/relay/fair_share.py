"""A rate that many circuits share fairly: fair queueing in virtual time over a token bucket.

Each circuit pays for what it has carried before it carries more. Who carried least is served first, so a circuit with
little to say waits for nobody's backlog. Source: Golestani, "A self-clocked fair queueing scheme", 1994; as in Goyal,
Vin and Cheng, "Start-time fair queueing", 1996, time is the start of what is served.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

BURST_S: Final = 0.25
"""How long a relay that was idle carries as fast as it can."""
CHUNK_BYTES: Final = 65_536
MIN_CHUNK_BYTES: Final = 4_096
CHUNK_S: Final = 0.01
RATE_S: Final = 5.0
"""Over how long the carried rate is told."""

CallLater = Callable[[float, Callable[[], None]], object]


@dataclass(slots=True)
class Flow:
    """One circuit's account.

    Attributes:
        crowd: among how many of its owner's circuits one share is divided.
        finish: virtual time, in bytes, at which what it carried is paid for.
    """

    crowd: Callable[[], float]
    finish: float = 0.0


@dataclass(frozen=True, slots=True)
class _Payment:
    """A flow that waits for its turn: when it began in virtual time, for how many bytes, and what wakes it."""

    start: float
    count: int
    turn: asyncio.Future[None]


class FairShare:
    """The rate that a machine lends."""

    def __init__(
        self, bytes_per_s: float, *, clock: Callable[[], float] = time.monotonic, call_later: CallLater | None = None
    ) -> None:
        """Have carried nothing.

        Args:
            bytes_per_s: of all flows together.
            clock: a monotonic one, in seconds.
            call_later: the event loop's, or a test's.
        """
        self._rate = bytes_per_s
        self._clock = clock
        self._call_later = call_later
        self._left = bytes_per_s * BURST_S
        self._at = clock()
        self._virtual = 0.0
        self._turns = itertools.count()
        self._waiting: list[tuple[float, int, _Payment]] = []  # by when it would be paid for, in virtual time
        self._is_armed = False
        self._recent = 0.0
        self._recent_at = self._at

    async def pay(self, flow: Flow, count: int) -> None:
        """Pay for `count` bytes that a flow has carried; returns when it may carry more, and never at once."""
        self._note(count)
        start = max(self._virtual, flow.finish)
        flow.finish = start + count * max(flow.crowd(), 1.0)
        self._refill()
        if self._left > 0 and not self._waiting:
            self._left -= count
            self._virtual = start
            await asyncio.sleep(0)  # or a loop of reads and writes that are always ready would stop all others
            return
        payment = _Payment(start, count, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, (flow.finish, next(self._turns), payment))
        self._arm()
        await payment.turn

    def change(self, bytes_per_s: float) -> None:
        """Lend another rate from now on."""
        self._refill()
        self._rate = bytes_per_s

    @property
    def chunk_bytes(self) -> int:
        """How much a flow should carry before it pays: what takes 10 ms, so that others wait for little."""
        return max(MIN_CHUNK_BYTES, min(CHUNK_BYTES, int(self._rate * CHUNK_S)))

    @property
    def bytes_per_s(self) -> float:
        """What was carried lately."""
        return self._faded() / RATE_S

    def _note(self, count: int) -> None:
        self._recent = self._faded() + count
        self._recent_at = self._clock()

    def _faded(self) -> float:
        return self._recent * max(1 - (self._clock() - self._recent_at) / RATE_S, 0.0)

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._left + (now - self._at) * self._rate, self._rate * BURST_S)
        self._at = now

    def _arm(self) -> None:
        if self._is_armed:
            return
        self._is_armed = True
        later = self._call_later or asyncio.get_running_loop().call_later
        later(max(1e-4 - self._left / self._rate, 0.0), self._serve)

    def _serve(self) -> None:
        """Let one carry on whose turn it is: it may be the next one's turn too, once it has carried more."""
        self._is_armed = False
        self._refill()
        while self._waiting and self._left > 0:
            _, _, payment = heapq.heappop(self._waiting)
            if not payment.turn.done():
                self._virtual = max(self._virtual, payment.start)
                self._left -= payment.count
                payment.turn.set_result(None)
                break
        if self._waiting:
            self._arm()
