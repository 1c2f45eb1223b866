"""Whose turn it is to compute: schedule → run → postprocess. Owns no sessions and no network.

Owners are served by fair queueing on measured milliseconds, and the sessions of each in turn (`node.engine.turns`), in
slices of at most a quantum (F3): neither a long prefill nor a crowd of sessions holds up another's tree. Slices run
on a thread of their own, short ones in the event loop itself: the way to another core, whose caches are cold, and back
would add much to them. One thread at a time touches tensors.

Where several sessions wait, whole sweeps of others join a slice in one batch (`node.engine.batch`), for as long as that
saves those that wait more than it costs those that share it. Each is charged its share; the rest of the time it waited.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from node.engine.batch import Batch, BatchMember
from node.engine.loop_cost import LoopCost
from node.engine.step_cost import StepCost
from node.engine.sweep_run import SweepRun
from node.engine.turns import Owned, Turns
from swarm.layers import Span

SHARERS_RATE = 0.05
SHORT_MS = 20.0
"""A slice that should take no longer runs in the event loop: receipts wait for so long at most."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PendingWork:
    """What a session would run next."""

    span: Span
    """Runs of one span may share a forward."""
    rows: int
    """How many, at most."""


class Schedulable(Owned, Protocol):
    """A session as the engine sees it."""

    def pending(self) -> PendingWork | None:
        """What `next_run` would give, which is not begun by asking; None when nothing waits."""

    def next_run(self) -> SweepRun | None:
        """The sweep to work on: the one begun, or the next in order; None when nothing waits.

        Raises:
            SwarmError: the next one cannot be worked on.
        """

    def finish(self, run: SweepRun) -> None:
        """Take a finished sweep."""

    def fail(self, error: Exception, run: SweepRun | None = None) -> None:
        """Take the error that ended a sweep, or without `run` the error of `next_run`."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What came of a batch."""

    failed: Mapping[SweepRun, Exception]
    """The runs that failed, and why."""
    started_s: float
    """When the batch began, on the clock of `time.perf_counter`."""
    computed_ms: float
    """How long it computed; encoding is not part of it."""


def _run_timed(batch: Batch[Schedulable]) -> tuple[dict[SweepRun, Exception], float]:
    """Run it; returns the runs that failed and why, and milliseconds that this thread had a CPU."""
    started = time.thread_time()
    failed = batch.run()
    return failed, (time.thread_time() - started) * 1e3


class Engine:
    """One compute thread shared fairly by the owners of a node's sessions, and by the sessions of each.

    Attributes:
        worked_ms: what all batches took so far.
        loop_cost: what sweeps cost the event loop beside their forwards.
    """

    def __init__(
        self,
        cost: StepCost,
        quantum_ms: float = 50.0,
        *,
        counts_cpu: bool = False,
        weight: Callable[[str], int] = lambda owner: 1,
    ) -> None:
        """Make an engine that computes nothing until `run`.

        Args:
            cost: a first prediction; the engine learns on.
            quantum_ms: what a turn adds to a session's balance, and the longest step.
            counts_cpu: only the time on a CPU is computing; when others had it, the sweep waited.
            weight: as for `Turns`.
        """
        self._cost = cost
        self._counts_cpu = counts_cpu
        self._quantum_ms = quantum_ms
        self._turns: Turns[Schedulable] = Turns(quantum_ms, weight)
        self._wake = asyncio.Event()
        self.worked_ms = 0.0
        self.loop_cost = LoopCost()
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
        """The caller has the result: nothing else may keep it alive."""
        if self._newest is done:
            self._newest = None

    def submit(self, session: Schedulable) -> None:
        """Queue a session that has work; harmless when it is queued already."""
        self._turns.submit(session)
        self._wake.set()

    async def run(self) -> None:
        """Serve turns until cancelled."""
        try:
            while True:
                await self._wake.wait()
                while self._turns:
                    await self._next_turn()
                self._wake.clear()
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)

    async def _next_turn(self) -> None:
        session = self._turns.begin()
        try:
            await self._turn(session)
        except Exception as error:  # noqa: BLE001 - whatever one session does, the others have their turns
            self._give_up(session, error)

    def _give_up(self, session: Schedulable, error: Exception) -> None:
        self._turns.end(session, has_work=False)
        try:
            session.fail(error)
        except Exception as trouble:
            logger.error("a session could not even be ended", exc_info=trouble)

    async def _turn(self, session: Schedulable) -> None:
        """Serve a session until its quantum is used up or nothing waits."""
        while self._turns.left_ms(session) > 0:
            batch = self._schedule(session)
            if batch is None:
                self._turns.end(session, has_work=False)
                return
            result = await self._run_batch(batch)
            self._postprocess(batch, result)
        self._turns.end(session, has_work=True)

    def _schedule(self, leader: Schedulable) -> Batch[Schedulable] | None:
        """The next slice of the session whose turn it is, and the sweeps that share its forward."""
        run = self._next_run(leader)
        if run is None:
            return None
        budget_ms = min(self._turns.left_ms(leader), self._quantum_ms)
        rows = self._cost.slice_rows(run.remaining, budget_ms)
        members = [BatchMember(leader, run, rows), *self._joining(leader, rows)]
        return Batch(members, self._cost.predict_ms(sum(member.rows for member in members), len(members)))

    async def _run_batch(self, batch: Batch[Schedulable]) -> BatchResult:
        """Compute a batch: a short one at once, a longer one on the compute thread."""
        started_s, encoded_ms = time.perf_counter(), batch.encode_ms
        failed: Mapping[SweepRun, Exception]
        try:
            if batch.predicted_ms <= SHORT_MS and self._newest is None:
                failed, on_cpu_ms = _run_timed(batch)
                self.loop_cost.add_compute(on_cpu_ms)
                await asyncio.sleep(0)  # the loop's other work has its turn
            else:
                failed, on_cpu_ms = await self.on_thread(lambda: _run_timed(batch))
        except Exception as error:  # noqa: BLE001 - whatever a forward raises is its sweeps' fault, not the node's
            failed, on_cpu_ms = {member.run: error for member in batch.members}, 0.0
        measured_ms = (time.perf_counter() - started_s) * 1e3
        encoded_ms = batch.encode_ms - encoded_ms
        computed_ms = max((min(on_cpu_ms, measured_ms) if self._counts_cpu else measured_ms) - encoded_ms, 0.0)
        return BatchResult(failed, started_s, computed_ms)

    def _postprocess(self, batch: Batch[Schedulable], result: BatchResult) -> None:
        """Hand results to their sessions, charge each its share of the time, and learn what the batch cost."""
        rows = batch.rows
        self._sharers += SHARERS_RATE * (len(rows) - self._sharers)
        for member, share in zip(batch.members, self._cost.shares(rows, self._sharers), strict=True):
            member.run.compute_ms += result.computed_ms * share
            self._end(member, result.failed.get(member.run))
        passed_ms = (time.perf_counter() - result.started_s) * 1e3  # what sessions did with results is charged too
        self.worked_ms += passed_ms
        shares = self._cost.shares(rows)
        if not result.failed:
            self._cost.learn(sum(rows), result.computed_ms, len(rows))
        self._charge(batch, [passed_ms * share for share in shares])

    def _charge(self, batch: Batch[Schedulable], charged_ms: Sequence[float]) -> None:
        """Take from each balance what it used."""
        lead = batch.members[0].session
        for member, milliseconds in zip(batch.members, charged_ms, strict=True):
            self._turns.charge(member.session, milliseconds, is_lead=member.session is lead)

    def _next_run(self, session: Schedulable) -> SweepRun | None:
        try:
            return session.next_run()
        except Exception as error:  # noqa: BLE001 - one session's failure must not end the others
            session.fail(error)
            return None

    def _joining(self, leader: Schedulable, rows: int) -> Iterator[BatchMember[Schedulable]]:
        """Others whose whole sweeps share the forward of these rows, in the order of their turns.

        The law: one more member delays everybody in the batch by what it adds, and spares all that wait, itself
        included, one base. It joins while the first is no more than the second, so a round of turns is never longer
        for it. No batch is longer than a quantum. On a staircase those who fit into the bucket add nothing.
        """
        own = leader.pending()
        if own is None or not self._turns:
            return
        waiting = [
            (other, work)
            for other in self._turns.joining(leader)
            if (work := other.pending()) and work.span == own.span
        ]
        left, sessions, cost = len(waiting), 1, self._cost
        for other, work in waiting:
            pays = sessions * cost.joining_ms(work.rows, rows) <= left * cost.spared_ms(work.rows, rows)
            max_rows = cost.rows_within(self._quantum_ms - sessions * cost.per_session_ms)
            if not pays or rows + work.rows > max_rows:
                continue
            run = self._next_run(other)
            if run is None:
                continue
            sessions, rows, left = sessions + 1, rows + run.remaining, left - 1
            yield BatchMember(other, run, run.remaining)

    def _end(self, member: BatchMember[Schedulable], error: Exception | None) -> None:
        """Hand a sweep that is done, or failed, back to its session."""
        try:
            if error is not None:
                member.session.fail(error, member.run)
            elif member.run.is_done:
                self.loop_cost.end_sweep()
                member.session.finish(member.run)
        except Exception as trouble:  # noqa: BLE001 - one session's failure must not end the others
            member.session.fail(trouble, member.run)
