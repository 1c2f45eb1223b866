"""Whose turn it is to compute: schedule → run → finish. Owns no sessions and no network.

Sessions are served by deficit round-robin on measured milliseconds, in slices of at most a quantum (F3), so a long
prefill never holds up another session's tree. Slices run on a thread of their own, short ones in the event loop itself:
handing one over and back, to a core whose caches are cold, took .7 ms. Tensors are touched by one thread at a time.

Where several sessions wait, whole sweeps of others join a slice in one forward, for as long as that saves those who
wait more than it costs those who share it. Each is charged its share; the rest of the time it waited.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

from node.engine.loop_cost import LoopCost
from node.engine.sweep_run import SweepRun
from swarm.layers import Span

LEAST_ROWS = 16
MOST_ROWS = 1_024
SLOPE_ROWS = 32
LEARNING_RATE = 0.2
SHARERS_RATE = 0.05
SHORT_MS = 20.0
"""A slice that should take no longer runs in the event loop: receipts wait for so long at most."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PendingWork:
    """What a session would run next. span: runs of one span may share a forward. rows: at most so many."""

    span: Span
    rows: int


class Schedulable(Protocol):
    """A session as the engine sees it."""

    def ahead(self) -> PendingWork | None:
        """What `next_run` would give, which is not begun by asking; None when nothing waits."""

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
    """Predicts a forward's milliseconds from its rows and sessions, learned from what was measured.

    `base + per_row · rows + per_session · (sessions − 1)`: sessions attend one after the other.
    """

    def __init__(self, base_ms: float, per_row_ms: float, least_rows: int = LEAST_ROWS) -> None:
        """least_rows: so many are always worth a forward of their own."""
        self.base_ms = base_ms
        self.per_row_ms = per_row_ms
        self.per_session_ms = 0.0
        self.least_rows = least_rows

    def rows_within(self, budget_ms: float) -> int:
        """Rows that should fit the budget: enough to be worth the base, few enough for masks to stay small."""
        per_row_ms = max(self.per_row_ms, 1e-6)
        worth_it = int(self.base_ms / per_row_ms)
        return max(self.least_rows, min(MOST_ROWS, max(worth_it, int((budget_ms - self.base_ms) / per_row_ms))))

    def predict_ms(self, rows: int, sessions: int = 1) -> float:
        """Milliseconds that so many rows of so many sessions should take."""
        return self.base_ms + self.per_row_ms * rows + self.per_session_ms * (sessions - 1)

    def joining_ms(self, rows: int) -> float:
        """Milliseconds that one more session with so many rows should add."""
        return self.per_session_ms + self.per_row_ms * rows

    def shares(self, rows: Sequence[int], sharers: float | None = None) -> list[float]:
        """Whose part of a forward's time is how large: its own rows, and of the base as much as everybody.

        sharers: how many share a forward as a rule, as whose part the base counts; None: those who do now.
        """
        joining = [self.joining_ms(count) for count in rows]
        whole, common = self.base_ms + sum(joining), self.base_ms / (sharers or len(rows))
        return [(common + own) / whole if whole > 0 else 1 / len(rows) for own in joining]

    def learn(self, rows: int, measured_ms: float, sessions: int = 1) -> None:
        """Move towards a measurement: many rows tell of the slope, few of the base, many sessions of their own cost."""
        if sessions > 1:
            step = LEARNING_RATE * (measured_ms - self.predict_ms(rows, sessions)) / 2
            self.base_ms = max(self.base_ms + step, 0.0)
            self.per_session_ms = max(self.per_session_ms + step / (sessions - 1), 0.0)
        elif rows >= SLOPE_ROWS:
            slope = max(measured_ms - self.base_ms, 0.0) / rows
            self.per_row_ms += LEARNING_RATE * (slope - self.per_row_ms)
        elif rows > 0:
            base_ms = max(measured_ms - self.per_row_ms * rows, 0.0)
            self.base_ms += LEARNING_RATE * (base_ms - self.base_ms)


@dataclass(frozen=True, slots=True)
class BatchMember:
    """One session's part of a step."""

    session: Schedulable
    run: SweepRun
    rows: int


def _advance(shares: Sequence[BatchMember]) -> tuple[dict[SweepRun, Exception], float]:
    """Run them; who failed and why, and milliseconds that this thread had a CPU."""
    started = time.thread_time()
    first, *others = shares
    failed = first.run.advance(first.rows, [share.run for share in others])
    return failed, (time.thread_time() - started) * 1e3


class Engine:
    """One compute thread shared fairly by the sessions of a node.

    A session's balance is what it may still use of its turns, in milliseconds. It saves nothing while it is idle and
    keeps what it owes: a quantum at most for what it used of others' turns. worked_ms: what all slices took so far.
    handling: what else sweeps cost.
    """

    def __init__(self, cost: StepCost, quantum_ms: float = 50.0, *, counts_cpu: bool = False) -> None:
        """counts_cpu: only the time on a CPU is computing; when others had it, the sweep waited."""
        self._cost = cost
        self._counts_cpu = counts_cpu
        self._quantum_ms = quantum_ms
        self._turns: deque[Schedulable] = deque()
        self._waiting: set[Schedulable] = set()
        self._balances_ms: WeakKeyDictionary[Schedulable, float] = WeakKeyDictionary()
        self._wake = asyncio.Event()
        self.worked_ms = 0.0
        self.handling = LoopCost()
        self._sharers = 1.0
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

    def submit(self, session: Schedulable) -> None:
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

    async def _turn(self, session: Schedulable) -> None:
        """Serve a session until its quantum is used up or nothing waits."""
        balance_ms = self._balances_ms.get(session, 0.0) + self._quantum_ms
        while balance_ms > 0:
            run = self._next_run(session)
            if run is None:
                self._waiting.discard(session)
                self._balances_ms[session] = min(balance_ms, 0.0)
                return
            rows = min(run.remaining, self._cost.rows_within(min(balance_ms, self._quantum_ms)))
            shares = [BatchMember(session, run, rows), *self._joining(session, rows)]
            charged_ms = await self._step(shares)
            balance_ms -= charged_ms[0]
            for share, share_ms in zip(shares[1:], charged_ms[1:], strict=True):
                owed_ms = self._balances_ms.get(share.session, 0.0) - share_ms
                self._balances_ms[share.session] = max(owed_ms, -self._quantum_ms)
        self._balances_ms[session] = balance_ms
        self._turns.append(session)

    def _next_run(self, session: Schedulable) -> SweepRun | None:
        try:
            return session.next_run()
        except Exception as error:  # noqa: BLE001 - one session's trouble must not end the others
            session.fail(error)
            return None

    def _joining(self, leader: Schedulable, rows: int) -> Iterator[BatchMember]:
        """Others whose whole sweeps share the forward of these rows, in the order of their turns.

        One more makes everybody in it later by what it adds; whoever waits, it included, is sooner by a base. So a
        round of turns is never longer for it. No step is longer than a quantum.
        """
        own = leader.ahead()
        if own is None or not self._turns:
            return
        waiting = [(other, ahead) for other in self._turns if (ahead := other.ahead()) and ahead.span == own.span]
        left, sessions, cost = len(waiting), 1, self._cost
        for other, ahead in waiting:
            pays = sessions * cost.joining_ms(ahead.rows) <= left * cost.base_ms
            most_rows = cost.rows_within(self._quantum_ms - sessions * cost.per_session_ms)
            if not pays or rows + ahead.rows > most_rows:
                continue
            run = self._next_run(other)
            if run is None:
                continue
            sessions, rows, left = sessions + 1, rows + run.remaining, left - 1
            yield BatchMember(other, run, run.remaining)

    async def _step(self, shares: Sequence[BatchMember]) -> list[float]:
        """Run a few rows of each; returns the milliseconds that each is charged."""
        rows, started = [share.rows for share in shares], time.perf_counter()
        encoded_ms = sum(share.run.encode_ms for share in shares)
        try:
            if self._cost.predict_ms(sum(rows), len(rows)) <= SHORT_MS and self._newest is None:
                failed, on_cpu_ms = _advance(shares)
                self.handling.computed(on_cpu_ms)
                await asyncio.sleep(0)  # the loop's other work has its turn
            else:
                failed, on_cpu_ms = await self.on_thread(lambda: _advance(shares))
        except Exception as error:  # noqa: BLE001 - whatever a forward raises is its sweeps' fault, not the node's
            failed, on_cpu_ms = {share.run: error for share in shares}, 0.0
        measured_ms = (time.perf_counter() - started) * 1e3
        encoded_ms = sum(share.run.encode_ms for share in shares) - encoded_ms
        computed_ms = max((min(on_cpu_ms, measured_ms) if self._counts_cpu else measured_ms) - encoded_ms, 0.0)
        self._sharers += SHARERS_RATE * (len(shares) - self._sharers)
        for share, part in zip(shares, self._cost.shares(rows, self._sharers), strict=True):
            share.run.compute_ms += computed_ms * part
            self._end(share, failed.get(share.run))
        passed_ms = (time.perf_counter() - started) * 1e3
        self.worked_ms += passed_ms
        parts = self._cost.shares(rows)
        if not failed:
            self._cost.learn(sum(rows), computed_ms, len(rows))
        return [passed_ms * part for part in parts]

    def _end(self, share: BatchMember, error: Exception | None) -> None:
        """Hand a sweep that is done, or failed, back to its session."""
        try:
            if error is not None:
                share.session.fail(error, share.run)
            elif share.run.is_done:
                self.handling.swept()
                share.session.finish(share.run)
        except Exception as trouble:  # noqa: BLE001 - one session's trouble must not end the others
            share.session.fail(trouble, share.run)
