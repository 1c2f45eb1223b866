"""Which hop is found not to move, and when: time and what hops say are given."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from client.chain.progress import (
    AGAIN_S,
    CONFIRM_S,
    FIRST_WORK_S,
    HASTE_S,
    LATE_S,
    SHORTEST_S,
    TAKE_S,
    WORK_S,
    WORK_TIMES,
    DueProgress,
    ProgressWatch,
    early_s,
    merged,
)
from swarm.base.errors import HopError, HopMisbehaved, HopSlow, HopTimeout
from swarm.protocol.messages import Held
from swarm.routing.costs import RouteForecast
from tests.planned_session import route

HOPS = route("ABC").hops
FORECAST = RouteForecast(links_ms=100.0, compute_ms=100.0, row_ms=10.0, hops=3)
DUE = DueProgress(FORECAST, 0, sequence=5, rows=1, since_s=0.0, first_has=5)
PREDICTED_S = 0.2

DONE = Held(held=True, is_ready=True, received=5, passed=5)
WORKS = Held(held=True, is_ready=True, received=5, passed=4, working=5)
QUEUED = Held(held=True, is_ready=True, received=6, passed=3, working=4)
SWALLOWED = Held(held=True, is_ready=True, received=5, passed=4)
LACKS = Held(held=True, is_ready=True, received=4, passed=4)
REPLAYS = Held(held=True, is_ready=True, received=0, passed=0, working=1)
LOST = Held(held=False)

Said = tuple[Held | None, ...]


def watched(
    said: Said, until_s: float, due: DueProgress = DUE, watch: ProgressWatch | None = None
) -> tuple[float, HopError | None]:
    """When somebody is accused of not moving, and of what, while the hops say the same all the time."""
    watch = ProgressWatch()
    now_s = due.since_s
    while now_s < due.since_s + until_s:
        if watch.must_ask(due, now_s):
            error = watch.judge(due, HOPS, said, now_s)
            if error is not None and not isinstance(error, HopSlow):
                return now_s - due.since_s, error
        now_s += 0.2
    return now_s, None


def test_a_forward_of_ten_seconds_is_no_stall() -> None:
    assert watched((DONE, DONE, WORKS), 13.0, replace(DUE, is_first=False))[1] is None


@dataclass(frozen=True, slots=True)
class Stuck:
    """What hops say, and the link that is at fault: its machine, and its other end."""

    said: Said
    peer: str
    other: str | None = None
    kind: type[HopError] = HopMisbehaved


@pytest.mark.parametrize(
    "stuck",
    [
        pytest.param(Stuck((DONE, DONE, SWALLOWED), "C"), id="a tail that does nothing"),
        pytest.param(Stuck((DONE, DONE, DONE), "C"), id="a tail that says it answered"),
        pytest.param(Stuck((DONE, SWALLOWED, LACKS), "B"), id="a hop that does nothing"),
        pytest.param(Stuck((SWALLOWED, LACKS, LACKS), "A"), id="hop 0 does nothing"),
        pytest.param(Stuck((LACKS, LACKS, LACKS), "A"), id="hop 0 says that it never had what it receipted"),
        pytest.param(Stuck((DONE, DONE, LACKS), "C", "B"), id="one of two lies"),
        pytest.param(Stuck((DONE, LACKS, LACKS), "B", "A"), id="one of two lies, before"),
        pytest.param(Stuck((DONE, LOST, LACKS), "B"), id="one has no such session"),
        pytest.param(Stuck((DONE, None, LACKS), "B", None, HopTimeout), id="one says nothing"),
        pytest.param(Stuck((DONE, DONE, None), "C", None, HopTimeout), id="the tail says nothing"),
    ],
)
def test_who_does_not_move_is_found_within_three_seconds(stuck: Stuck) -> None:
    after_s, error = watched(stuck.said, 10.0)
    assert error is not None
    assert (error.peer, error.other, type(error)) == (stuck.peer, stuck.other, stuck.kind)
    assert error.is_even == (stuck.other is not None)
    assert PREDICTED_S + LATE_S + CONFIRM_S <= after_s <= PREDICTED_S + 3.0


@pytest.mark.parametrize(
    ("said", "due"),
    [
        pytest.param((DONE, DONE, WORKS), DUE, id="a first forward with compilation"),
        pytest.param((DONE, QUEUED, LACKS), DUE, id="a machine with many sessions"),
        pytest.param((DONE, DONE, REPLAYS), DUE, id="a long replay"),
        pytest.param((WORKS, LACKS, LACKS), replace(DUE, rows=512), id="a long prompt"),
        pytest.param((DONE, None, WORKS), DUE, id="it came past one that cannot be asked"),
        pytest.param((LACKS, LACKS, LACKS), replace(DUE, first_has=4), id="the client itself sends yet"),
        pytest.param((LACKS, LACKS, LACKS), replace(DUE, first_has=None), id="the client attaches hop 0 yet"),
        pytest.param((DONE, DONE, DONE), replace(DUE, is_arriving=True), id="a large reply on a slow link"),
    ],
)
def test_who_works_is_left_alone(said: Said, due: DueProgress) -> None:
    assert watched(said, 30.0, due)[1] is None


@pytest.mark.parametrize(("is_first", "patience_s"), [(True, FIRST_WORK_S), (False, WORK_S)])
def test_who_says_that_it_works_is_believed_for_so_long(is_first: bool, patience_s: float) -> None:
    after_s, error = watched((DONE, DONE, WORKS), 100.0, replace(DUE, is_first=is_first))
    assert isinstance(error, HopMisbehaved)
    assert error.peer == "C"
    limit_s = WORK_TIMES * PREDICTED_S + patience_s
    assert limit_s <= after_s <= limit_s + 3.0


def test_who_moves_between_two_answers_is_not_accused() -> None:
    watch = ProgressWatch()
    for turn, said in enumerate([(DONE, DONE, SWALLOWED), (DONE, SWALLOWED, LACKS)] * 10):
        assert watch.judge(DUE, HOPS, said, 2.0 + turn) is None, "not twice the same"


def test_counting_up_is_not_moving_for_ever() -> None:
    watch, due, done = ProgressWatch(), replace(DUE, sequence=9_000), replace(DONE, received=9_000, passed=9_000)
    for passed in range(4_000):
        counts = replace(SWALLOWED, received=9_000, passed=passed)
        if (error := watch.judge(due, HOPS, (done, done, counts), 2.0 + 0.6 * passed)) is not None:
            break
    assert error is not None
    assert error.peer == "C"
    assert 0.6 * passed < WORK_TIMES * PREDICTED_S + FIRST_WORK_S


@pytest.mark.parametrize(("total_ms", "rows", "expected_s"), [(200.0, 1, 0.2), (2_000.0, 1, 2.0), (2_000.0, 21, 1.0)])
def test_what_sweeps_took_corrects_what_was_promised(total_ms: float, rows: int, expected_s: float) -> None:
    watch = ProgressWatch()
    for _ in range(3):
        watch.answered(total_ms, rows, FORECAST)
    assert watch.predicted_s(DUE) == pytest.approx(expected_s)
    assert watch._is_late(DUE, expected_s + LATE_S + 0.01)
    assert not watch._is_late(DUE, expected_s + LATE_S - 0.01)
    assert watch.must_ask(DUE, expected_s + LATE_S + 0.01)


def test_nobody_looks_at_the_clock_while_there_is_nothing_to_see() -> None:
    watch = ProgressWatch()
    assert watch.rest_s(None, 5.0, 0.2) == 0.2
    assert watch.rest_s(OPENING, 5.0, 0.2) == 0.2
    early = early_s(PREDICTED_S)
    assert watch.rest_s(DUE, early - 0.05, 0.2) == pytest.approx(0.05), "just when it may be looked at"
    assert watch.judge(DUE, HOPS, (DONE, DONE, DONE), early) is None
    assert watch.rest_s(DUE, early, 0.2) == pytest.approx(AGAIN_S)
    assert watch.rest_s(DUE, early + 1.0, 0.2) == SHORTEST_S


def test_a_promise_cannot_put_off_the_question_for_ever() -> None:
    slow = replace(FORECAST, compute_ms=1e300)
    assert ProgressWatch().must_ask(replace(DUE, forecast=slow), 62.0)


# A route that is slow


def slow_after(said: Said, *, late_s: float, sweeps: int, due: DueProgress = DUE) -> tuple[int, HopError | None]:
    """Which sweep shows who is slow, where each is away for so long and the hops say the same of all of them."""
    watch, now_s = ProgressWatch(), 0.0
    for sequence in range(1, sweeps + 1):
        first_has = None if due.first_has is None else sequence
        ahead = replace(due, sequence=sequence, since_s=now_s, first_has=first_has, is_first=sequence == 1)
        here = tuple(one and _moved_by(one, sequence - DUE.sequence) for one in said)
        for _ in range(round(late_s / 0.1)):
            now_s += 0.1
            if watch.must_ask(ahead, now_s) and (error := watch.judge(ahead, HOPS, here, now_s)) is not None:
                return sequence, error
        watch.answered((now_s - ahead.since_s) * 1e3, ahead.rows, FORECAST)
    return sweeps, None


def _moved_by(held: Held, sweeps: int) -> Held:
    working = held.working + sweeps if held.working else 0
    return replace(held, received=held.received + sweeps, passed=held.passed + sweeps, working=working)


@pytest.mark.parametrize(
    ("said", "late_s", "peer", "sweeps"),
    [
        pytest.param((DONE, DONE, DONE), 1.2, "C", 1, id="a tail that answers a second late"),
        pytest.param((DONE, SWALLOWED, LACKS), 0.9, "B", 3, id="a hop that passes sweeps on half a second late"),
        pytest.param((DONE, DONE, WORKS), 1.2, "C", 7, id="a tail that says it works for a second each time"),
        pytest.param((WORKS, LACKS, LACKS), 1.2, "A", 7, id="hop 0 says so"),
    ],
)
def test_who_holds_every_sweep_back_is_found_in_mid_text(said: Said, late_s: float, peer: str, sweeps: int) -> None:
    at, error = slow_after(said, late_s=late_s, sweeps=20)
    assert isinstance(error, HopSlow)
    assert (error.peer, at) == (peer, sweeps)


@pytest.mark.parametrize(
    ("said", "late_s", "due"),
    [
        pytest.param((DONE, DONE, WORKS), 0.6, DUE, id="three times as long, and little"),
        pytest.param((DONE, DONE, DONE), 0.3, DUE, id="in time"),
        pytest.param((DONE, DONE, WORKS), 8.0, replace(DUE, rows=512), id="parts of a long prompt"),
        pytest.param((DONE, None, WORKS), 1.2, DUE, id="not all of them can be asked"),
        pytest.param((DONE, DONE, LACKS), 0.9, DUE, id="nothing tells which end of a link"),
        pytest.param((DONE, SWALLOWED, WORKS), 0.7, DUE, id="the receipt is on its way"),
        pytest.param((LACKS, LACKS, LACKS), 1.2, replace(DUE, first_has=None), id="the client itself sends yet"),
    ],
)
def test_who_is_not_slow_is_left_alone(said: Said, late_s: float, due: DueProgress) -> None:
    assert slow_after(said, late_s=late_s, sweeps=20, due=due)[1] is None


# A route that is not attached

OPENING = DueProgress(FORECAST, 0, sequence=0, rows=0, since_s=0.0)
ATTACHED = Held(held=True)
READY = Held(held=True, is_ready=True)
WAITS = Held(held=True, working=1)


@pytest.mark.parametrize(
    ("said", "peer", "other", "least_s"),
    [
        pytest.param((ATTACHED, ATTACHED, ATTACHED), "C", None, 0.5, id="the tail never gets ready"),
        pytest.param((ATTACHED, ATTACHED, READY), "B", "C", 0.5, id="a hop says it does not hear the next"),
        pytest.param((READY, READY, READY), "A", None, 0.5, id="hop 0 says so to others only"),
        pytest.param((ATTACHED, LOST, LOST), "B", "A", TAKE_S, id="nobody attached the second"),
        pytest.param((LOST, LOST, LOST), "A", None, TAKE_S, id="nobody has it"),
        pytest.param((ATTACHED, None, READY), "B", None, 1.0, id="one says nothing"),
    ],
)
def test_who_keeps_a_route_from_standing_is_found(said: Said, peer: str, other: str | None, least_s: float) -> None:
    after_s, error = watched(said, 10.0, OPENING)
    assert error is not None
    assert (error.peer, error.other) == (peer, other)
    assert least_s <= after_s <= least_s + 2.0


@pytest.mark.parametrize(
    ("said", "due", "is_hasty", "found"),
    [
        pytest.param((ATTACHED, LOST, LOST), OPENING, True, ("B", "A"), id="nobody attached the second"),
        pytest.param((None, LOST, LOST), OPENING, True, ("A", None), id="one says nothing"),
        pytest.param((ATTACHED, LOST, LOST), OPENING, False, None, id="others were tried already"),
        pytest.param((ATTACHED, LOST, LOST), replace(OPENING, generation=1), True, None, id="a repair"),
        pytest.param((ATTACHED, ATTACHED, WAITS), OPENING, True, None, id="it waits for memory"),
    ],
)
def test_who_keeps_a_session_from_opening_is_left_sooner_where_others_are(
    said: Said, due: DueProgress, is_hasty: bool, found: tuple[str, str | None] | None
) -> None:
    watch = ProgressWatch()
    watch.is_hasty = is_hasty
    errors = [watch.judge(due, HOPS, said, 1.0 + 0.1 * turn) for turn in range(10)]
    slow = [error for error in errors if isinstance(error, HopSlow)]
    assert [(error.peer, error.other) for error in slow[:1]] == ([found] if found else [])
    assert errors[: round(10 * HASTE_S) - 1] == [None] * (round(10 * HASTE_S) - 1)


def test_hops_that_attach_one_after_another_have_the_time_each() -> None:
    watch = ProgressWatch()
    watch.is_hasty = True
    for turn, said in enumerate([(LOST, LOST, LOST), (ATTACHED, LOST, LOST), (ATTACHED, ATTACHED, LOST)]):
        for step in range(round(10 * HASTE_S) - 1):
            assert watch.judge(OPENING, HOPS, said, 1.0 + HASTE_S * turn + 0.1 * step) is None


def test_a_hop_that_waits_for_its_memory_is_left_alone() -> None:
    assert watched((ATTACHED, ATTACHED, WAITS), 30.0, OPENING)[1] is None


def test_an_old_route_is_not_the_new_one() -> None:
    """In a repair there is less time: another route is tried after four seconds (R7)."""
    due = replace(OPENING, generation=2)
    new, old = replace(ATTACHED, generation=2), replace(READY, generation=1)
    after_s, error = watched((new, old, old), 10.0, due)
    assert error is not None
    assert (error.peer, error.other) == ("B", "A")
    assert after_s < 4.0


def test_two_replicas_are_as_far_as_either() -> None:
    assert merged(WORKS, SWALLOWED) == WORKS
    assert merged(DONE, SWALLOWED) == DONE
    assert merged(None, DONE) == merged(LOST, DONE) == merged(DONE, None) == DONE
    assert merged(None, None) is None
    assert merged(LOST, None) == LOST
