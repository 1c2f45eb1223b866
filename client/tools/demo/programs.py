"""Canopy's programs as child processes: started as a user would start them, ended with their parent."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from swarm.base.errors import RegistryError

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 8.0


@dataclass(frozen=True, slots=True)
class RunningProgram:
    """A program that was started.

    Attributes:
        log: the file that its output goes to.
    """

    process: asyncio.subprocess.Process
    log: Path

    async def wait_for(self, pattern: str) -> str:
        """The first match in its output.

        Raises:
            RegistryError: it ended, or no match came within `START_TIMEOUT_S`.
        """
        for _ in range(int(START_TIMEOUT_S / 0.1)):
            found = re.search(pattern, self.log.read_text())
            if found is not None:
                return found[0]
            if self.process.returncode is not None:
                break
            await asyncio.sleep(0.1)
        last = (self.log.read_text().strip().splitlines() or ["it said nothing"])[-1]
        raise RegistryError(f"{self.log.stem} did not start: {last}")


@asynccontextmanager
async def start_program(
    name: str, arguments: Sequence[str], folder: Path, inside: Sequence[str] = ()
) -> AsyncIterator[RunningProgram]:
    """Run a module; leaving sends it SIGTERM, and SIGKILL if it does not end.

    Args:
        name: of the program, and of its log file.
        arguments: the module, such as `node.cli`, and its arguments.
        folder: where the log file goes.
        inside: a command that the program is run by, such as `nsenter …` for another network.
    """
    log = folder / f"{name}.log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CANOPY_SWARMS": "none"}
    environment["XDG_STATE_HOME"] = str(folder)  # `node status` tells of the user's own nodes
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *inside,
            *(sys.executable, "-m", *arguments),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the demo alone, which ends them in order
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )
    try:
        yield RunningProgram(process, log)
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def end_with_parent() -> None:
    """Called in the child before exec: the kernel sends it SIGTERM when its parent dies, however it dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
