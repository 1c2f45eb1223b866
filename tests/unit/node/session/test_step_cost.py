"""What a sweep costs beside its forward, from clocks that the test moves."""

from __future__ import annotations

import pytest

from node.session.step_cost import NEAR_S, LoopCost


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
