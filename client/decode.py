"""The decode loop: prefill, then draft → sweep → walk until the text ends. Source: SpecExec (arXiv 2406.02532), §4.

Exact for any draft: what is emitted are the target's own picks. Owns no network, no model and no text rules.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol

from client.answers import Answer
from client.draft import Drafter
from client.stats import SweepStats
from client.text import TextStream
from client.walk import Walk
from swarm.budget import Budget
from swarm.errors import Unfinished
from swarm.ids import TreeNodeId
from swarm.messages import Credits, Reply, Sampling, Sweep
from swarm.tree import DraftTree

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """One generation: what to continue, how, and what came of it.

    prompt: token ids. chunk: nodes per prefill sweep. text: decides where the output ends. kept_tokens: of the prompt,
    those that the session held already. options: what it was asked for. resumed_tokens: were in `text` from the start.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    budget: Budget
    chunk: int
    max_new_tokens: int
    text: TextStream
    drafter: Drafter
    drafting: Executor
    options: Mapping[str, Any] = field(default_factory=dict)
    resumed_tokens: int = 0
    clock: Callable[[], float] = time.perf_counter
    kept_tokens: int = 0
    prefill_sweeps: int = 0
    sweeps: list[SweepStats] = field(default_factory=list)

    @property
    def nodes(self) -> int:
        """Most tree nodes of a sweep, its pending token not counted."""
        return self.budget.nodes(self.max_new_tokens)

    @property
    def sequence(self) -> tuple[int, ...]:
        """Every certain token."""
        return (*self.prompt, *self.text.tokens)

    def unfinished(self) -> Unfinished:
        """What it takes to go on later."""
        return Unfinished(self.prompt, {**self.options, "seed": self.sampling.seed}, tuple(self.text.tokens))

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_new_tokens - len(self.text.tokens)


class Trips(Protocol):
    """What the loop needs of a chain."""

    @property
    def credits(self) -> Credits:
        """What may be unanswered."""

    @property
    def first_link_ms(self) -> float:
        """One-way time to hop 0."""

    def send(self, sweep: Sweep) -> None:
        """Start a sweep."""

    async def answer(self) -> Answer:
        """The next reply."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A tree below the node `root`, and what the target picked after its nodes."""

    tree: DraftTree
    root: TreeNodeId
    reply: Reply


async def decode(job: Job, chain: Trips, walk: Walk) -> AsyncIterator[str]:
    """Generate; yields text as it becomes certain, possibly "" while a character or a stop string is incomplete.

    The session may be new, or hold any sequence, and even sweeps of a generation that was left: what it has in common
    with the prompt does not travel again.

    Raises:
        SwarmError: what broke the chain; `job.text` holds what was made before.
    """
    if job.text.stopped:
        return
    await _prefill(job, chain, walk)
    prefilled = walk.state.sequence
    lesson: Lesson | None = None
    while True:
        tree, root, draft_ms = await _speculate(job, chain, walk)
        await _learn(job, lesson)  # from the last sweep, while this one is on its way
        lesson = None
        while walk.pending is None and not job.text.stopped:
            answer = await chain.answer()
            emitted = walk.accept(answer.reply)
            piece = job.text.push(emitted)
            if answer.reply.sequence > prefilled:
                times = answer.reply.times
                cost = SweepStats(len(tree), len(emitted), draft_ms, answer.total_ms, chain.first_link_ms, times)
                job.sweeps.append(cost)
                logger.debug("sweep %d: %d nodes, %d tokens", answer.reply.sequence, len(tree), len(emitted))
                lesson = Lesson(tree, root, answer.reply)
            yield piece
        if job.text.stopped:
            await _learn(job, lesson)
            return


async def _prefill(job: Job, chain: Trips, walk: Walk) -> None:
    """Send all of the prompt but its last token, which the first tree hangs from, as far ahead as the credits allow.

    The draft then reads the prompt while the chain does.
    """
    ahead = max(0, chain.credits.sweeps - 2)
    await _await_replies(chain, walk, ahead)
    prompt = job.sequence
    commit, job.kept_tokens = walk.restart(prompt, job.sampling)
    if commit is not None:
        chain.send(commit)
    for start in range(job.kept_tokens, len(prompt) - 1, job.chunk):
        await _await_replies(chain, walk, ahead)
        chain.send(walk.prefill(prompt[start : min(start + job.chunk, len(prompt) - 1)], last=False))
        job.prefill_sweeps += 1
    await _await_replies(chain, walk, chain.credits.sweeps - 1)


async def _await_replies(chain: Trips, walk: Walk, most: int) -> None:
    """Until at most so many sweeps are unanswered."""
    while walk.in_flight > most:
        walk.accept((await chain.answer()).reply)


async def _speculate(job: Job, chain: Trips, walk: Walk) -> tuple[DraftTree, TreeNodeId, float]:
    """Grow a tree below the pending token and send both.

    Returns:
        The tree, the pending token's node, and what drafting took in milliseconds.
    """
    started = job.clock()
    tree = await _draft(job, walk.room - 1)
    draft_ms = (job.clock() - started) * 1e3
    sweep = walk.extend(tree)
    chain.send(sweep)
    return tree, sweep.first_id, draft_ms


async def _learn(job: Job, lesson: Lesson | None) -> None:
    """Hand the picks after a tree's nodes and its root to the drafter that grew it, on its own thread."""
    if lesson is None or not lesson.tree:
        return
    root, picks = lesson.root, lesson.reply.picks
    after = {node - root - 1 if node > root else None: token for node, token in picks if node >= root}
    await asyncio.get_running_loop().run_in_executor(job.drafting, job.drafter.learn, lesson.tree, after)


async def _draft(job: Job, room: int) -> DraftTree:
    """Grow a tree on the drafting thread, within the credits: deep enough to be used, never beyond the last token."""
    count = min(job.budget.nodes(job.tokens_left), room)
    if count <= 0:
        return DraftTree((), ())
    grow = job.drafter.grow
    depth = job.tokens_left - 1
    return await asyncio.get_running_loop().run_in_executor(
        job.drafting, grow, job.sequence, count, depth, job.sampling
    )
