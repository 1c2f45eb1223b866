"""The attackers' side of `benchmarks.redteam.members`: starts that process, and tells its members what to file."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgpack

from benchmarks.redteam.ground import Tally
from swarm.base.ids import PeerId
from swarm.base.tasks import TaskScope
from swarm.directory.identity import Identity
from swarm.directory.model_pointer import Filing

ANSWER_S = 60.0
LINE_BYTES = 1 << 20
LEAVE_S = 3.0


class Membership:
    """Memberships of the directory, one for each identity that files something; use as `async with`."""

    def __init__(self, join: str, folder: Path, tally: Tally, scope: TaskScope) -> None:
        self._join = join
        self._scope = scope
        self._folder = folder / f"members {secrets.token_hex(4)}"
        self._tally = tally
        self._paths: dict[PeerId, Path] = {}
        self._waiting: dict[int, asyncio.Future[list[bool]]] = {}
        self._numbers = count()
        self._process: Process

    async def __aenter__(self) -> Membership:
        """Start the process; nobody joins yet."""
        self._folder.mkdir()
        command = (sys.executable, "-m", "benchmarks.redteam.members", self._join)
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, start_new_session=True, limit=LINE_BYTES
        )
        self._scope.spawn(self._read())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def file(self, who: Identity, filings: Sequence[Filing], expires_at: float) -> list[bool]:
        """File items over an identity's own membership, whosever they are; which of them some peer took.

        Without items it only joins. Nothing is taken where it cannot join, or no answer comes.
        """
        if who.peer_id not in self._paths:
            path = self._paths[who.peer_id] = self._folder / f"{who.peer_id}.key"
            self._tally.connections += 1
            who.save(path)
        entries = [(one.key, one.subkey, one.data, expires_at) for one in filings]
        number = next(self._numbers)
        message = msgpack.packb([number, str(self._paths[who.peer_id]), entries])
        self._tally.sent_bytes += len(message)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                self._process.stdin.write(message)
                await self._process.stdin.drain()
                return await self._waiting[number]
        except (TimeoutError, OSError):
            return [False] * len(filings)
        finally:
            del self._waiting[number]

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            number, _, digits = line.decode().strip().partition(" ")
            answer = self._waiting.get(int(number))
            if answer is not None and not answer.done():
                answer.set_result([digit == "1" for digit in digits])
