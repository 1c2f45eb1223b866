"""The compute thread and who gets it: schedule → run → finish. Owns no sessions and no network.

Sessions are served by deficit round-robin on measured milliseconds, in slices of at most a quantum (F3), so a long
prefill never holds up another session's tree. The event loop schedules; tensors are touched on one thread only.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from node.sweep_run import SweepRun
from swarm.errors import SwarmError

LEAST_ROWS = 16
MOST_ROWS = 1_024

T = TypeVar("T")


class Customer(Protocol):
    """A session as the engine sees it."""

    def next_run(self) -> SweepRun | None:
        """The sweep to work on: the one begun, or the next in order; None when nothing waits.

        Raises:
            SwarmError: the next one cannot be worked on.
        """

    def finish(self, run: SweepRun) -> None:
        """Take a finished sweep."""

    def fail(self, error: Exception) -> None:
        """Take the error that ended the sweep."""


class StepCost:
    """Predicts a forward's milliseconds from its rows: `base + per_row · rows`, learned from what was measured."""

    def __init__(self, base_ms: float, per_row_ms: float) -> None:
        self.base_ms = base_ms
        self.per_row_ms = per_row_ms

    def rows_within(self, budget_ms: float) -> int:
        """Rows that should fit the budget: enough to pay for the base, few enough for masks to stay small."""
        return min(MOST_ROWS, max(LEAST_ROWS, int((budget_ms - self.base_ms) / max(self.per_row_ms, 1e-6))))

    def learn(self, rows: int, measured_ms: float) -> None:
        """Move the slope towards a measurement; small forwards say little about it."""
        if rows >= 32:
            slope = max(measured_ms - self.base_ms, 0.0) / rows
            self.per_row_ms += 0.2 * (slope - self.per_row_ms)


class Engine:
    """One compute thread shared fairly by the sessions of a node."""

    def __init__(self, cost: StepCost, quantum_ms: float = 50.0) -> None:
        self.steps = 0
        self._cost = cost
        self._quantum_ms = quantum_ms
        self._turns: deque[Customer] = deque()
        self._deficits_ms: dict[Customer, float] = {}
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    async def on_thread(self, call: Callable[[], T]) -> T:
        """Run a call on the compute thread, between slices."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def submit(self, session: Customer) -> None:
        """Say that a session has work; harmless when it is known already."""
        if session not in self._deficits_ms:
            self._deficits_ms[session] = 0.0
            self._turns.append(session)
            self._wake.set()

    async def run(self) -> None:
        """Serve turns until cancelled."""
        try:
            while True:
                await self._wake.wait()
                while self._turns:
                    await self._turn(self._turns.popleft())
                self._wake.clear()
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)

    async def _turn(self, session: Customer) -> None:
        try:
            run = session.next_run()
        except SwarmError as error:
            session.fail(error)
            run = None
        if run is None:
            del self._deficits_ms[session]
            return
        self._deficits_ms[session] += self._quantum_ms
        if self._deficits_ms[session] > 0:
            await self._slice(session, run)
        self._turns.append(session)

    async def _slice(self, session: Customer, run: SweepRun) -> None:
        budget_ms = min(self._deficits_ms[session], self._quantum_ms)
        rows = min(run.remaining, self._cost.rows_within(budget_ms))
        started = time.perf_counter()
        try:
            await self.on_thread(lambda: run.advance(rows))
        except Exception as error:  # noqa: BLE001 - whatever a forward raises is this sweep's fault, not the node's
            session.fail(error)
        measured_ms = (time.perf_counter() - started) * 1e3
        self.steps += 1
        run.compute_ms += measured_ms
        self._cost.learn(rows, measured_ms)
        self._deficits_ms[session] = min(self._deficits_ms[session] - measured_ms, 0.0)
        if run.is_done:
            session.finish(run)
