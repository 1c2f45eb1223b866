"""Whose turn it is to compute: schedule → run → finish. Owns no sessions and no network.

Sessions are served by deficit round-robin on measured milliseconds, in slices of at most a quantum (F3), so a long
prefill never holds up another session's tree. Slices run on a thread of their own, short ones in the event loop itself:
handing one over and back, to a core whose caches are cold, took .7 ms. Tensors are touched by one thread at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

from node.handling import Handling
from node.sweep_run import SweepRun

LEAST_ROWS = 16
MOST_ROWS = 1_024
SLOPE_ROWS = 32
LEARNING_RATE = 0.2
SHORT_MS = 20.0
"""A slice that should take no longer runs in the event loop: receipts wait for so long at most."""

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

    def fail(self, error: Exception, run: SweepRun | None = None) -> None:
        """Take the error that ended a sweep; no sweep when it was the next one that could not be made."""


class StepCost:
    """Predicts a forward's milliseconds from its rows: `base + per_row · rows`, learned from what was measured."""

    def __init__(self, base_ms: float, per_row_ms: float, least_rows: int = LEAST_ROWS) -> None:
        """least_rows: so many are always worth a forward of their own."""
        self.base_ms = base_ms
        self.per_row_ms = per_row_ms
        self.least_rows = least_rows

    def rows_within(self, budget_ms: float) -> int:
        """Rows that should fit the budget: enough to be worth the base, few enough for masks to stay small."""
        per_row_ms = max(self.per_row_ms, 1e-6)
        worth_it = int(self.base_ms / per_row_ms)
        return max(self.least_rows, min(MOST_ROWS, max(worth_it, int((budget_ms - self.base_ms) / per_row_ms))))

    def predict_ms(self, rows: int) -> float:
        """Milliseconds that so many rows should take."""
        return self.base_ms + self.per_row_ms * rows

    def learn(self, rows: int, measured_ms: float) -> None:
        """Move towards a measurement: many rows tell of the slope, few of the base."""
        if rows >= SLOPE_ROWS:
            slope = max(measured_ms - self.base_ms, 0.0) / rows
            self.per_row_ms += LEARNING_RATE * (slope - self.per_row_ms)
        elif rows > 0:
            base_ms = max(measured_ms - self.per_row_ms * rows, 0.0)
            self.base_ms += LEARNING_RATE * (base_ms - self.base_ms)


def _advance(run: SweepRun, rows: int) -> float:
    """Run some rows; milliseconds that this thread had a CPU."""
    started = time.thread_time()
    run.advance(rows)
    return (time.thread_time() - started) * 1e3


class Engine:
    """One compute thread shared fairly by the sessions of a node.

    A session's balance is what it may still use of its turns, in milliseconds. It saves nothing while it is idle and
    keeps what it owes. worked_ms: what all slices took so far. handling: what else sweeps cost.
    """

    def __init__(self, cost: StepCost, quantum_ms: float = 50.0, *, counts_cpu: bool = False) -> None:
        """counts_cpu: only the time on a CPU is computing; when others had it, the sweep waited."""
        self._cost = cost
        self._counts_cpu = counts_cpu
        self._quantum_ms = quantum_ms
        self._turns: deque[Customer] = deque()
        self._waiting: set[Customer] = set()
        self._balances_ms: WeakKeyDictionary[Customer, float] = WeakKeyDictionary()
        self._wake = asyncio.Event()
        self.worked_ms = 0.0
        self.handling = Handling()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._newest: Future[object] | None = None

    async def on_thread(self, call: Callable[[], T]) -> T:
        """Run a call on the compute thread, between slices."""
        future = self._thread.submit(call)
        self._newest = cast("Future[object]", future)
        future.add_done_callback(self._forget)
        return await asyncio.wrap_future(future)

    def _forget(self, done: Future[T]) -> None:
        """Whoever asked has the result: nothing else is to keep it alive."""
        if self._newest is done:
            self._newest = None

    def submit(self, session: Customer) -> None:
        """Say that a session has work; harmless when it is known already."""
        if session not in self._waiting:
            self._waiting.add(session)
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
        """Serve a session until its quantum is used up or nothing waits."""
        balance_ms = self._balances_ms.get(session, 0.0) + self._quantum_ms
        while balance_ms > 0:
            run = self._next_run(session)
            if run is None:
                self._waiting.discard(session)
                self._balances_ms[session] = min(balance_ms, 0.0)
                return
            balance_ms -= await self._slice(session, run, balance_ms)
        self._balances_ms[session] = balance_ms
        self._turns.append(session)

    def _next_run(self, session: Customer) -> SweepRun | None:
        try:
            return session.next_run()
        except Exception as error:  # noqa: BLE001 - one session's trouble must not end the others
            session.fail(error)
            return None

    async def _slice(self, session: Customer, run: SweepRun, balance_ms: float) -> float:
        """Run a few rows; returns the milliseconds that they took."""
        rows = min(run.remaining, self._cost.rows_within(min(balance_ms, self._quantum_ms)))
        encoded_ms, started = run.encode_ms, time.perf_counter()
        try:
            if self._cost.predict_ms(rows) <= SHORT_MS and self._newest is None:
                on_cpu_ms = _advance(run, rows)
                self.handling.computed(on_cpu_ms)
                await asyncio.sleep(0)  # the loop's other work has its turn
            else:
                on_cpu_ms = await self.on_thread(lambda: _advance(run, rows))
            measured_ms = (time.perf_counter() - started) * 1e3
            computed_ms = min(on_cpu_ms, measured_ms) if self._counts_cpu else measured_ms
            run.compute_ms += max(computed_ms - (run.encode_ms - encoded_ms), 0.0)
            self._cost.learn(rows, measured_ms)
            if run.is_done:
                self.handling.swept()
                session.finish(run)
        except Exception as error:  # noqa: BLE001 - whatever a forward raises is this sweep's fault, not the node's
            session.fail(error, run)
        passed_ms = (time.perf_counter() - started) * 1e3
        self.worked_ms += passed_ms
        return passed_ms
