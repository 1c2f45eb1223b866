"""A node that started on a busy machine says soon how fast it is; one that is in use, or known, is left alone."""

from __future__ import annotations

from collections.abc import Callable

from node.life.span_host import MAX_WAIT, SpeedCheck
from node.session.measure import REPEATS

SIZES = (1, 8, 64)
BUSY = ((1, 24.0), (8, 31.0), (64, 61.0))


class Machine:
    """Runs forwards as fast as it is now."""

    def __init__(self, factor: float = 1.0, *, on_forward: Callable[[], None] = lambda: None) -> None:
        self.factor = factor
        self.worked_ms = 0.0
        self.forwards = 0
        self.on_forward = on_forward
        self.check = SpeedCheck(SIZES, self.forward_ms, lambda: self.worked_ms)

    async def forward_ms(self, nodes: int) -> float:
        self.forwards += 1
        self.on_forward()
        return self.factor * dict(BUSY)[nodes]


async def test_a_start_on_a_busy_machine_is_corrected_at_the_first_look() -> None:
    machine = Machine(0.25)
    assert await machine.check.look(BUSY) == ((1, 6.0), (8, 7.75), (64, 15.25))
    assert machine.forwards == REPEATS * len(SIZES)


async def test_what_is_known_is_looked_at_more_and_more_rarely() -> None:
    machine, looked = Machine(1.1), []
    for turn in range(4 * MAX_WAIT):
        before = machine.forwards
        assert await machine.check.look(BUSY) == BUSY
        if machine.forwards > before:
            assert machine.forwards == before + len(SIZES), "one forward of each size"
            looked.append(turn)
    assert looked == [0, 2, 6, 14, 29, 44, 59]
    machine.factor = 3.0  # something else runs there from now on
    announced: tuple[tuple[int, float], ...] = BUSY
    for _ in range(MAX_WAIT):
        announced = await machine.check.look(announced)
    assert announced == ((1, 72.0), (8, 93.0), (64, 183.0))


async def test_a_node_in_use_is_not_held_up() -> None:
    machine = Machine(0.25)
    for _ in range(3):
        machine.worked_ms += 5.0
        assert await machine.check.look(BUSY) == BUSY
    assert machine.forwards == 0
    assert await machine.check.look(BUSY) != BUSY, "it is idle now"


async def test_what_was_measured_beside_somebodys_work_is_not_announced() -> None:
    machine = Machine(3.0)

    def comes() -> None:
        machine.worked_ms += 5.0

    machine.on_forward = comes
    assert await machine.check.look(BUSY) == BUSY
    assert machine.forwards == len(SIZES)
