"""A benchmark's client part: a program on the client's host of an emulated network, followed until it ends."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.emulation.network import Network
from client.tools.demo.programs import start_program
from swarm.base.errors import RegistryError
from swarm.base.library_logging import quiet_libraries

PROGRESS_S = 5


async def run_part(module: str, job: dict[str, Any], net: Network, folder: Path, console: Console) -> Any:  # noqa: ANN401
    """Run `python -m module JOB` on the network's last host, pass its progress on, and read what it wrote.

    `result` of the job names the file that it writes, which is JSON.

    Raises:
        RegistryError: it failed; says what every program said last.
    """
    arguments = [module, json.dumps(job)]
    async with start_program("worker", arguments, folder, net.command(net.plan.hosts - 1, [])) as worker:
        shown = 0
        while worker.process.returncode is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(worker.process.wait(), PROGRESS_S)
            said = worker.log.read_text().splitlines()
            for line in said[shown:]:
                console.print(line, style="dim", markup=False, soft_wrap=True)
            shown = len(said)
    if worker.process.returncode != 0:
        raise RegistryError(f"the client's part ended with {worker.process.returncode}: {_last_words(folder)}")
    return read(job["result"])


def read(path: str) -> Any:  # noqa: ANN401
    return json.loads(Path(path).read_text(encoding="utf-8"))


def work(job_type: Callable[..., Any], measure: Callable[[Any], Awaitable[object]]) -> None:
    """Be the part: measure what the command line's job says, with one thread, and write it where the job says."""
    torch.set_num_threads(1)
    quiet_libraries()
    words = json.loads(sys.argv[1])
    job = job_type(**{name: tuple(value) if isinstance(value, list) else value for name, value in words.items()})

    async def measured() -> object:
        return await measure(job)

    Path(job.result).write_text(json.dumps(asyncio.run(measured())), encoding="utf-8")


def _last_words(folder: Path) -> str:
    logs = sorted(folder.glob("*.log"))
    return "\n".join(f"--- {log.stem}\n" + "\n".join(log.read_text().splitlines()[-8:]) for log in logs)
