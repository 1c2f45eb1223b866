"""What the six cells' costs are taken from, and how real and replayed speeds are compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.control.cells import compare, costs_of, drafting_of
from benchmarks.control.cells_worker import CHOSEN, FIXED, PLAIN
from benchmarks.simulation.chain import HOPS, Costs

NOMINAL = Costs(25, 20)
MACHINE = Costs(0, 0, pass_ms=2.0)


def run(way: str, trips_ms: list[float], rows: int, compute_ms: float) -> dict[str, Any]:
    hops = {"queue_ms": [0.5] * HOPS, "compute_ms": [compute_ms] * HOPS}
    sweeps = [{"rows": rows, "total_ms": trip_ms, **hops} for trip_ms in trips_ms]
    return {"way": way, "tokens_per_s": 1e3 * len(trips_ms) / sum(trips_ms), "sweeps": sweeps}


def test_plain_decoding_replayed_takes_as_long_as_it_took_whatever_made_some_trips_longer() -> None:
    runs = [run(PLAIN, [130.0] * 9 + [330.0], 1, 5.0), run(FIXED, [140.0] * 4, 33, 8.2)]
    costs = costs_of(runs, MACHINE, NOMINAL)
    assert (costs.row_ms, costs.compute_ms(1), costs.wait_ms) == pytest.approx((0.1, 5.0, 0.5))
    assert costs.plain_ms() + HOPS * costs.wait_ms == pytest.approx(150)
    assert (costs.mbit, costs.pass_ms) == (20, 2.0)


def test_hops_that_are_not_alike_are_replayed_so() -> None:
    runs = [run(PLAIN, [130.0] * 9, 1, 5.0), run(FIXED, [140.0] * 4, 33, 8.2)]
    for sweep in [sweep for one in runs for sweep in one["sweeps"]]:
        mean_ms = sweep["compute_ms"][0]
        sweep["compute_ms"] = [0.5 * mean_ms, mean_ms, 1.5 * mean_ms]
    costs = costs_of(runs, MACHINE, NOMINAL)
    assert costs.paces == pytest.approx((0.5, 1.0, 1.5))
    assert [costs.compute_ms(1, hop) for hop in range(HOPS)] == pytest.approx([2.5, 5.0, 7.5])
    assert [costs.compute_ms(33, hop) for hop in range(HOPS)] == pytest.approx([4.1, 8.2, 12.3])


def test_drafting_costs_what_the_cells_own_runs_say() -> None:
    """Trees of two milliseconds, one more per pass, a tenth per row and a hundredth per node, heard of .5 later."""
    trees = [(passes, rows, nodes) for passes in (0, 1, 3) for rows in (1, 17, 40) for nodes in (8, 64)]
    grown = [(2.0 + passes + rows / 10 + nodes / 100, passes, rows, nodes) for passes, rows, nodes in trees]
    chosen = {"way": CHOSEN, "grown": grown, "learned": [1.0, 3.0], "sweeps": []}
    sweeps = [{"draft_ms": ms + 0.5} for ms, *_ in grown]
    fixed = {"way": FIXED, "grown": grown, "learned": [9.0], "sweeps": sweeps}
    costs = drafting_of([chosen, fixed], replace(MACHINE, handling_ms=4.0))
    drafting = (costs.grow_ms, costs.pass_ms, costs.pass_row_ms, costs.node_ms, costs.turn_ms, costs.learn_ms)
    assert drafting == pytest.approx((2.0, 1.0, 0.1, 0.01, 0.5, 2.0))
    assert costs.handling_ms == 4.0


def test_what_is_faster_than_its_network_is_not_taken_out_of_the_delay() -> None:
    runs = [run(PLAIN, [90.0] * 3, 1, 5.0), run(FIXED, [90.0] * 3, 1, 4.0)]
    costs = costs_of(runs, MACHINE, NOMINAL)
    assert (costs.delay_ms, costs.row_ms) == (NOMINAL.delay_ms, 0.0)


def test_several_replays_count_as_one_whose_texts_take_their_mean_time() -> None:
    plain, fixed = [10.0, 10.0, 10.0], [20.0, 20.0, 20.0]
    real = {PLAIN: plain, FIXED: fixed, CHOSEN: [40.0, 50.0, 60.0]}
    replays = [{**real, CHOSEN: [30.0, 60.0, 90.0]}, {**real, CHOSEN: [60.0, 30.0, 90.0]}]
    found = compare(MACHINE, real, replays)
    assert found.real[PLAIN] == pytest.approx(10)
    assert (found.ratio.value, found.virtual_ratio.value) == pytest.approx((5, 4))
    assert found.single_ratios == pytest.approx((6, 6))
    assert found.off == pytest.approx(-0.2)
    assert found.virtual[CHOSEN] == pytest.approx(3 / (2 / 40 + 1 / 90))
