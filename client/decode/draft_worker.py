"""The drafting thread as one generation sees it: one request at a time, each awaited for a limited time.

A forward pass of a draft cannot be interrupted. So a request that takes too long goes on by itself, and the text goes
on without a draft meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
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
"""Replies that are kept while the drafter has no time to learn from them."""

MAX_LATE_ROWS = 64
"""Replies whose hidden rows are kept meanwhile."""

IsAwaited = Callable[[], Awaitable[bool]]
"""Whether the loop has nothing left to do but to wait for the draft."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What to draft.

    Attributes:
        nodes: at most.
        depth: levels, at most.
        stop_rule: when another round of drafting does not pay.
        patience_ms: how long the loop waits before it first asks whether to give up; infinite to wait to the end.
        plan: why a tree of that size; None for a tree that goes on below what is in flight.
        forced: tokens that must come next; they are nodes of the tree, and the draft goes on below them.
    """

    nodes: int
    depth: int
    stop_rule: StopRule
    patience_ms: float
    plan: SpeculationPlan | None = None
    forced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftResult:
    """What was drafted.

    Attributes:
        drafted: the drafter's own tree.
        took_ms: how long it took.
        forced: the tokens that it hangs below.
    """

    drafted: DraftTree
    took_ms: float
    forced: tuple[int, ...] = ()

    @property
    def tree(self) -> DraftTree:
        """All of it."""
        return self.drafted.below(self.forced)


@dataclass(frozen=True, slots=True)
class PendingDraft:
    """Drafting or learning that took too long to wait for.

    Attributes:
        future: of the work on the drafting thread.
        plan: that of the request; None for learning, and for a tree that goes on below what is in flight.
    """

    future: asyncio.Future[DraftResult] | asyncio.Future[None]
    plan: SpeculationPlan | None = None


class DraftWorker:
    """Runs the drafter of one generation on the drafting thread, one request at a time."""

    def __init__(self, state: GenerationState) -> None:
        self._state = state
        self._pending: PendingDraft | None = None
        self._is_working = False
        self._late_rows: deque[tuple[Sequence[int], torch.Tensor]] = deque(maxlen=MAX_LATE_ROWS)

    @property
    def is_busy(self) -> bool:
        """Whether the thread still works on a request that was given up; one that has ended is accounted for."""
        if self._pending is None:
            return False
        if not self._pending.future.done():
            return True
        pending, self._pending = self._pending, None
        with self._giving_up_without_memory():
            result = pending.future.result()
            if result is not None and pending.plan is not None:
                temperature = self._state.sampling.temperature
                self._state.policy.observe_draft(temperature, result.drafted, pending.plan, result.took_ms)
        return False

    def observe(self, sequence: Sequence[int], rows: torch.Tensor) -> None:
        """Hand the hidden rows [n, width] of the last n tokens to the drafter, or keep them while its thread works."""
        self._late_rows.append((sequence, rows))
        if not self._is_working and not self.is_busy:
            self._hand_over()

    def _hand_over(self) -> None:
        while self._late_rows:
            sequence, rows = self._late_rows.popleft()
            if self._state.observe is not None:
                self._state.observe(sequence, rows)

    async def grow(self, request: DraftRequest, is_awaited: IsAwaited) -> DraftResult | None:
        """Grow a tree on the drafting thread. Legal while the worker is not busy.

        Args:
            request: what to draft.
            is_awaited: asked every `patience_ms`; True gives the request up.

        Returns:
            None where the request was given up: the worker is busy until the thread is done.
        """
        state = self._state
        drafter, clock, started_s = state.drafter, state.clock, state.clock()
        forced = request.forced[: min(request.nodes, request.depth)]
        sequence, nodes, depth = (*state.sequence, *forced), request.nodes - len(forced), request.depth - len(forced)

        def grown() -> DraftResult:
            tree = drafter.grow(sequence, nodes, depth, state.sampling, request.stop_rule)
            return DraftResult(tree, (clock() - started_s) * 1e3, forced)

        self._hand_over()
        future = asyncio.get_running_loop().run_in_executor(state.drafting, grown)
        if not await self._is_in_time(future, request.patience_ms, is_awaited):
            self._pending = PendingDraft(future, request.plan)
            return None
        with self._giving_up_without_memory():
            return future.result()
        return DraftResult(DraftTree(), 0.0)

    async def learn(self, window: SendWindow) -> None:
        """Let the drafter learn from the answered sweeps, on its thread; they wait while the worker is busy."""
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
                future = loop.run_in_executor(state.drafting, drafter.learn, sweep.tree, picks, others)
                if not await self._is_in_time(future, state.policy.patience_ms(sweep.route, 0)):
                    self._pending = PendingDraft(future)
                    return
                with self._giving_up_without_memory():
                    future.result()

    @contextmanager
    def _giving_up_without_memory(self) -> Iterator[None]:
        """Decode plainly from now on where the draft runs out of memory."""
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError) as error:
            reason = str(error).partition("\n")[0]
            logger.warning("the draft ran out of memory, the text goes on without it: %s", reason)
            self._state.drafter, self._state.policy = NoDrafter(), FixedPolicy(0)

    async def _is_in_time(
        self,
        future: asyncio.Future[DraftResult] | asyncio.Future[None],
        patience_ms: float,
        is_awaited: IsAwaited | None = None,
    ) -> bool:
        """Wait for the drafting thread; False where `is_awaited` (None: at once) says so after `patience_ms`."""
        patience_s = None if patience_ms == math.inf else patience_ms / 1e3
        self._is_working = True
        try:
            while not (await asyncio.wait((future,), timeout=patience_s))[0]:
                if is_awaited is None or await is_awaited():
                    return False
            return True
        finally:
            self._is_working = False
