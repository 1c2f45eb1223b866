"""A generation and the drafting thread: who asks it for what, and for how long it is waited for.

A pass of a draft cannot be ended, so what takes too long is left to itself, and the text goes on without it meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from client.control.policy import FixedPolicy, SpeculationPlan
from client.drafting.drafter import NoDrafter
from client.drafting.search.stopping import StopRule
from client.drafting.search.tree import DraftTree

if TYPE_CHECKING:
    from client.decode.loop import GenerationState
    from client.decode.pipeline import SendWindow

MOST_LESSONS = 64
"""Replies that are kept for a drafter that has no time to learn from them."""

IsAwaited = Callable[[], Awaitable[bool]]
"""Whether anything waits for drafting to end."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A tree that is wanted. patience_ms: for how long what waits for it can bear that. planned: why it is to be."""

    nodes: int
    depth: int
    worth: StopRule
    patience_ms: float
    planned: SpeculationPlan | None = None


@dataclass(frozen=True, slots=True)
class DraftResult:
    """A tree, and what it took in milliseconds."""

    tree: DraftTree
    took_ms: float


@dataclass(frozen=True, slots=True)
class PendingDraft:
    """Drafting, or learning, that took too long to be waited for. planned: as in what was wished for."""

    asked: asyncio.Future[DraftResult] | asyncio.Future[None]
    planned: SpeculationPlan | None = None


async def grow(job: GenerationState, wish: DraftRequest, is_awaited: IsAwaited) -> DraftResult | None:
    """A tree, made on the drafting thread; None where that took longer than what waits for it can bear.

    Then it is left to itself: until it is done, the text goes on without a draft.
    """
    drafter, clock, sequence, started_s = job.drafter, job.clock, job.sequence, job.clock()

    def grown() -> DraftResult:
        tree = drafter.grow(sequence, wish.nodes, wish.depth, job.sampling, wish.worth)
        return DraftResult(tree, (clock() - started_s) * 1e3)

    asked = asyncio.get_running_loop().run_in_executor(job.drafting, grown)
    if not await _is_in_time(asked, wish.patience_ms, is_awaited):
        job.late = PendingDraft(asked, wish.planned)
        return None
    with _going_on_without(job):
        return asked.result()
    return DraftResult(DraftTree(), 0.0)


async def learn(job: GenerationState, pipe: SendWindow) -> None:
    """Hand the picks after trees' nodes and roots to the drafter that grew them, on its own thread, if it is idle."""
    if is_drafting(job):
        pipe.lessons = [lesson for lesson in pipe.lessons if lesson[0].tree][-MOST_LESSONS:]
        return
    while pipe.lessons:
        flight, reply, passed = pipe.lessons.pop(0)
        picks: dict[int | None, int] = {}
        others: dict[int | None, int] = {}
        for node, token in reply.picks:
            if node in flight.places:
                (picks if node in passed else others)[flight.places[node]] = token
        if flight.tree and (picks or others):
            loop, drafter = asyncio.get_running_loop(), job.drafter
            asked = loop.run_in_executor(job.drafting, drafter.learn, flight.tree, picks, others)
            if not await _is_in_time(asked, job.budget.patience_ms(flight.route, 0)):
                job.late = PendingDraft(asked)
                return
            with _going_on_without(job):
                asked.result()


async def _at_once() -> bool:
    return True


async def _is_in_time(
    asked: asyncio.Future[DraftResult] | asyncio.Future[None], patience_ms: float, is_awaited: IsAwaited = _at_once
) -> bool:
    """Whether the drafting thread is done before what waits for it has waited for too long; that is looked at then."""
    patience_s = None if patience_ms == math.inf else patience_ms / 1e3
    while not (await asyncio.wait((asked,), timeout=patience_s))[0]:
        if await is_awaited():
            return False
    return True


def is_drafting(job: GenerationState) -> bool:
    """Whether drafting goes on that was not waited for; what one that has ended says is noted."""
    if job.late is None:
        return False
    if not job.late.asked.done():
        return True
    late, job.late = job.late, None
    with _going_on_without(job):
        grown = late.asked.result()
        if grown is not None and late.planned is not None:
            job.budget.drafted(job.sampling.temperature, grown.tree, late.planned, grown.took_ms)
    return False


@contextmanager
def _going_on_without(job: GenerationState) -> Iterator[None]:
    """A draft that finds no memory is given up; the text is the target's alone."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        logger.warning("the draft ran out of memory, the text goes on without it: %s", str(error).partition("\n")[0])
        job.drafter, job.budget = NoDrafter(), FixedPolicy(0)
