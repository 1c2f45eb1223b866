"""Nodes and clients on emulated machines, forked of the shared server in place of being started."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from benchmarks.emulation.json_program import MAX_LINE_BYTES, JsonProgram
from client.tools.demo.programs import STOP_TIMEOUT_S, RunningProgram, start_program
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


class ForkedTalk(ForkedProcess):
    """What a program that is told and tells lines needs of it.

    Attributes:
        stdin: where it reads; each line is short enough for the pipe to take it at once.
        stdout: what it tells.
    """

    def __init__(self, program: subprocess.Popen[Any], stdout: asyncio.StreamReader) -> None:
        super().__init__(program)
        self.stdin, self.stdout = self, stdout
        assert program.stdin is not None
        self._typed = program.stdin

    @classmethod
    async def with_program(cls, program: subprocess.Popen[Any]) -> ForkedTalk:
        """Of a program whose standard input and output are pipes."""
        stdout = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(stdout)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, program.stdout)
        return cls(program, stdout)

    def write(self, line: bytes) -> None:
        self._typed.write(line)
        self._typed.flush()

    async def drain(self) -> None:
        """Nothing is left to write."""

    def close(self) -> None:
        self._typed.close()

    def kill(self) -> None:
        self._program.kill()


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
    log = folder / f"{name}.log"
    given = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CANOPY_SWARMS": "none", "XDG_STATE_HOME": str(folder)}
    with log.open("wb") as output:
        program = await _forked(arguments, inside, given, stdout=output, stderr=subprocess.STDOUT)
    with program:
        process = ForkedProcess(program)
        try:
            yield RunningProgram(cast("asyncio.subprocess.Process", process), log)
        finally:
            await process.end()


@asynccontextmanager
async def forked_json_program(
    name: str, arguments: Sequence[str], folder: Path, inside: Sequence[str] = ()
) -> AsyncIterator[JsonProgram]:
    """As `json_program`, for what is run like that too."""
    log = folder / f"{name}.log"
    with log.open("wb") as errors:
        program = await _forked(arguments, inside, {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=errors)
    with program:
        running = JsonProgram(cast("asyncio.subprocess.Process", await ForkedTalk.with_program(program)), log)
        try:
            yield running
        finally:
            await running.end()


async def _forked(
    arguments: Sequence[str],
    inside: Sequence[str],
    variables: Mapping[str, str],
    **streams: Any,  # noqa: ANN401 - as Popen
) -> ForkedPopen:
    enters, network, *between = inside[:4]
    assert (enters, network[:6], between) == ("nsenter", "--net=", ["--", "env"])
    own = dict(word.split("=", 1) for word in inside[4:])
    return ForkedPopen(
        await asyncio.to_thread(shared_server),
        arguments,
        namespaces=[network[6:]],
        stdin=subprocess.PIPE,
        **streams,
        env={**os.environ, **variables, **own},
        start_new_session=True,
    )
