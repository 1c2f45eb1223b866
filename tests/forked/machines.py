"""Nodes on emulated machines, forked of the shared server; in place of `client.demo.programs.start_program`."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from client.demo.programs import STOP_TIMEOUT_S, RunningProgram, start_program
from tests.forked.program import FORKED, ForkedPopen, shared_server


class ForkedProcess:
    """What a running program needs of asyncio's process."""

    def __init__(self, program: subprocess.Popen[Any]) -> None:
        self._program = program
        self.pid = program.pid

    @property
    def returncode(self) -> int | None:
        return self._program.poll()

    def terminate(self) -> None:
        self._program.terminate()

    async def wait(self) -> int:
        return await asyncio.to_thread(self._program.wait)

    async def end(self) -> None:
        """Wait until it has ended after SIGTERM, and kill it if it does not."""
        self._program.terminate()
        try:
            await asyncio.wait_for(self.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._program.kill()
            await self.wait()


@asynccontextmanager
async def forked_program(
    name: str, arguments: Sequence[str], folder: Path, inside: Sequence[str] = ()
) -> AsyncIterator[RunningProgram]:
    """As `start_program`, for what is run by `nsenter --net=FILE -- env NAME=VALUE …`. No cache is read but our own.

    Args:
        name: of the program, and of its log file.
        arguments: the module and its arguments.
        folder: where the log file goes.
        inside: as above.
    """
    if arguments[0] not in FORKED:
        async with start_program(name, arguments, folder, inside) as running:
            yield running
        return
    enters, network, *between = inside[:4]
    assert (enters, network[:6], between) == ("nsenter", "--net=", ["--", "env"])
    own = dict(word.split("=", 1) for word in inside[4:])
    server, log = await asyncio.to_thread(shared_server), folder / f"{name}.log"
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CANOPY_SWARMS": "none"}
    with log.open("wb") as output:
        program = ForkedPopen(
            server,
            arguments,
            network=network[6:],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**given, "XDG_STATE_HOME": str(folder), **own},
            start_new_session=True,
        )
    with program:
        process = ForkedProcess(program)
        try:
            yield RunningProgram(cast("asyncio.subprocess.Process", process), log)
        finally:
            await process.end()
