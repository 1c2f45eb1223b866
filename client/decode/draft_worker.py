"""A generation's drafting thread: who asks it for what, and for how long it is waited for.

A pass of a draft cannot be ended, so what takes too long is left to itself, and the text goes on without it meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from client.control.policy import FixedPolicy, SpeculationPlan
from client.decode.pipeline import SendWindow
from client.decode.state import GenerationState
from client.drafting.drafter import NoDrafter
from client.drafting.search.stopping import StopRule
from client.drafting.search.tree import DraftTree

MAX_LESSONS = 64
"""Replies that are kept for a drafter that has no time to learn from them."""

IsAwaited = Callable[[], Awaitable[bool]]
"""Whether anything waits for drafting to end."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A tree that is wanted.

    Attributes:
        nodes: at most.
        depth: levels, at most.
        stop_rule: when drafting on is not worth it.
        patience_ms: for how long what waits for the tree can bear that.
        plan: why it is to be; None for a tree that goes on below what is on its way.
    """

    nodes: int
    depth: int
    stop_rule: StopRule
    patience_ms: float
    plan: SpeculationPlan | None = None


@dataclass(frozen=True, slots=True)
class DraftResult:
    """A tree, and what it took in milliseconds."""

    tree: DraftTree
    took_ms: float


@dataclass(frozen=True, slots=True)
class PendingDraft:
    """Drafting, or learning, that took too long to be waited for. plan: that of the request."""

    asked: asyncio.Future[DraftResult] | asyncio.Future[None]
    plan: SpeculationPlan | None = None


class DraftWorker:
    """Asks the drafter of one generation, on its own thread, one thing at a time."""

    def __init__(self, state: GenerationState) -> None:
        self._state = state
        self._pending: PendingDraft | None = None

    @property
    def is_busy(self) -> bool:
        """Whether drafting goes on that was not waited for; what one that has ended says is noted."""
        if self._pending is None:
            return False
        if not self._pending.asked.done():
            return True
        pending, self._pending = self._pending, None
        with self._going_on_without():
            result = pending.asked.result()
            if result is not None and pending.plan is not None:
                temperature = self._state.sampling.temperature
                self._state.policy.observe_draft(temperature, result.tree, pending.plan, result.took_ms)
        return False

    async def grow(self, request: DraftRequest, is_awaited: IsAwaited) -> DraftResult | None:
        """A tree, made on the drafting thread; None where that took longer than what waits for it can bear.

        Then it is left to itself: until it is done, the text goes on without a draft.
        """
        state = self._state
        drafter, clock, sequence, started_s = state.drafter, state.clock, state.sequence, state.clock()

        def grown() -> DraftResult:
            tree = drafter.grow(sequence, request.nodes, request.depth, state.sampling, request.stop_rule)
            return DraftResult(tree, (clock() - started_s) * 1e3)

        asked = asyncio.get_running_loop().run_in_executor(state.drafting, grown)
        if not await _is_in_time(asked, request.patience_ms, is_awaited):
            self._pending = PendingDraft(asked, request.plan)
            return None
        with self._going_on_without():
            return asked.result()
        return DraftResult(DraftTree(), 0.0)

    async def learn(self, window: SendWindow) -> None:
        """Hand the picks after trees' nodes and roots to the drafter that grew them, on its thread, if it is idle."""
        if self.is_busy:
            window.lessons = [lesson for lesson in window.lessons if lesson[0].tree][-MAX_LESSONS:]
            return
        state = self._state
        while window.lessons:
            sweep, reply, passed = window.lessons.pop(0)
            picks: dict[int | None, int] = {}
            others: dict[int | None, int] = {}
            for node, token in reply.picks:
                if node in sweep.places:
                    (picks if node in passed else others)[sweep.places[node]] = token
            if sweep.tree and (picks or others):
                loop, drafter = asyncio.get_running_loop(), state.drafter
                asked = loop.run_in_executor(state.drafting, drafter.learn, sweep.tree, picks, others)
                if not await _is_in_time(asked, state.policy.patience_ms(sweep.route, 0)):
                    self._pending = PendingDraft(asked)
                    return
                with self._going_on_without():
                    asked.result()

    @contextmanager
    def _going_on_without(self) -> Iterator[None]:
        """A draft that finds no memory is given up; the text is the target's alone."""
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError) as error:
            reason = str(error).partition("\n")[0]
            logger.warning("the draft ran out of memory, the text goes on without it: %s", reason)
            self._state.drafter, self._state.policy = NoDrafter(), FixedPolicy(0)


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
