"""When a hop counts as slow, and when the session leaves it: looks, times and routes are given."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from client.chain.progress import (
    AGAIN_S,
    IDLE_SWEEPS,
    MAX_PAUSE_S,
    PAUSE_S,
    UNFOUND_S,
    WORKING_SWEEPS,
    PaceWatch,
    SweepLook,
)

IDLE = SweepLook(sequence=1, rows=8, predicted_s=0.05, waited_s=0.6, index=1)
WORKING = replace(IDLE, is_working=True)
ANSWERED = replace(IDLE, is_answered=True)


def looks(look: SweepLook, count: int, watch: PaceWatch) -> list[bool]:
    """What that many sweeps show, one after another."""
    return [watch.look(replace(look, sequence=number), 1.0 + number) for number in range(1, count + 1)]


@pytest.mark.parametrize(("look", "sweeps"), [(IDLE, IDLE_SWEEPS), (WORKING, WORKING_SWEEPS)])
def test_several_sweeps_show_who_is_slow(look: SweepLook, sweeps: int) -> None:
    assert looks(look, sweeps, PaceWatch()) == [False] * (sweeps - 1) + [True]


def test_one_sweep_counts_once_however_often_it_is_looked_at() -> None:
    watch = PaceWatch()
    assert not any(watch.look(IDLE, 1.0 + 0.2 * number) for number in range(50))


def test_a_tail_that_says_twice_that_it_answered_is_slow_at_once() -> None:
    watch = PaceWatch()
    assert not watch.look(ANSWERED, 1.0)
    assert not watch.look(ANSWERED, 1.0 + 0.5 * AGAIN_S)
    assert watch.look(ANSWERED, 1.01 + AGAIN_S)
    watch = PaceWatch()
    assert not watch.look(ANSWERED, 1.0)
    watch.answered(0.05, 0.4)  # its reply came
    assert not watch.look(replace(ANSWERED, sequence=2), 1.01 + AGAIN_S)


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(replace(WORKING, rows=512), id="a part of a prompt"),
        pytest.param(replace(WORKING, is_first=True), id="a first sweep"),
        pytest.param(replace(WORKING, waited_s=0.54), id="less than half a second"),
        pytest.param(replace(WORKING, predicted_s=0.3, waited_s=0.85), id="less than three times as long"),
    ],
)
def test_work_that_may_take_so_long_is_no_sign(look: SweepLook) -> None:
    assert not any(looks(look, 50, PaceWatch()))


def test_sweeps_in_time_are_forgiven() -> None:
    watch = PaceWatch()
    for number in range(50):
        assert not watch.look(replace(IDLE, sequence=number), float(number))
        watch.answered(0.05, 0.06)


def test_hops_in_turn_are_not_one_slow_hop() -> None:
    watch = PaceWatch()
    assert not any(watch.look(replace(IDLE, sequence=number, index=number % 3), 1.0) for number in range(50))
    watch = PaceWatch()
    assert looks(IDLE, IDLE_SWEEPS - 1, watch) == [False] * (IDLE_SWEEPS - 1)
    watch.forget()
    assert not watch.look(replace(IDLE, sequence=99), 9.0), "on another route"


@pytest.mark.parametrize(("around_s", "moves"), [(None, False), (0.31, False), (0.29, True)])
def test_the_session_stays_where_no_route_is_clearly_faster(around_s: float | None, moves: bool) -> None:
    watch = PaceWatch()
    assert watch.may_move(around_s, 0.6, 10.0) == moves
    assert not any(looks(IDLE, IDLE_SWEEPS, watch)), "nobody asks again at once"
    pause_s = PAUSE_S if moves else UNFOUND_S
    assert not watch.look(replace(IDLE, sequence=98), 10.0 + pause_s - 0.01)
    assert watch.look(replace(IDLE, sequence=99), 10.0 + pause_s)


def test_a_client_whose_own_line_is_slow_does_not_take_machines_in_turn() -> None:
    watch, moves = PaceWatch(), []
    for number in range(36_000):  # every sweep is late wherever it goes, for an hour
        now_s = 0.1 * number
        if watch.look(replace(IDLE, sequence=number), now_s) and watch.may_move(0.05, 0.6, now_s):
            moves.append(now_s)
            watch.forget()
    assert len(moves) <= 18
    gaps = [round(later - sooner) for sooner, later in pairwise(moves)]
    assert gaps == sorted(gaps)
    assert gaps[0] >= PAUSE_S
    assert gaps[-1] >= MAX_PAUSE_S
