"""Who runs next: a bounded queue, fair between keys. Owns no run."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from swarm.base.errors import SwarmError

MAX_RETRY_S: Final = 60.0
_FIRST_GUESS_S: Final = 5.0
"""How long a run takes, before any was measured."""
_NEWEST: Final = 0.2
"""Weight of the newest run in the mean."""


class QueueFull(SwarmError):
    """No more may wait, of this key or of all together."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class QueueLimits:
    running: int = 16
    waiting: int = 256
    waiting_per_key: int = 64


class FairQueue:
    """Lets so many run at a time; of those that wait, each key has its turn after every other."""

    def __init__(self, limits: QueueLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._run_s = _FIRST_GUESS_S
        self.running = 0
        self.refused = 0

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Wait for a turn and hold it.

        Raises:
            QueueFull: too many wait already, or came since, of keys that have less.
        """
        await self._wait(key)
        began = self._clock()
        try:
            yield
        finally:
            self._run_s += _NEWEST * (self._clock() - began - self._run_s)
            self._leave()

    async def _wait(self, key: str) -> None:
        if self.running < self._limits.running and not self._waiting:
            self.running += 1
            return
        self._check_room(key)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()  # it was this one's turn already
            else:
                self._forget(key, turn)
            raise

    def _check_room(self, key: str) -> None:
        """Refuse a request, or make room: where all places are taken, a key's newest request goes that has most.

        Raises:
            QueueFull: there is no room for this one.
        """
        mine = len(self._waiting.get(key, ()))
        if mine >= self._limits.waiting_per_key:
            raise self._full(mine, "of yours ")
        if self.waiting < self._limits.waiting:
            return
        most = max(self._waiting.values(), key=len)
        if len(most) <= mine + 1:
            raise self._full(self.waiting, "")
        newest = most.pop()
        if not newest.done():
            newest.set_exception(self._full(len(most), "of yours "))

    def _full(self, ahead: int, whose: str) -> QueueFull:
        self.refused += 1
        expected_s = self._run_s * math.ceil(ahead / self._limits.running)
        return QueueFull(f"{ahead} requests {whose}wait already; ask again later", min(expected_s, MAX_RETRY_S))

    def _leave(self) -> None:
        """Give the turn to the next key in the round."""
        while self._waiting:
            key, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[key] = turns  # at the end of the round
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1

    def _forget(self, key: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(key)
        if turns is None or turn not in turns:
            return
        turns.remove(turn)
        if not turns:
            del self._waiting[key]
