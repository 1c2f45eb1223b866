"""The client's part of a benchmark, on its host of an emulated network: every method in turn, then the floor.

Reads its job as JSON from the command line and writes what it measured to the file that the job names.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.emulation.client_process import work
from benchmarks.emulation.swarm import covered
from benchmarks.simulation.acceptance import demo_prompts
from benchmarks.speed.bare import BareTimer
from benchmarks.speed.decoding_methods import TREES, Case, Method, canopy_methods, one_machine_methods, star_methods
from benchmarks.speed.star import open_star
from client.library.aio import AsyncSwarm
from swarm.demo import DRAFT, TARGET
from swarm.layers import Span

FIRST_SEED = 11
BARE_REPEATS = 8


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure.

    Attributes:
        star: Addresses of star servers; none if they are not compared.
        one_machine: Whether one machine with the whole model is measured too.
        new_tokens: New tokens of each text.
    """

    peer: str
    spans: tuple[str, ...]
    star: tuple[str, ...]
    one_machine: bool
    temperatures: tuple[float, ...]
    pairs: int
    new_tokens: int
    result: str


async def measure(job: Job) -> dict[str, Any]:
    """All runs of every method, interleaved, and the bare parts of a sweep, timed between them."""
    rig = BareTimer([Span.parse(span) for span in job.spans])
    rig.load()
    rig.teach(job.temperatures)
    runs: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        connecting = AsyncSwarm.connect(TARGET, peers=[job.peer], draft=DRAFT, threads=1, calibration=None)
        swarm = await stack.enter_async_context(connecting)
        ways = canopy_methods(swarm)
        if job.star:
            ways += star_methods(await stack.enter_async_context(open_star(job.star)))
        ways += one_machine_methods() if job.one_machine else []
        await covered(swarm)
        prompts = [tuple(prompt) for prompt in demo_prompts(job.pairs)]
        for way in ways:
            await way.run(Case(prompts[0], 0.0, 1, 8))
        for number in range(job.pairs):
            prompt = prompts[number % len(prompts)]
            for temperature in job.temperatures:
                case = Case(prompt, temperature, FIRST_SEED + number, job.new_tokens)
                runs += [run async for run in _round(ways, case, number)]
                for nodes in (0, *TREES):
                    rig.sample(nodes, temperature, BARE_REPEATS)
    bare = [asdict(rig.result(nodes, temperature)) for nodes in (0, *TREES) for temperature in job.temperatures]
    return {"runs": runs, "bare": bare}


async def _round(ways: list[Method], case: Case, number: int) -> Any:  # noqa: ANN401
    """One case through every method, beginning with another one each time."""
    able = [way for way in ways if way.sampled or case.temperature == 0]
    start = number % len(able)
    for way in able[start:] + able[:start]:
        run = await way.run(case)
        said = f"pair {number}, temperature {case.temperature:g}, {way.name}: {run.tokens_per_s:.1f} tokens/s"
        print(said, flush=True)  # noqa: T201
        yield {"pair": number, "way": way.name, "nodes": way.nodes, "temperature": case.temperature, **asdict(run)}


if __name__ == "__main__":
    work(Job, measure)
