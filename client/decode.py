"""The decode loop: prefill, then draft → sweep → walk until the text ends. Source: SpecExec (arXiv 2406.02532), §4.

Exact for any draft: what is emitted are the target's own picks. Owns no network, no model and no text rules.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from client.chain import Chain
from client.draft import Drafter
from client.stats import SweepStats
from client.text import TextStream
from client.walk import Walk
from swarm.budget import Budget
from swarm.messages import Sampling
from swarm.tree import DraftTree


@dataclass(slots=True)
class Job:
    """One generation: what to continue, how, and what came of it.

    prompt: token ids. chunk: nodes per prefill sweep. text: decides where the output ends.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    budget: Budget
    chunk: int
    max_new_tokens: int
    text: TextStream
    drafter: Drafter
    drafting: Executor
    clock: Callable[[], float] = time.perf_counter
    prefill_sweeps: int = 0
    sweeps: list[SweepStats] = field(default_factory=list)

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_new_tokens - len(self.text.tokens)


async def decode(job: Job, chain: Chain, walk: Walk) -> AsyncIterator[str]:
    """Generate; yields text as it becomes certain, possibly "" while a character or a stop string is incomplete.

    Raises:
        SwarmError: what broke the chain; `job.text` holds what was made before.
    """
    await _prefill(job, chain, walk)
    nodes, draft_ms = 0, 0.0
    while True:
        answer = await chain.answer()
        emitted = walk.accept(answer.reply)
        piece = job.text.push(emitted)
        if answer.reply.sequence > job.prefill_sweeps:
            cost = SweepStats(nodes, len(emitted), draft_ms, answer.total_ms, chain.first_link_ms, answer.reply.times)
            job.sweeps.append(cost)
        yield piece
        if job.text.stopped:
            return
        if walk.pending is None:
            continue
        started = job.clock()
        tree = await _draft(job)
        nodes, draft_ms = len(tree.tokens), (job.clock() - started) * 1e3
        chain.send(walk.extend(tree))


async def _prefill(job: Job, chain: Chain, walk: Walk) -> None:
    """Send the prompt in chunks, as far ahead of the replies as the credits allow."""
    for start in range(0, len(job.prompt), job.chunk):
        while walk.in_flight >= chain.credits.sweeps:
            walk.accept((await chain.answer()).reply)
        chunk = job.prompt[start : start + job.chunk]
        chain.send(walk.prefill(chunk, last=start + job.chunk >= len(job.prompt)))
        job.prefill_sweeps += 1


async def _draft(job: Job) -> DraftTree:
    """Grow a tree on the drafting thread: deep enough to be used, never beyond the last token."""
    count = job.budget.nodes(job.tokens_left)
    if count == 0:
        return DraftTree((), ())
    sequence = (*job.prompt, *job.text.tokens)
    grow = job.drafter.grow
    depth = job.tokens_left - 1
    return await asyncio.get_running_loop().run_in_executor(job.drafting, grow, sequence, count, depth, job.sampling)
