"""What one program sends over all its links together: counted, and held below a rate where its owner wants that.

Paced here and not by the system: a limit for one program needs root there, and gRPC hands no socket out. Before a part
is written it waits for its turn; so what is unwritten does not count as unreceipted, and nobody is thought dead
(`swarm.transport.liveness`). Small messages (pings, receipts, picks) are charged and never wait. Frames are cut into
parts of a few milliseconds, so that many links take turns and pings come between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from swarm.protocol.wire import PART_BYTES

SMALL_BYTES: Final = 2_048
"""A message up to this size is sent at once."""
BURST_S: Final = 0.25
"""So much of the rate may be saved up: a tree's rows then leave as fast as the line is."""
PART_S: Final = 0.02
"""How long one part holds up the others."""
SMALLEST_PART_BYTES: Final = 4_096

CountBytes = Callable[[int], None]
"""Called with the number of bytes of every part that was written."""


def ignore_bytes(count: int) -> None:
    """Count nothing."""


class Uplink:
    """The one way out of a program.

    Attributes:
        mbit_per_s: the limit; None for none.
        part_bytes: the largest part of a frame that is written at a time.
    """

    def __init__(
        self,
        count: CountBytes = ignore_bytes,
        mbit_per_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Have sent nothing.

        Args:
            count: told of every part that was written.
            mbit_per_s: 10⁶ bits of payload a second, at most, over any longer time.
            clock: seconds.
            sleep: waits so many of them.
        """
        self.mbit_per_s = mbit_per_s
        self.sent = count
        self._seconds_per_byte = 0.0 if mbit_per_s is None else 8 / (mbit_per_s * 1e6)
        fair = PART_BYTES if mbit_per_s is None else int(PART_S / self._seconds_per_byte)
        self.part_bytes = min(max(fair, SMALLEST_PART_BYTES), PART_BYTES)
        self._clock = clock
        self._sleep = sleep
        self._paid_until = float("-inf")

    @property
    def is_limited(self) -> bool:
        """Whether anything ever waits."""
        return self.mbit_per_s is not None

    async def turn(self, count: int) -> None:
        """Wait until a part of so many bytes may be written; who asked first goes first."""
        if self.mbit_per_s is None:
            return
        now = self._clock()
        begin = max(self._paid_until, now - BURST_S)
        self._paid_until = begin + count * self._seconds_per_byte
        if count > SMALL_BYTES and begin > now:
            await self._sleep(begin - now)
