"""The client's part of the hedging benchmark: the same prompts over one replica, over the other, and over both.

Reads its job as JSON from the command line and writes what it measured to the file that the job names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.emulation.client_process import work
from benchmarks.emulation.swarm import covered
from benchmarks.simulation.acceptance import demo_prompts
from client.library.aio import AsyncSwarm
from client.library.session import SessionOpener
from swarm.demo import DRAFT, TARGET
from swarm.routing.route import Route


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure.

    Attributes:
        steady: Peer id of the steady replica of the middle span.
        stuttering: Peer id of the stuttering one.
        new_tokens: New tokens of each text.
        nodes: Tree nodes per sweep (K).
    """

    peer: str
    steady: str
    stuttering: str
    rounds: int
    new_tokens: int
    nodes: int
    result: str


async def measure(job: Job) -> dict[str, list[dict[str, Any]]]:
    """Runs by route, interleaved; every route begins a round in turn."""
    ways: Mapping[str, tuple[bool, frozenset[str]]] = {
        "steady holder": (False, frozenset({job.stuttering})),
        "stuttering holder": (False, frozenset({job.steady})),
        "both, hedged": (True, frozenset()),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    async with AsyncSwarm.connect(TARGET, peers=[job.peer], draft=DRAFT, threads=1, calibration=None) as swarm:
        await covered(swarm)
        route, opener = SessionOpener.route, swarm._opener
        unwanted: frozenset[str] = frozenset()

        async def wanted(self: SessionOpener, *, avoid: frozenset[str] = frozenset()) -> Route:
            return await route(self, avoid=avoid | unwanted)

        SessionOpener.route = wanted  # type: ignore[method-assign]
        for number, prompt in enumerate([demo_prompts(1)[0], *demo_prompts(job.rounds)]):
            names = list(ways)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                hedge, unwanted = ways[name]
                swarm._opener = replace(opener, hedge=hedge)
                result = await swarm.generate(prompt, max_new_tokens=job.new_tokens, nodes=job.nodes)
                stats = result.stats
                assert bool(stats.replicas) == hedge, "it is the way that it should be"
                if number:  # the first round warms up
                    found[name].append(
                        {
                            "tokens": result.tokens,
                            "tokens_per_s": stats.tokens_per_s,
                            "sweep_ms": [sweep.draft_ms + sweep.total_ms for sweep in stats.sweeps],
                            "repairs": len(stats.repairs),
                            "differences": stats.differences,
                        }
                    )
                print(f"round {number}, {name}: {stats.tokens_per_s:.1f} tokens/s", flush=True)  # noqa: T201
    return found


if __name__ == "__main__":
    work(Job, measure)
