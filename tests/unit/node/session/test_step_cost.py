"""What a sweep costs beside its forward, from clocks that the test moves."""

from __future__ import annotations

import pytest

from node.session.step_cost import LONG_TOKENS, MIN_ROWS, NEAR_S, READING_ROWS, LoopCost, StaircaseCost, StepCost


class Clocks:
    """Seconds of CPU and of time."""

    def __init__(self) -> None:
        self.cpu_s = self.now_s = 0.0

    def pass_(self, cpu_ms: float, idle_ms: float = 0.0) -> None:
        """So much time goes by."""
        self.cpu_s += cpu_ms / 1e3
        self.now_s += (cpu_ms + idle_ms) / 1e3


def test_it_is_what_the_loop_computes_beside_forwards() -> None:
    clocks = Clocks()
    handling = LoopCost(lambda: clocks.cpu_s, lambda: clocks.now_s)
    clocks.pass_(cpu_ms=5_000)
    handling.end_sweep()
    assert handling.mean_ms == 0, "what was before the first sweep is not its"
    for _ in range(200):
        clocks.pass_(cpu_ms=1.5, idle_ms=3)
        handling.end_sweep()
    assert handling.mean_ms == pytest.approx(1.5, rel=0.01)


def test_what_passes_between_sweeps_that_are_far_apart_is_not_theirs() -> None:
    clocks = Clocks()
    handling = LoopCost(lambda: clocks.cpu_s, lambda: clocks.now_s)
    for _ in range(20):
        handling.end_sweep()
        clocks.pass_(cpu_ms=40, idle_ms=NEAR_S * 1e3)
    assert handling.mean_ms == 0


def attending_ms(rows: int, context: int) -> float:
    """What a forward of 10 ms, 1 ms a row and 0.4 µs a key takes."""
    return 10.0 + rows + 4e-4 * context * (rows + READING_ROWS)


def learned(cost: StepCost) -> StepCost:
    """A prompt of 30,000 tokens in slices as the cost says, after short ones."""
    context = 0
    for _ in range(400):
        cost.learn(1, attending_ms(1, 100), context=100)
        cost.learn(48, attending_ms(48, 100), context=100)
    while context < 30_000:
        rows = cost.slice_rows(512, 50.0, context)
        cost.learn(rows, attending_ms(rows, context), context=context)
        context += rows
    return cost


@pytest.mark.parametrize("cost", [StepCost(10.0, 1.0), StaircaseCost({16: 26.0, 64: 74.0})])
def test_a_long_text_is_cut_by_what_it_attends_to_and_teaches_short_ones_nothing(cost: StepCost) -> None:
    before = StepCost(10.0, 1.0).rows_within(50.0)
    learned(cost)
    assert cost.attention_ms(8, 30_000) == pytest.approx(4e-4 * 30_000 * 14, rel=0.1)
    assert cost.rows_within(50.0, 30_000) == MIN_ROWS, "the fewest that are worth a forward"
    if isinstance(cost, StaircaseCost):
        assert cost.rows_within(50.0) == 16
    else:
        assert cost.rows_within(50.0) > 0.6 * before


def test_no_slice_of_a_long_text_takes_much_longer_than_its_budget() -> None:
    """As long as more than the fewest rows fit."""
    cost, context, worst = StepCost(10.0, 1.0), 0, 0.0
    while context < 8_000:
        rows = cost.slice_rows(512, 200.0, context)
        took = attending_ms(rows, context)
        worst = max(worst, took if context > 2 * LONG_TOKENS else 0.0)
        cost.learn(rows, took, context=context)
        context += rows
    assert worst < 1.3 * 200
