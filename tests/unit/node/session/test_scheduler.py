"""Fair turns on one compute thread: equal milliseconds, debts kept, trouble walled off. Time is counted here."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import pytest

import node.session.scheduler
from node.session.admission import NETWORK_OWNERS, OwnerStanding, standing_of
from node.session.scheduler import (
    COMING_S,
    LONG_SLICE,
    MAX_OWNERS,
    SHORT_SLICE,
    Batch,
    Engine,
    PendingWork,
    Schedulable,
    Turns,
)
from node.session.step_cost import MIN_ROWS, StaircaseCost, StepCost
from node.session.sweep_run import SweepRun
from swarm.base.layers import Span
from swarm.compute.compute_thread import ComputeThread

SPAN = Span(0, 4)


class Clock:
    """Advanced by the forwards that "run"; `share` of it is what they get of a CPU."""

    def __init__(self) -> None:
        self.now_s, self.share = 0.0, 1.0

    def perf_counter(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.now_s * self.share


class FakeRun:
    """A sweep of so many rows, each of which takes some milliseconds; a forward takes some more."""

    forwards: ClassVar[list[list[int]]] = []
    """Rows of each run that shared it."""

    def __init__(self, clock: Clock, rows: int, row_ms: float, base_ms: float = 0.0) -> None:
        self.remaining, self.compute_ms, self.encode_ms, self.context = rows, 0.0, 0.0, 0
        self.error: Exception | None = None
        self._clock, self._row_ms, self._base_ms = clock, row_ms, base_ms

    @property
    def is_done(self) -> bool:
        return self.remaining == 0

    def advance(self, rows: int, others: Sequence[FakeRun] = ()) -> dict[FakeRun, Exception]:
        parts = {self: rows} | {other: other.remaining for other in others}
        self.forwards.append(list(parts.values()))
        self._clock.now_s += self._base_ms / 1e3
        for run, count in parts.items():
            run.remaining -= count
            self._clock.now_s += count * run._row_ms / 1e3
        return {run: run.error for run in parts if run.error is not None}


class FakeSession:
    """Always has another sweep, until `sweeps` are done."""

    def __init__(self, clock: Clock, sweeps: int, rows: int, row_ms: float = 1.0, base_ms: float = 0.0) -> None:
        self.left, self.served_ms, self.failed, self.ended = sweeps, 0.0, list[Exception](), asyncio.Event()
        self.span, self.error, self.owner = SPAN, cast("Exception | None", None), "one"
        self._clock, self._shape, self._run = clock, (rows, row_ms, base_ms), cast("FakeRun | None", None)

    def pending(self) -> PendingWork | None:
        if not self.left:
            return None
        return PendingWork(self.span, self._shape[0] if self._run is None else self._run.remaining)

    def next_run(self) -> SweepRun | None:
        if self._run is None and self.left:
            self._run = FakeRun(self._clock, *self._shape)
            self._run.error = self.error
        if not self.left:
            self.ended.set()
        return cast("SweepRun | None", self._run)

    def finish(self, run: SweepRun) -> None:
        self._run, self.left, self.served_ms = None, self.left - 1, self.served_ms + run.compute_ms

    def fail(self, error: Exception, run: SweepRun | None = None) -> None:
        self._run, self.left = None, 0
        self.failed.append(error)
        self.ended.set()


def run_fakes(batch: Batch[Schedulable]) -> dict[FakeRun, Exception]:
    """In place of a forward: the first member's fake says what became of all."""
    first, *others = (cast("FakeRun", member.run) for member in batch.members)
    assert batch.rows[1:] == [other.remaining for other in others], "whole sweeps join"
    return first.advance(batch.rows[0], others)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(node.session.scheduler, "time", clock)
    monkeypatch.setattr(Batch, "run", run_fakes)
    monkeypatch.setattr(FakeRun, "forwards", [])
    return clock


COMPUTING: list[ComputeThread] = []


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    yield
    while COMPUTING:
        COMPUTING.pop().close()


def engine_of(cost: StepCost, **options: Any) -> Engine:  # noqa: ANN401 - as the engine's
    """An engine with a thread of its own, which ends with the test."""
    COMPUTING.append(ComputeThread())
    return Engine(cost, COMPUTING[-1], **options)


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
    await serve(engine_of(StepCost(0.0, 1.0)), small, large)
    assert small.served_ms == pytest.approx(1_000)
    assert small_done_at == pytest.approx(2.0, rel=0.06), "seconds: half of the time was the other session's"


async def test_no_slice_is_longer_than_the_quantum(clock: Clock) -> None:
    slices = []
    advance = FakeRun.advance

    class Watched(FakeRun):
        def advance(self, rows: int, others: Sequence[FakeRun] = ()) -> dict[FakeRun, Exception]:
            slices.append(rows)
            return advance(self, rows, others)

    session = FakeSession(clock, 1, rows=500)
    session._run = Watched(clock, 500, 1.0)
    await serve(engine_of(StepCost(0.0, 1.0), quantum_ms=50.0), session)
    assert sum(slices) == 500
    assert max(slices) == 50


@pytest.mark.parametrize(("counts_cpu", "computed_ms"), [(True, 25.0), (False, 100.0)])
async def test_what_others_had_of_the_cpu_is_no_computing(counts_cpu: bool, computed_ms: float, clock: Clock) -> None:
    """It is waiting then, which is what load is told by; where it cannot be told, all is computing."""
    clock.share = 0.25
    session = FakeSession(clock, 1, rows=100)
    await serve(engine_of(StepCost(0.0, 1.0), counts_cpu=counts_cpu), session)
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
    await serve(engine_of(StepCost(0.0, 1.0)), broken, bad, good)
    assert [type(error) for error in broken.failed + bad.failed] == [KeyError, AssertionError]
    assert good.left == 0
    assert not good.failed


async def test_not_even_a_session_that_cannot_be_ended_ends_the_engine(clock: Clock) -> None:
    class Hopeless(FakeSession):
        def pending(self) -> PendingWork | None:
            raise KeyError("a bug")

        def fail(self, error: Exception, run: SweepRun | None = None) -> None:
            super().fail(error, run)
            raise AssertionError("another")

    hopeless, good = Hopeless(clock, 1, 1), FakeSession(clock, 3, rows=5)
    await serve(engine_of(StepCost(0.0, 1.0)), hopeless, good)
    assert [type(error) for error in hopeless.failed] == [KeyError]
    assert good.left == 0


async def test_sessions_that_wait_share_a_forward_and_are_told_their_parts(clock: Clock) -> None:
    """Of the base each as much, of the rest what its rows take; what the others' took, it waited."""
    few, many = FakeSession(clock, 400, 2, base_ms=8.0), FakeSession(clock, 400, 6, base_ms=8.0)
    await serve(engine_of(StepCost(8.0, 1.0)), few, many)
    assert {tuple(sorted(rows)) for rows in FakeRun.forwards} == {(2, 6)}
    assert few.served_ms / 400 == pytest.approx(4.0 + 2.0, rel=0.05)
    assert many.served_ms / 400 == pytest.approx(4.0 + 6.0, rel=0.05)


async def test_what_a_sweep_is_told_does_not_hang_on_who_happens_to_join_it(clock: Clock) -> None:
    """Shared once, a base counts as if it were not: or sizes would seem to cost what company does."""
    sessions = [FakeSession(clock, 1, 2, base_ms=8.0) for _ in range(2)]
    await serve(engine_of(StepCost(8.0, 1.0)), *sessions)
    assert FakeRun.forwards == [[2, 2]]
    assert [session.served_ms for session in sessions] == pytest.approx([8.0 + 2.0] * 2, rel=0.05)


async def test_nobody_joins_who_costs_the_others_more_than_it_saves(clock: Clock) -> None:
    """Ten rows make the first one 10 ms later; a forward of their own would make themselves 8 ms later."""
    small, large = FakeSession(clock, 1, 1, base_ms=8.0), FakeSession(clock, 1, 10, base_ms=8.0)
    await serve(engine_of(StepCost(8.0, 1.0)), small, large)
    assert FakeRun.forwards == [[1], [10]]


async def test_a_crowd_behind_is_worth_waiting_for_a_large_sweep(clock: Clock) -> None:
    """The same ten rows, where two more wait who would all be later by a forward."""
    crowd = [FakeSession(clock, 1, rows, base_ms=8.0) for rows in (1, 10, 1, 1)]
    await serve(engine_of(StepCost(8.0, 1.0)), *crowd)
    assert FakeRun.forwards == [[1, 10, 1, 1]]


async def test_only_runs_of_the_same_layers_share_a_forward(clock: Clock) -> None:
    sessions = [FakeSession(clock, 1, 1, base_ms=8.0) for _ in range(3)]
    sessions[1].span = Span(0, 2)
    await serve(engine_of(StepCost(8.0, 1.0)), *sessions)
    assert FakeRun.forwards == [[1, 1], [1]]


async def test_together_they_take_no_more_than_a_quantum(clock: Clock) -> None:
    sessions = [FakeSession(clock, 1, 20, 0.5, base_ms=10.0) for _ in range(4)]
    await serve(engine_of(StepCost(10.0, 0.5), quantum_ms=30.0), *sessions)
    assert FakeRun.forwards == [[20, 20], [20, 20]], "forty rows are 30 ms"


async def test_who_joins_others_uses_its_own_turns(clock: Clock) -> None:
    """Two that always have work get the same milliseconds, though only the small one's sweeps join the large one's."""
    small, large = FakeSession(clock, 400, 6, base_ms=8.0), FakeSession(clock, 60, 10, base_ms=8.0)
    parts: list[float] = []
    finish = large.finish

    def note(run: SweepRun) -> None:
        finish(run)
        parts.append(small.served_ms / large.served_ms)

    large.finish = note  # type: ignore[method-assign]
    await serve(engine_of(StepCost(8.0, 1.0)), small, large)
    assert [10, 6] in FakeRun.forwards
    assert [6, 10] not in FakeRun.forwards
    assert parts[-1] == pytest.approx(1.0, abs=0.1)


async def test_what_a_session_owes_for_joining_is_soon_paid(clock: Clock) -> None:
    """It joined a hundred forwards of a smaller one; then a third, with other layers, does not have all turns."""
    large, smaller, late = (
        FakeSession(clock, sweeps, rows, base_ms=8.0) for sweeps, rows in ((120, 7), (100, 1), (9, 9))
    )
    late.span = Span(0, 2)
    engine = engine_of(StepCost(8.0, 1.0))
    finish, served = smaller.finish, list[int]()

    def last(run: SweepRun) -> None:
        finish(run)
        if not smaller.left:
            engine.submit(late)

    smaller.finish = last  # type: ignore[method-assign]
    end = late.finish

    def note(run: SweepRun) -> None:
        end(run)
        served.append(large.left)

    late.finish = note  # type: ignore[method-assign]
    running = asyncio.get_running_loop().create_task(engine.run())
    for session in (smaller, large):
        engine.submit(session)
    await large.ended.wait()
    await late.ended.wait()
    running.cancel()
    assert FakeRun.forwards.count([1, 7]) + FakeRun.forwards.count([7, 1]) > 90
    assert len(set(served)) >= 3, f"the late one was served all at once: {served}"


@pytest.mark.parametrize("base_ms", [0.0, 8.0])
async def test_a_crowd_of_one_owner_gets_what_one_session_of_another_gets(base_ms: float, clock: Clock) -> None:
    """With a base their sweeps share forwards; whoever joins, the single one is served half of the time."""
    single = FakeSession(clock, 100, rows=10, base_ms=base_ms)
    single.owner = "another"
    crowd = [FakeSession(clock, 10_000, rows=10, base_ms=base_ms) for _ in range(20)]
    engine = engine_of(StepCost(base_ms, 1.0))
    running = asyncio.get_running_loop().create_task(engine.run())
    for session in (*crowd, single):
        engine.submit(session)
    await single.ended.wait()
    running.cancel()
    alone_ms = 100 * (10 + base_ms)
    assert clock.now_s * 1e3 <= 2.3 * alone_ms
    served = [session.served_ms for session in crowd]
    assert max(served) - min(served) <= 110, "and the crowd is served alike"


async def test_a_machine_that_carries_many_has_as_many_turns_as_sessions_up_to_its_weight(clock: Clock) -> None:
    single = FakeSession(clock, 100, rows=10)
    single.owner = "another"
    crowd = [FakeSession(clock, 10_000, rows=10) for _ in range(20)]
    engine = engine_of(StepCost(0.0, 1.0), standing=lambda owner: OwnerStanding(3 if owner == "one" else 1))
    running = asyncio.get_running_loop().create_task(engine.run())
    for session in (*crowd, single):
        engine.submit(session)
    await single.ended.wait()
    running.cancel()
    assert sum(session.served_ms for session in crowd) == pytest.approx(3_000, rel=0.1)


async def test_one_that_fails_in_a_shared_forward_ends_alone(clock: Clock) -> None:
    sessions = [FakeSession(clock, 2, 1, base_ms=8.0) for _ in range(3)]
    sessions[1].error = ArithmeticError("not finite")
    await serve(engine_of(StepCost(8.0, 1.0)), *sessions)
    assert FakeRun.forwards == [[1, 1, 1], [1, 1]]
    assert [len(session.failed) for session in sessions] == [0, 1, 0]
    assert [session.left for session in sessions] == [0, 0, 0]


def test_what_sessions_cost_in_a_forward_is_learned() -> None:
    """From a wrong start, forwards of one and of many told apart."""
    cost = StepCost(base_ms=1.0, per_row_ms=0.1)
    for _ in range(300):
        for sessions in (1, 4, 16):
            cost.learn(2 * sessions, 3.0 + 0.1 * 2 * sessions + 0.4 * (sessions - 1), sessions)
    assert cost.base_ms == pytest.approx(3.0, abs=0.1)
    assert cost.per_session_ms == pytest.approx(0.4, abs=0.02)
    assert cost.predict_ms(16, 8) == pytest.approx(3.0 + 1.6 + 2.8, abs=0.2)


@pytest.mark.parametrize("rows", [(5,), (1, 1, 1), (0, 0), (2, 30)])
def test_the_parts_of_a_forward_are_all_of_it(rows: tuple[int, ...]) -> None:
    for cost in (StepCost(3.0, 0.1), StepCost(0.0, 0.0)):
        assert sum(cost.shares(rows)) == pytest.approx(1.0)


def test_a_part_of_the_usual_base_is_the_same_in_any_company() -> None:
    cost = StepCost(8.0, 1.0)
    alone_ms = cost.predict_ms(2) * cost.shares((2,), sharers=2.0)[0]
    joined_ms = cost.predict_ms(2 + 6, sessions=2) * cost.shares((2, 6), sharers=2.0)[0]
    assert alone_ms == pytest.approx(joined_ms) == pytest.approx(4.0 + 2.0)


def test_the_cost_forgets_a_wrong_start() -> None:
    cost = StepCost(base_ms=60.0, per_row_ms=0.1)
    for _ in range(100):
        cost.learn(8, 5.8)
        cost.learn(100, 15.0)
    assert cost.base_ms == pytest.approx(5.0, abs=0.2)
    assert cost.rows_within(50.0) == pytest.approx(450, rel=0.05)


def test_a_dear_base_is_paid_for_many_rows() -> None:
    assert StepCost(base_ms=400.0, per_row_ms=2.0).rows_within(50.0) == 200
    assert StepCost(base_ms=0.0, per_row_ms=100.0).rows_within(50.0) == MIN_ROWS


class ThreadRun(FakeRun):
    """Notes the thread that each slice runs on."""

    threads: set[int]

    def advance(self, rows: int, others: Sequence[FakeRun] = ()) -> dict[FakeRun, Exception]:
        self.threads.add(threading.get_ident())
        return super().advance(rows, others)


async def test_every_slice_runs_on_the_one_thread_that_computes(clock: Clock) -> None:
    engine = engine_of(StepCost(0.0, 1.0))
    session = FakeSession(clock, sweeps=1, rows=4, row_ms=1.0)
    run = session._run = ThreadRun(clock, 4, 1.0)
    run.threads = set()
    await serve(engine, session)
    assert run.threads == {COMPUTING[0].submit(threading.get_ident).result()}


async def test_a_joint_step_fills_its_bucket_and_goes_no_further_where_that_does_not_pay(clock: Clock) -> None:
    """Rows that fit are free: the third of six would need another bucket, the four behind it do not."""
    sessions = [FakeSession(clock, 1, rows, row_ms=0.0, base_ms=5.0) for rows in (6, 6, 6, 4)]
    await serve(engine_of(StaircaseCost({16: 5.0, 32: 9.5})), *sessions)
    assert FakeRun.forwards == [[6, 6, 4], [6]]


async def test_a_joint_step_takes_the_next_bucket_where_that_spares_all_who_wait_more(clock: Clock) -> None:
    sessions = [FakeSession(clock, 1, 6, row_ms=0.0, base_ms=5.0) for _ in range(4)]
    await serve(engine_of(StaircaseCost({16: 5.0, 32: 5.5})), *sessions)
    assert FakeRun.forwards == [[6, 6, 6, 6]]
    assert [session.served_ms for session in sessions] == pytest.approx([5.0 / 4] * 4, rel=0.9)


async def test_a_prompts_slices_end_on_edges_and_trees_fill_the_last(clock: Clock) -> None:
    prompt, tree = FakeSession(clock, 1, 150, row_ms=0.0, base_ms=5.0), FakeSession(clock, 1, 10, 0.0, base_ms=5.0)
    await serve(engine_of(StaircaseCost({16: 5.0, 32: 5.0, 64: 5.0})), prompt, tree)
    assert FakeRun.forwards == [[64], [64], [22, 10]]


# Turns of owners and of their sessions, whatever comes and goes.


@dataclass(eq=False)
class Owed:
    """A session of an owner."""

    owner: str


def test_owners_alternate_and_sessions_of_one_too() -> None:
    turns: Turns[Owed] = Turns(10.0)
    sessions = [Owed(owner) for owner in "aaab"]
    for session in sessions:
        turns.submit(session)
        turns.submit(session)
    order = []
    for _ in range(8):
        session = turns.begin()
        assert turns.left_ms(session) == 10.0
        turns.charge(session, 10.0, is_lead=True)
        turns.end(session, has_work=True)
        order.append(sessions.index(session))
    assert order == [0, 3, 1, 3, 2, 3, 0, 3]


def test_who_joins_is_taken_from_all_owners_in_turn_and_no_crowd_of_another() -> None:
    turns: Turns[Owed] = Turns(10.0, lambda owner: OwnerStanding(2 if owner == "b" else 1))
    sessions = [Owed(owner) for owner in "aaabbbccc"]
    for session in sessions:
        turns.submit(session)
    leader = turns.begin()
    assert leader is sessions[0]
    assert [sessions.index(session) for session in turns.joining(leader)] == [1, 3, 6, 2, 4]


def test_what_an_owner_used_outlives_its_sessions_and_is_forgotten_in_the_end() -> None:
    turns: Turns[Owed] = Turns(10.0)
    for number in range(MAX_OWNERS + 100):
        joined, lead = Owed(f"joined {number}"), Owed("lead")
        turns.submit(lead)
        turns.submit(joined)
        session = turns.begin()
        turns.charge(session, 1.0, is_lead=True)
        turns.charge(joined, 100.0, is_lead=False)
        turns.end(session, has_work=False)
        while turns:
            turns.end(turns.begin(), has_work=False)
    assert len(turns._owners) <= MAX_OWNERS + 1
    assert not turns._queues


BUSY, TURN_MS, SMALL_MS = "busy", 10.0, 1.0


def serve_turns(turns: Turns[Owed]) -> str:
    """One turn; whose it was. Who is busy uses all of it and has more to do, others use a part and have not."""
    session = turns.begin()
    is_busy = session.owner.startswith(BUSY)
    turns.charge(session, TURN_MS if is_busy else SMALL_MS, is_lead=True)
    turns.end(session, has_work=is_busy)
    return session.owner


def always_busy(count: int) -> Turns[Owed]:
    """Owners of whom each has had a turn, and has more to do."""
    turns: Turns[Owed] = Turns(TURN_MS)
    for number in range(count):
        turns.submit(Owed(f"{BUSY} {number}"))
    for _ in range(count):
        serve_turns(turns)
    return turns


def test_who_waits_for_its_answers_does_not_wait_for_all_who_never_stop() -> None:
    turns, session = always_busy(8), Owed("a")
    for _ in range(8 * int(TURN_MS / SMALL_MS)):  # while it uses less than they do
        turns.submit(session)
        assert serve_turns(turns) == "a"
        assert serve_turns(turns).startswith(BUSY)


def test_who_comes_back_at_once_has_no_more_time_than_those_that_never_stop() -> None:
    turns, session, used = always_busy(3), Owed("a"), dict[str, float]()
    for _ in range(2_000):
        turns.submit(session)
        owner = serve_turns(turns)
        used[owner] = used.get(owner, 0.0) + (TURN_MS if owner.startswith(BUSY) else SMALL_MS)
    assert len(used) == 4
    assert max(used.values()) - min(used.values()) <= 2 * TURN_MS


def test_nobody_saves_time_while_it_is_idle() -> None:
    turns, idle = always_busy(2), Owed("busy late")
    turns.submit(idle)
    assert turns.begin() is idle
    turns.end(idle, has_work=False)
    for _ in range(100):
        serve_turns(turns)
    turns.submit(idle)
    served = [serve_turns(turns) for _ in range(9)]
    assert served.count("busy late") <= 4


def test_what_an_owner_used_in_turns_of_others_keeps_it_waiting_for_a_quantum_at_most() -> None:
    turns, joined = always_busy(1), Owed("busy joined")
    turns.submit(joined)
    for _ in range(100):
        session = turns.begin()
        turns.charge(session, 1.0, is_lead=True)
        if session is not joined:
            turns.charge(joined, 9.0, is_lead=False)
        turns.end(session, has_work=True)
    while (session := turns.begin()) is joined:
        turns.charge(session, TURN_MS, is_lead=True)
        turns.end(session, has_work=True)
    turns.end(session, has_work=False)  # the other one stops
    turns.submit(Owed("busy late"))
    assert "busy joined" in [serve_turns(turns) for _ in range(6)]


def of_networks(owner: str) -> OwnerStanding:
    return OwnerStanding(network=owner.partition(" of ")[2] or None)


def test_many_owners_of_one_network_have_the_turns_of_a_few() -> None:
    turns: Turns[Owed] = Turns(TURN_MS, of_networks)
    crowd = [Owed(f"{BUSY} {number} of crowd") for number in range(50)]
    for session in (*crowd, Owed(f"{BUSY} alone")):
        turns.submit(session)
    served = Counter(serve_turns(turns) for _ in range(500))
    assert served[f"{BUSY} alone"] == pytest.approx(500 / (NETWORK_OWNERS + 1), abs=5)
    of_crowd = [served[session.owner] for session in crowd]
    assert max(of_crowd) - min(of_crowd) <= 1, "and those of one network share them fairly"


def test_whom_the_operator_prefers_has_more_turns() -> None:
    turns: Turns[Owed] = Turns(TURN_MS, lambda owner: OwnerStanding(shares=3 if owner == f"{BUSY} own" else 1))
    for owner in (f"{BUSY} own", f"{BUSY} other"):
        turns.submit(Owed(owner))
    served = Counter(serve_turns(turns) for _ in range(400))
    assert served[f"{BUSY} own"] == pytest.approx(300, abs=4)


def test_a_contributor_has_its_shares_and_no_more_however_many_its_addresses_are() -> None:
    turns: Turns[Owed] = Turns(TURN_MS, lambda owner: standing_of(owner.removeprefix(f"{BUSY} ")))
    own = [f"{BUSY} gave 4 QmGiver 192.0.2.{number}" for number in range(10)]
    for owner in (*own, f"{BUSY} 9.9.9.9", f"{BUSY} own QmFriend"):
        turns.submit(Owed(owner))
    served = Counter(serve_turns(turns) for _ in range(1_300))
    assert sum(served[owner] for owner in own) == pytest.approx(400, abs=12)
    assert served[f"{BUSY} 9.9.9.9"] == pytest.approx(100, abs=4)
    assert served[f"{BUSY} own QmFriend"] == pytest.approx(800, abs=16)


async def test_a_prompt_goes_in_short_slices_while_others_come(clock: Clock) -> None:
    """Rows take a millisecond, a forward one more: a slice is short as soon as somebody else was seen."""
    engine, quantum_ms = engine_of(StepCost(1.0, 1.0, min_rows=1)), 50.0
    for seen in (False, True, False):
        clock.now_s += 2 * COMING_S
        if seen:
            other = FakeSession(clock, 1, rows=2, base_ms=1.0)
            other.owner = "another"
            await serve(engine, other)
        FakeRun.forwards.clear()
        await serve(engine, FakeSession(clock, 4, rows=200, base_ms=1.0))
        longest_ms = 1.0 + max(max(rows) for rows in FakeRun.forwards)
        assert longest_ms <= LONG_SLICE * SHORT_SLICE * quantum_ms if seen else longest_ms > 0.9 * quantum_ms


async def test_the_crowd_of_one_network_does_not_make_others_forwards_long(clock: Clock) -> None:
    crowd = [FakeSession(clock, 6, rows=8, base_ms=8.0) for _ in range(12)]
    for place, session in enumerate(crowd):
        session.owner = f"{place} of crowd"
    alone = FakeSession(clock, 6, rows=8, base_ms=8.0)
    alone.owner = "somebody"
    await serve(engine_of(StepCost(8.0, 1.0, min_rows=1), standing=of_networks), *crowd, alone)
    assert max(sum(rows) for rows in FakeRun.forwards[: len(FakeRun.forwards) // 3]) <= 16 + 8
