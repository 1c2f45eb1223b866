"""A circuit: the bytes of two connections, passed on both ways until both have ended, with one buffer each way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from swarm.relay.connection import RelayConnection
from swarm.relay.fair_share import FairShare, Flow


@dataclass(frozen=True, slots=True)
class CircuitBounds:
    """Of a circuit that is for a short talk.

    Attributes:
        lives_s: how long it may live.
        most_bytes: what it may carry, both ways together.
    """

    lives_s: float
    most_bytes: int


class Circuit:
    """Two connections that are one from now on.

    Attributes:
        moved_at: when bytes last moved, by the clock.
        until: when it ends whatever moves, by the clock; None: never.
    """

    def __init__(
        self,
        ends: tuple[RelayConnection, RelayConnection],
        share: FairShare,
        flow: Flow,
        clock: Callable[[], float] = time.monotonic,
        bounds: CircuitBounds | None = None,
    ) -> None:
        """Pass nothing yet.

        Args:
            ends: both connections; who runs the circuit closes them.
            share: the rate that all circuits share.
            flow: this one's account.
            clock: a monotonic one, in seconds.
            bounds: None: it lives for as long as something moves, and carries anything.
        """
        self._ends = ends
        self._share = share
        self._flow = flow
        self._left = None if bounds is None else bounds.most_bytes
        self._clock = clock
        self.moved_at = clock()
        self.until = None if bounds is None else self.moved_at + bounds.lives_s

    async def run(self) -> None:
        """Pass bytes until both ends have said all. An end that is reset, or too much for the circuit, resets both."""
        one, other = self._ends
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pass_on(one, other))
                pumps.create_task(self._pass_on(other, one))
        except* OSError:
            one.reset()
            other.reset()

    async def _pass_on(self, source: RelayConnection, sink: RelayConnection) -> None:
        buffer = memoryview(bytearray(self._share.chunk_bytes))
        while count := await source.read_into(buffer):
            await sink.send(buffer[:count])
            self.moved_at = self._clock()
            if self._left is not None:
                self._left -= count
                if self._left < 0:
                    raise ConnectionAbortedError("carried more than it may")
            await self._share.pay(self._flow, count)
        sink.end_writing()
