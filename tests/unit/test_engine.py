"""Fair turns on one compute thread: equal milliseconds, debts kept, trouble walled off. Time is counted here."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import cast

import pytest

import node.engine
from node.engine import Engine, StepCost
from node.sweep_run import SweepRun


class Clock:
    """Advanced by the forwards that "run"; `share` of it is what they get of a CPU."""

    def __init__(self) -> None:
        self.now_s, self.share = 0.0, 1.0

    def perf_counter(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.now_s * self.share


class FakeRun:
    """A sweep of so many rows, each of which takes some milliseconds."""

    def __init__(self, clock: Clock, rows: int, row_ms: float) -> None:
        self.remaining, self.compute_ms, self.encode_ms = rows, 0.0, 0.0
        self._clock, self._row_ms = clock, row_ms

    @property
    def is_done(self) -> bool:
        return self.remaining == 0

    def advance(self, rows: int) -> None:
        self.remaining -= rows
        self._clock.now_s += rows * self._row_ms / 1e3


class FakeSession:
    """Always has another sweep, until `sweeps` are done."""

    def __init__(self, clock: Clock, sweeps: int, rows: int, row_ms: float = 1.0) -> None:
        self.left, self.served_ms, self.failed, self.ended = sweeps, 0.0, list[Exception](), asyncio.Event()
        self._clock, self._shape, self._run = clock, (rows, row_ms), cast("FakeRun | None", None)

    def next_run(self) -> SweepRun | None:
        if self._run is None and self.left:
            self._run = FakeRun(self._clock, *self._shape)
        if not self.left:
            self.ended.set()
        return cast("SweepRun | None", self._run)

    def finish(self, run: SweepRun) -> None:
        self._run, self.left, self.served_ms = None, self.left - 1, self.served_ms + run.compute_ms

    def fail(self, error: Exception, run: SweepRun | None = None) -> None:
        self._run, self.left = None, 0
        self.failed.append(error)
        self.ended.set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(node.engine, "time", clock)
    return clock


async def serve(engine: Engine, *sessions: FakeSession) -> None:
    """Run the engine until no session has work."""
    running = asyncio.get_running_loop().create_task(engine.run())
    for session in sessions:
        engine.submit(session)
    for session in sessions:
        await session.ended.wait()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_small_sweeps_and_long_slices_get_equal_time(clock: Clock) -> None:
    small, large = FakeSession(clock, 200, rows=5), FakeSession(clock, 200, rows=50)
    small_done_at = 0.0

    def watch(run: SweepRun) -> None:
        nonlocal small_done_at
        FakeSession.finish(small, run)
        small_done_at = clock.now_s if not small.left else 0.0

    small.finish = watch  # type: ignore[method-assign]
    await serve(Engine(StepCost(0.0, 1.0)), small, large)
    assert small.served_ms == pytest.approx(1_000)
    assert small_done_at == pytest.approx(2.0, rel=0.06), "seconds: half of the time was the other session's"


async def test_no_slice_is_longer_than_the_quantum(clock: Clock) -> None:
    slices = []
    advance = FakeRun.advance

    class Watched(FakeRun):
        def advance(self, rows: int) -> None:
            slices.append(rows)
            advance(self, rows)

    session = FakeSession(clock, 1, rows=500)
    session._run = Watched(clock, 500, 1.0)
    await serve(Engine(StepCost(0.0, 1.0), quantum_ms=50.0), session)
    assert sum(slices) == 500
    assert max(slices) == 50


@pytest.mark.parametrize(("counts_cpu", "computed_ms"), [(True, 25.0), (False, 100.0)])
async def test_what_others_had_of_the_cpu_is_no_computing(counts_cpu: bool, computed_ms: float, clock: Clock) -> None:
    """It is waiting then, which is what load is told by; where it cannot be told, all is computing."""
    clock.share = 0.25
    session = FakeSession(clock, 1, rows=100)
    await serve(Engine(StepCost(0.0, 1.0), counts_cpu=counts_cpu), session)
    assert session.served_ms == pytest.approx(computed_ms)


async def test_a_session_that_breaks_does_not_end_the_others(clock: Clock) -> None:
    class Broken(FakeSession):
        def next_run(self) -> SweepRun | None:
            if self.left:
                raise KeyError("a bug")
            return None

    class BadFinish(FakeSession):
        def finish(self, run: SweepRun) -> None:
            raise AssertionError("another")

    broken, bad, good = Broken(clock, 1, 1), BadFinish(clock, 1, 1), FakeSession(clock, 3, rows=5)
    await serve(Engine(StepCost(0.0, 1.0)), broken, bad, good)
    assert [type(error) for error in broken.failed + bad.failed] == [KeyError, AssertionError]
    assert good.left == 0
    assert not good.failed


def test_the_cost_forgets_a_wrong_start() -> None:
    cost = StepCost(base_ms=60.0, per_row_ms=0.1)
    for _ in range(100):
        cost.learn(8, 5.8)
        cost.learn(100, 15.0)
    assert cost.base_ms == pytest.approx(5.0, abs=0.2)
    assert cost.rows_within(50.0) == pytest.approx(450, rel=0.05)


def test_a_dear_base_is_paid_for_many_rows() -> None:
    assert StepCost(base_ms=400.0, per_row_ms=2.0).rows_within(50.0) == 200
    assert StepCost(base_ms=0.0, per_row_ms=100.0).rows_within(50.0) == node.engine.LEAST_ROWS


class ThreadRun(FakeRun):
    """Notes the thread that each slice runs on."""

    threads: set[int]

    def advance(self, rows: int) -> None:
        self.threads.add(threading.get_ident())
        super().advance(rows)


@pytest.mark.parametrize(("row_ms", "held", "in_loop"), [(1.0, False, True), (30.0, False, False), (1.0, True, False)])
async def test_short_slices_run_in_the_event_loop_but_never_beside_the_thread(
    clock: Clock, row_ms: float, *, held: bool, in_loop: bool
) -> None:
    engine = Engine(StepCost(0.0, row_ms))
    session = FakeSession(clock, sweeps=1, rows=4, row_ms=row_ms)
    run = session._run = ThreadRun(clock, 4, row_ms)
    run.threads = set()
    gate = threading.Event()
    async with asyncio.TaskGroup() as group:
        holding = group.create_task(engine.on_thread(gate.wait if held else bool))
        await asyncio.sleep(0)
        if not held:
            await holding
        asyncio.get_running_loop().call_later(0.05, gate.set)
        await serve(engine, session)
    assert (run.threads == {threading.get_ident()}) is in_loop
    assert len(run.threads) == 1
