"""One client of the soak: generates the same few texts again and again and compares each with the undisturbed one.

Reads its job as JSON from the command line; writes a line of JSON per text to the file that the job names; ends after
the text in work when its standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

import torch

from benchmarks.emulation.swarm import covered
from benchmarks.simulation.acceptance import demo_prompts
from client.library.aio import AsyncSwarm
from client.options import GenerateOptions
from client.stats import Result
from swarm.demo import DRAFT, TARGET
from swarm.errors import SwarmError
from swarm.runtime.gc_freeze import freeze_imports
from swarm.runtime.library_logging import quiet_libraries

AFTER_ERROR_S = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate.

    Attributes:
        peer: A bootstrap peer's address.
        number: Of this client; no two clients have the same texts.
        texts: How many different texts.
        new_tokens: New tokens of each text.
        nodes: Tree nodes per sweep (K).
        result: The file for the measurements.
    """

    peer: str
    number: int
    texts: int
    new_tokens: int
    nodes: int
    result: str


@dataclass(frozen=True, slots=True)
class SoakText:
    """One text. Times of day are in seconds.

    Attributes:
        case: Which of the client's texts.
        is_reference: It is the first one of its case, with which later ones are compared.
        is_same: It has the reference's tokens.
        tokens: How many new tokens it has.
        started_at: When it began.
        ended_at: When it ended.
        first_s: Until its first piece.
        pause_s: The longest time between two pieces.
        repairs: Repairs of its chain.
        error: Why it ended early.
    """

    case: int
    is_reference: bool
    is_same: bool
    tokens: int
    started_at: float
    ended_at: float
    first_s: float
    pause_s: float
    repairs: int
    error: str | None = None


async def generate(swarm: AsyncSwarm, prompt: tuple[int, ...], options: GenerateOptions) -> tuple[Result, float, float]:
    """One text, when its first piece came, and the longest time between two pieces."""
    result: Result | None = None
    started = last = time.perf_counter()
    first_s, pause_s = 0.0, 0.0
    async with aclosing(swarm.stream(prompt, **options)) as pieces:
        async for piece in pieces:
            now = time.perf_counter()
            if first_s:
                pause_s = max(pause_s, now - last)
            first_s, last, result = first_s or now - started, now, piece.result
    assert result is not None, "a stream ends with a result or an error"
    return result, first_s, pause_s


async def work(job: Job, say: Callable[[SoakText], None]) -> None:
    """Generate each text once for reference, then all of them until standard input closes."""
    prompts = [tuple(prompt) for prompt in demo_prompts((job.number + 1) * job.texts)[-job.texts :]]
    references: dict[int, tuple[int, ...]] = {}
    async with AsyncSwarm.connect(TARGET, peers=[job.peer], draft=DRAFT, threads=1, calibration=None) as swarm:
        await covered(swarm)
        ending = asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
        for case in cycle(range(job.texts)):
            if ending.done():
                return
            options: GenerateOptions = {"max_new_tokens": job.new_tokens, "nodes": job.nodes, "seed": case}
            options["temperature"] = float(case % 2)
            is_reference, began = case not in references, time.time()
            try:
                result, first_s, pause_s = await generate(swarm, prompts[case], options)
            except SwarmError as error:
                said = f"{type(error).__name__}: {error}"
                say(SoakText(case, is_reference, False, 0, began, time.time(), 0.0, 0.0, 0, said))
                await asyncio.sleep(AFTER_ERROR_S)
                continue
            is_same = result.tokens == references.setdefault(case, result.tokens)
            made, repairs = len(result.tokens), len(result.stats.repairs)
            say(SoakText(case, is_reference, is_same, made, began, time.time(), first_s, pause_s, repairs))


def main() -> None:
    """Entry point."""
    torch.set_num_threads(1)
    quiet_libraries()
    freeze_imports()
    job = Job(**json.loads(sys.argv[1]))
    with Path(job.result).open("w", encoding="utf-8", buffering=1) as lines:
        asyncio.run(work(job, lambda told: print(json.dumps(asdict(told)), file=lines)))


if __name__ == "__main__":
    main()
