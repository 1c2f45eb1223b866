"""The client of `benchmarks.control.cells`: each text plain and as the controller chooses, in turns.

Another client makes the same texts with trees of one size. Reads its job as JSON from the command line and writes what
it measured to the file that the job names.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch

from benchmarks.emulation.swarm import covered
from benchmarks.simulation.chain import CountedDrafter
from benchmarks.simulation.profiles import FIRST_SEED
from benchmarks.simulation.recorded import prompts_of
from client.base.options import DraftOptions
from client.base.stats import Result, SweepMeasurement
from client.base.target import Target
from client.draft.drafter import NO_PICKS, TreeDrafter
from client.draft.loading import LoadedDrafter, ModelName, load_drafter
from client.draft.search.tree import NO_LIMIT, DraftTree, Picks, StopRule
from client.library.aio import AsyncSwarm
from swarm.base.library_logging import quiet_libraries
from swarm.base.process_limits import freeze_imports
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Sampling

IDLE_S = 5.0
PLAIN, FIXED, CHOSEN = "plain", "fixed", "chosen"
FIXED_NODES = 32
METHODS: dict[str, dict[str, Any]] = {PLAIN: {"nodes": 0}, CHOSEN: {}, FIXED: {"nodes": FIXED_NODES}}


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure. Each pair has a seed of its own.

    Attributes:
        prompts: Prompts of each kind, taken in turn for the pairs.
        root: The process that all programs of this benchmark descend from.
    """

    peer: str
    cells: tuple[tuple[str, float], ...]
    prompts: int
    pairs: int
    new_tokens: int
    result: str
    root: int


class TimedDrafter(CountedDrafter):
    """Notes the CPU time of what it does.

    Attributes:
        grown: Of each tree, each time: milliseconds, passes of the model, rows that it ran, and nodes that the tree has
            then.
    """

    def __init__(self, drafter: TreeDrafter) -> None:
        super().__init__(drafter)
        self.grown: list[tuple[float, int, int, int]] = []
        self.learned: list[float] = []

    def grow(
        self, sequence: Sequence[int], nodes: int, depth: int, sampling: Sampling, stop_rule: StopRule = NO_LIMIT
    ) -> DraftTree:
        """Grow a tree, and note its time."""
        began_s = time.thread_time()
        tree = super().grow(sequence, nodes, depth, sampling, stop_rule)
        self.grown.append((1e3 * (time.thread_time() - began_s), self.passes, self.rows, len(tree)))
        return tree

    def learn(self, tree: DraftTree, picks: Picks, others: Picks = NO_PICKS) -> None:
        """Learn, and note the time."""
        began_s = time.thread_time()
        super().learn(tree, picks, others)
        self.learned.append(1e3 * (time.thread_time() - began_s))

    def told(self) -> dict[str, Any]:
        """What was noted since the last call."""
        grown, learned, self.grown, self.learned = self.grown, self.learned, [], []
        return {
            "grown": [(round(ms, 2), *what) for ms, *what in grown],
            "learned": [round(ms, 2) for ms in learned],
        }


def load_timed(drafters: list[TimedDrafter]) -> Callable[[ModelName, Target, DraftOptions, str | None], LoadedDrafter]:
    """Loads what is to draft, and keeps it where its notes can be read."""

    def load(model: ModelName, target: Target, wanted: DraftOptions, revision: str | None = None) -> LoadedDrafter:
        made = load_drafter(model, target, wanted, revision)
        assert isinstance(made.drafter, TreeDrafter)
        drafters.append(TimedDrafter(made.drafter))
        return replace(made, drafter=drafters[-1])

    return load


async def measure(job: Job, drafters: Sequence[TimedDrafter]) -> list[dict[str, Any]]:
    """All runs; a cell's clients begin knowing nothing, and the last of `drafters` is that of the last one."""
    runs = []
    for kind, temperature in job.cells:
        prompts = prompts_of(kind, job.prompts)
        for ways in ((PLAIN, CHOSEN), (FIXED,)):
            connecting = AsyncSwarm.connect(TARGET, peers=[job.peer], draft=DRAFT, threads=1, calibration=None)
            async with connecting as swarm:
                await covered(swarm)
                idle = await _idle(job.root)
                drafters[-1].told()  # of the warm-up
                for pair in range(job.pairs):
                    place = pair % len(prompts)
                    if place == 0:
                        swarm.forget_texts()  # all texts were generated once
                    sampling: dict[str, Any] = {"temperature": temperature, "seed": FIRST_SEED + pair}
                    for way in ways if pair % 2 == 0 else reversed(ways):
                        before_ms = cpu_ms(job.root)
                        result = await swarm.generate(
                            prompts[place], max_new_tokens=job.new_tokens, **sampling, **METHODS[way]
                        )
                        took = {"cpu_ms": cpu_ms(job.root) - before_ms, "idle": idle}
                        speed = f"{result.stats.tokens_per_s:.1f} tokens/s"
                        print(f"{kind}, T {temperature:g}, pair {pair}, {way}: {speed}", flush=True)  # noqa: T201
                        runs.append(
                            {"kind": kind, "temperature": temperature, "pair": pair, "way": way}
                            | _numbers_of(result)
                            | took
                            | drafters[-1].told()
                        )
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


def _numbers_of(result: Result) -> dict[str, Any]:
    sweeps = [_sweep(sweep) for sweep in result.stats.sweeps]
    return {"tokens": list(result.tokens), "tokens_per_s": result.stats.tokens_per_s, "sweeps": sweeps}


def _sweep(sweep: SweepMeasurement) -> dict[str, Any]:
    return {
        "rows": sweep.nodes + (not sweep.is_part),
        "is_part": sweep.is_part,
        "rounds": sweep.rounds,
        "draft_ms": round(sweep.draft_ms, 2),
        "total_ms": round(sweep.total_ms, 2),
        "queue_ms": [round(hop.queue_ms, 2) for hop in sweep.hops],
        "compute_ms": [round(hop.compute_ms, 2) for hop in sweep.hops],
        "other_ms": [round(hop.other_ms, 2) for hop in sweep.hops],
    }


def main() -> None:
    torch.set_num_threads(1)
    quiet_libraries()
    freeze_imports()
    words = json.loads(sys.argv[1])
    job = Job(**(words | {"cells": tuple((kind, float(temperature)) for kind, temperature in words["cells"])}))
    drafters: list[TimedDrafter] = []
    with patch("client.library.aio.load_drafter", load_timed(drafters)):
        runs = asyncio.run(measure(job, drafters))
    Path(job.result).write_text(json.dumps(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
