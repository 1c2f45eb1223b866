"""Machines that keep a connection to the relay so that others reach them through it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from swarm.errors import RemoteProtocolError
from swarm.ids import PeerId
from swarm.relay.openings import DEAD_S, PING_S
from swarm.relay.visits import Visit

MAX_UNSAID: Final = 64
"""Lines that wait for a machine that does not read."""
MAX_HEARD: Final = 8
"""Lines that a machine may say between two pings; it has to say one."""
_PONG: Final = b"PONG"


class Machine:
    """One machine that is here.

    Attributes:
        peer: its name, which it has proved.
        visit: its standing connection.
    """

    def __init__(self, peer: PeerId, visit: Visit, clock: Callable[[], float] = time.monotonic) -> None:
        """Say nothing yet.

        Args:
            peer: its name.
            visit: where it stands.
            clock: a monotonic one, in seconds.
        """
        self.peer = peer
        self.visit = visit
        self._clock = clock
        self._unsaid: asyncio.Queue[str] = asyncio.Queue(MAX_UNSAID)
        self._heard_at = clock()
        self._heard = 0

    def say(self, line: str) -> bool:
        """Let a line be said soon; False where too many wait already."""
        try:
            self._unsaid.put_nowait(line)
        except asyncio.QueueFull:
            return False
        return True

    async def run(self) -> None:
        """Stay until it goes, is silent for 15 s, or says what a machine does not say.

        Raises:
            RemoteProtocolError: it said that.
        """
        odd: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write())
                tasks.create_task(self._read())
                await self._ping()
        except* OSError:
            pass
        except* RemoteProtocolError as group:
            odd = group.exceptions[0]
        if odd is not None:
            raise odd

    async def _write(self) -> None:
        while True:
            line = await self._unsaid.get()
            async with asyncio.timeout(DEAD_S):
                await self.visit.connection.say(line)

    async def _read(self) -> None:
        while True:
            line = await self.visit.connection.read_line(len(_PONG) + 2)
            self._heard += 1
            if line.strip() != _PONG or self._heard > MAX_HEARD:
                raise RemoteProtocolError("pong", "a machine says PONG, and once per PING")
            self._heard_at = self._clock()

    async def _ping(self) -> None:
        while self._clock() - self._heard_at < DEAD_S:
            self._heard = 0
            self.say("PING")
            await asyncio.sleep(PING_S)
        raise TimeoutError("silent")
