"""Virtual time: what shares cores, what waits, and what does one thing at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation.clock import Clock, FifoServer, Then

TASKS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=8)
EXACT_MS = 1e-6


def run(clock: Clock, tasks: list[tuple[int, int]], programs: Sequence[int] | None = None) -> list[float]:
    """When each is done that is ready at one time and computes for another. programs: whose each is."""
    ends: dict[int, float] = {}

    def end(number: int) -> None:
        ends[number] = clock.now_ms

    for number, (ready, took) in enumerate(tasks):
        program = None if programs is None else programs[number]
        clock.after(ready, partial(clock.compute, took, partial(end, number), program))
    clock.until(lambda: len(ends) == len(tasks))
    return [ends[number] for number in range(len(tasks))]


def shared(count: int, tasks: list[tuple[int, int]], programs: Sequence[int]) -> list[float]:
    """The same from one change to the next: each program gets its even part, and in it each that is ready."""
    left, ends, now = [float(took) for _, took in tasks], [0.0] * len(tasks), 0.0
    while any(left):
        able = [number for number, (ready, _) in enumerate(tasks) if ready <= now and left[number]]
        beside = Counter(programs[number] for number in able)
        rates = {number: min(1.0, count / len(beside)) / beside[programs[number]] for number in able}
        arrivals = [ready - now for ready, _ in tasks if ready > now]
        step = min(arrivals + [left[number] / rate for number, rate in rates.items()])
        now += step
        for number, rate in rates.items():
            left[number] -= rate * step
            if left[number] < EXACT_MS:
                left[number], ends[number] = 0.0, now
    return ends


@given(st.integers(1, 3), TASKS)
def test_what_computes_shares_cores_evenly(count: int, tasks: list[tuple[int, int]]) -> None:
    alone = range(len(tasks))
    assert run(Clock(count), tasks) == pytest.approx(shared(count, tasks, alone), abs=EXACT_MS)


@given(st.integers(1, 3), TASKS, st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_a_program_has_one_core_for_all_that_it_does(
    count: int, tasks: list[tuple[int, int]], programs: list[int]
) -> None:
    expected = shared(count, tasks, programs)
    assert run(Clock(count), tasks, programs) == pytest.approx(expected, abs=EXACT_MS)


@given(TASKS)
def test_with_cores_of_their_own_nobody_is_late(tasks: list[tuple[int, int]]) -> None:
    assert run(Clock(), tasks) == [ready + took for ready, took in tasks]
    assert run(Clock(len(tasks)), tasks) == pytest.approx([ready + took for ready, took in tasks])


def test_whoever_waits_lets_everything_else_go_on() -> None:
    clock, done = Clock(1), list[float]()
    clock.compute(10, lambda: done.append(clock.now_ms))
    clock.take(4)
    assert clock.now_ms == pytest.approx(8), "half of the core, and then it is done"
    assert not done
    clock.wait(5)
    assert clock.now_ms == pytest.approx(13)
    assert not done
    clock.wait(5)
    assert done == pytest.approx([14])
    with pytest.raises(RuntimeError, match="nothing is left"):
        clock.until(lambda: False)


def test_a_line_does_one_thing_at_a_time_in_order() -> None:
    clock, line, done = Clock(), FifoServer(), list[tuple[str, float]]()

    def work(took: float, then: Then) -> None:
        clock.after(took, then)

    for name, took in (("a", 5.0), ("b", 1.0), ("c", 2.0)):
        line.join(partial(work, took), partial(lambda one: done.append((one, clock.now_ms)), name))
    clock.wait(20)
    assert done == [("a", 5), ("b", 6), ("c", 8)]
    line.join(partial(work, 1.0), partial(lambda one: done.append((one, clock.now_ms)), "d"))
    clock.wait(5)
    assert done[-1] == ("d", 21), "an idle one begins at once"
