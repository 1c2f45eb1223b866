"""The client's part of `benchmarks.cells`: each text plain and as goodput chooses, in turns, with what sweeps took.

Reads its job as JSON from the command line and writes what it measured to the file that the job names.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.recorded import prompts_of
from benchmarks.replay import FIRST_SEED
from benchmarks.worker import covered
from client.aio import AsyncSwarm
from client.stats import Result, SweepStats
from swarm.demo import DRAFT, TARGET
from swarm.quiet import quiet_libraries

IDLE_S = 5.0
PLAIN, CHOSEN = "plain", "chosen"


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure. cells: kinds of text and temperatures. prompts: of each kind, taken in turn for the pairs.

    root: the process that all programs of this benchmark descend from.
    """

    peer: str
    cells: tuple[tuple[str, float], ...]
    prompts: int
    pairs: int
    new_tokens: int
    result: str
    root: int


async def measure(job: Job) -> list[dict[str, Any]]:
    """All runs; a cell's client begins knowing nothing."""
    runs = []
    for kind, temperature in job.cells:
        connecting = AsyncSwarm.connect(TARGET, peers=[job.peer], draft=DRAFT, threads=1, calibration=None)
        async with connecting as swarm:
            await covered(swarm)
            idle = await _idle(job.root)
            prompts = prompts_of(kind, job.prompts)
            for pair in range(job.pairs):
                place = pair % len(prompts)
                order = (PLAIN, CHOSEN) if pair % 2 == 0 else (CHOSEN, PLAIN)
                for way in order:
                    options: dict[str, Any] = {"nodes": 0} if way == PLAIN else {}
                    before_ms = cpu_ms(job.root)
                    result = await swarm.generate(
                        prompts[place],
                        max_new_tokens=job.new_tokens,
                        temperature=temperature,
                        seed=FIRST_SEED + place,
                        **options,
                    )
                    told = _told(result) | {"cpu_ms": cpu_ms(job.root) - before_ms, "idle": idle}
                    said = f"{kind}, T {temperature:g}, pair {pair}, {way}: {result.stats.tokens_per_s:.1f} tokens/s"
                    print(said, flush=True)  # noqa: T201
                    runs.append({"kind": kind, "temperature": temperature, "pair": pair, "way": way, **told})
    return runs


async def _idle(root: int) -> float:
    """The part of a CPU that all programs use while they have nothing to do."""
    before_ms, started_s = cpu_ms(root), time.monotonic()
    await asyncio.sleep(IDLE_S)
    return (cpu_ms(root) - before_ms) / 1e3 / (time.monotonic() - started_s)


def cpu_ms(root: int) -> float:
    """CPU time of a process and all that descends from it."""
    process, took_s = psutil.Process(root), 0.0
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            took_s += sum(one.cpu_times()[:2])
    return took_s * 1e3


def _told(result: Result) -> dict[str, Any]:
    sweeps = [_sweep(sweep) for sweep in result.stats.sweeps]
    return {"tokens": list(result.tokens), "tokens_per_s": result.stats.tokens_per_s, "sweeps": sweeps}


def _sweep(sweep: SweepStats) -> dict[str, Any]:
    return {
        "rows": sweep.nodes + (not sweep.is_part),
        "is_part": sweep.is_part,
        "rounds": sweep.rounds,
        "draft_ms": sweep.draft_ms,
        "total_ms": sweep.total_ms,
        "queue_ms": [hop.queue_ms for hop in sweep.hops],
        "compute_ms": [hop.compute_ms for hop in sweep.hops],
        "other_ms": [hop.other_ms for hop in sweep.hops],
    }


def main() -> None:
    """Entry point."""
    torch.set_num_threads(1)
    quiet_libraries()
    words = json.loads(sys.argv[1])
    job = Job(**(words | {"cells": tuple((kind, float(temperature)) for kind, temperature in words["cells"])}))
    Path(job.result).write_text(json.dumps(asyncio.run(measure(job))), encoding="utf-8")


if __name__ == "__main__":
    main()
