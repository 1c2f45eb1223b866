"""A program on an emulated machine that takes jobs and tells events, each a line of JSON over its standard streams."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from client.tools.demo.programs import STOP_TIMEOUT_S, end_with_parent
from swarm.base.errors import SwarmError

ANSWER_S: Final = 150.0
"""How long a program may take to do anything that it is asked."""
MAX_LINE_BYTES: Final = 1 << 20


class JsonProgram:
    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    async def send(self, job: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None, "piped"
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        await self._process.stdin.drain()

    async def next(self) -> dict[str, Any]:
        """What it tells next.

        Raises:
            SwarmError: it has ended.
        """
        assert self._process.stdout is not None, "piped"
        line = await self._process.stdout.readline()
        if not line:
            last = (self._log.read_text(encoding="utf-8").strip().splitlines() or ["it said nothing"])[-1]
            raise SwarmError(f"{self._log.stem} has ended: {last}")
        told: dict[str, Any] = json.loads(line)
        return told

    async def hear(self, event: str) -> dict[str, Any]:
        """The next event of this kind; others are passed over.

        Raises:
            SwarmError: it has ended.
            TimeoutError: it takes too long.
        """
        async with asyncio.timeout(ANSWER_S):
            while (told := await self.next())["event"] != event:
                pass
        return told

    async def end(self) -> None:
        """Close its standard input, after which it ends."""
        assert self._process.stdin is not None, "piped"
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def json_program(
    name: str, arguments: Sequence[str], folder: Path, inside: Sequence[str] = ()
) -> AsyncIterator[JsonProgram]:
    """Run a module; leaving ends it.

    Args:
        name: of its log file, which takes its standard error.
        inside: a command that the program is run by.
    """
    log = folder / f"{name}.log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(*inside, sys.executable, "-m", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is this program's, whose end closes the pipe
            preexec_fn=end_with_parent,
        )
    program = JsonProgram(process, log)
    try:
        yield program
    finally:
        await program.end()


def tell(event: str, **words: object) -> None:
    """In such a program: tell an event."""
    sys.stdout.write(json.dumps({"event": event, **words}) + "\n")
    sys.stdout.flush()


async def jobs() -> AsyncIterator[dict[str, Any]]:
    """In such a program: the jobs, until standard input closes."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)
