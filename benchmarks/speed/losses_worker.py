"""The client of `benchmarks.speed.losses`: each text plain and as the controller chooses, in turns.

Reads its job as JSON from the command line and writes what it measured to the file that the job names.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.emulation.client_process import work
from benchmarks.emulation.swarm import covered
from benchmarks.simulation.acceptance import demo_prompts
from benchmarks.simulation.profiles import FIRST_SEED
from client.library.aio import AsyncSwarm
from client.stats import Result
from swarm.demo import DRAFT, TARGET

PLAIN, CHOSEN = "plain", "chosen"
WAYS: dict[str, int | None] = {PLAIN: 0, CHOSEN: None}


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure.

    Attributes:
        pairs: Passages, one per pair.
        new_tokens: New tokens of each text.
    """

    peer: str
    temperature: float
    pairs: int
    new_tokens: int
    result: str


async def measure(job: Job) -> list[dict[str, Any]]:
    runs, prompts = [], demo_prompts(job.pairs)
    async with AsyncSwarm.connect(TARGET, peers=[job.peer], draft=DRAFT, threads=1, calibration=None) as swarm:
        await covered(swarm)
        await swarm.generate(prompts[0], max_new_tokens=8)
        for pair in range(job.pairs):
            swarm.forget_texts()
            texts = []
            for way in WAYS if pair % 2 == 0 else reversed(WAYS):
                result, waits = await _generate(swarm, prompts[pair % len(prompts)], WAYS[way], job, FIRST_SEED + pair)
                stats = result.stats
                repairs = [repair.seconds for repair in stats.repairs]
                said = f", repaired in {', '.join(f'{s:.2f}' for s in repairs)} s" if repairs else ""
                print(f"pair {pair}, {way}: {stats.tokens_per_s:.1f} tokens/s{said}", flush=True)  # noqa: T201
                texts.append(result.tokens)
                runs.append(
                    {"pair": pair, "way": way, "tokens": stats.tokens, "seconds": stats.total_s}
                    | {"tokens_per_s": stats.tokens_per_s, "repairs": repairs, "waits": [max(waits)]}
                    | {"is_same": texts[0] == result.tokens}
                )
    return runs


async def _generate(
    swarm: AsyncSwarm, prompt: list[int], nodes: int | None, job: Job, seed: int
) -> tuple[Result, list[float]]:
    """One text, and the seconds between its pieces."""
    result, waits, before = None, [0.0], time.monotonic()
    async for piece in swarm.stream(
        prompt, max_new_tokens=job.new_tokens, temperature=job.temperature, seed=seed, nodes=nodes
    ):
        now, result = time.monotonic(), piece.result
        waits.append(now - before)
        before = now
    assert result is not None, "a stream ends with a result or an error"
    return result, waits


if __name__ == "__main__":
    work(Job, measure)
