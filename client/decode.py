"""The decode loop: prefill, then draft → sweep → walk until the text ends. Source: SpecExec (arXiv 2406.02532), §4.

Exact for any draft: what is emitted are the target's own picks. Owns no network, no model and no text rules.
"""

from __future__ import annotations

import asyncio
import logging
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

logger = logging.getLogger(__name__)


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
    while True:
        nodes, draft_ms = await _speculate(job, chain, walk)
        while walk.pending is None and not job.text.stopped:
            answer = await chain.answer()
            emitted = walk.accept(answer.reply)
            piece = job.text.push(emitted)
            if answer.reply.sequence > job.prefill_sweeps:
                times = answer.reply.times
                cost = SweepStats(nodes, len(emitted), draft_ms, answer.total_ms, chain.first_link_ms, times)
                job.sweeps.append(cost)
                logger.debug("sweep %d: %d nodes, %d tokens", answer.reply.sequence, nodes, len(emitted))
            yield piece
        if job.text.stopped:
            return


async def _prefill(job: Job, chain: Chain, walk: Walk) -> None:
    """Send all of the prompt but its last token, which the first tree hangs from, as far ahead as the credits allow.

    The draft then reads the prompt while the chain does.
    """
    *forced, walk.pending = job.prompt
    for start in range(0, len(forced), job.chunk):
        while walk.in_flight >= max(1, chain.credits.sweeps - 1):
            walk.accept((await chain.answer()).reply)
        chain.send(walk.prefill(forced[start : start + job.chunk], last=False))
        job.prefill_sweeps += 1


async def _speculate(job: Job, chain: Chain, walk: Walk) -> tuple[int, float]:
    """Grow a tree below the pending token and send both; returns its size and what drafting took in milliseconds."""
    started = job.clock()
    tree = await _draft(job, walk.room - 1)
    draft_ms = (job.clock() - started) * 1e3
    chain.send(walk.extend(tree))
    return len(tree.tokens), draft_ms


async def _draft(job: Job, room: int) -> DraftTree:
    """Grow a tree on the drafting thread, within the credits: deep enough to be used, never beyond the last token."""
    count = min(job.budget.nodes(job.tokens_left), room)
    if count <= 0:
        return DraftTree((), ())
    sequence = (*job.prompt, *job.text.tokens)
    grow = job.drafter.grow
    depth = job.tokens_left - 1
    return await asyncio.get_running_loop().run_in_executor(job.drafting, grow, sequence, count, depth, job.sampling)
