"""What a node of a tree costs, learned among machines that are busy with others."""

from __future__ import annotations

import random

import pytest

from swarm.budget import SWEEPS_IN_FLIGHT, Prospect, Spent
from swarm.sweep_cost import RouteCost

ROW_MS, CLAIMED_MS, NOISE_MS = 0.25, 0.3, 12.0
SIZES = (16, 12, 8, 6, 4, 8, 3, 6)


def taught(seed: int, sweeps: int, row_ms: float = ROW_MS) -> RouteCost:
    """A route whose machines claimed `CLAIMED_MS` per row, after sweeps whose compute hung on chance too."""
    rng, cost = random.Random(seed), RouteCost(Prospect(40, 12, CLAIMED_MS))
    for number in range(sweeps):
        nodes = SIZES[number % len(SIZES)]
        computed_ms = 12 + row_ms * (nodes + 1) + rng.gauss(0, NOISE_MS)
        cost.learn(
            Spent(nodes=nodes, total_ms=40 + 5 * computed_ms, waited_ms=4 * computed_ms, computed_ms=computed_ms)
        )
    return cost


def test_a_few_noisy_sweeps_do_not_outweigh_what_machines_claim() -> None:
    """Else a client's first texts under load were told with trees of two nodes: a node seemed six times as dear."""
    slopes = sorted(taught(seed, sweeps=12).compute.b for seed in range(200))
    assert slopes[190] < 5 * ROW_MS, "in 95 of 100 cases"


@pytest.mark.parametrize("row_ms", [0.1, 1.0])
def test_what_machines_claim_wrongly_is_found_out(row_ms: float) -> None:
    slopes = sorted(taught(seed, sweeps=100, row_ms=row_ms).compute.b for seed in range(100))
    assert slopes[50] == pytest.approx(row_ms, abs=0.25)


def cheap(links_ms: float) -> RouteCost:
    """A route whose forwards take next to nothing."""
    return RouteCost(Prospect(links_ms, compute_ms=1.5, row_ms=0.3, hops=3))


def test_a_slot_is_at_least_its_share_of_a_trip() -> None:
    """Else sweeps that cost nothing would leave until none may, and then wait for a trip."""
    for cost in (cheap(400), cheap(4)):
        share_ms = cost.sweep_ms(0) / SWEEPS_IN_FLIGHT
        for nodes in (1, 2, 8, 64):
            hop_ms = cost.compute.at(nodes) / 3
            assert cost.slot_ms(nodes) == pytest.approx(max(hop_ms, share_ms))
            assert cost.price_ms(nodes) == pytest.approx(cost.slot_ms(nodes))
    assert cheap(400).slot_ms(2) > 3 * cheap(4).slot_ms(2)


def test_a_tree_is_not_cut_where_that_saves_less_than_a_parts_share_of_a_trip() -> None:
    """Else, with forwards that cost nothing, it went in eight parts."""
    assert cheap(400).chunk(48) >= 24
    assert cheap(4).chunk(48) <= 12


def test_a_node_that_fills_up_its_sweeps_share_of_a_trip_costs_something_all_the_same() -> None:
    """Else drafting would go on for nodes of any chance."""
    cost = cheap(400)
    assert cost.price_ms(2) == cost.price_ms(1)
    assert cost.least_ms() == pytest.approx(0.3 / 3)
    busy = RouteCost(Prospect(40, 12, CLAIMED_MS, waiting_ms=36, hops=3))
    assert busy.load == pytest.approx(4)
    for others in (1.0, 2.0):
        assert busy.least_ms(others) == pytest.approx(busy.price_ms(40, others) - busy.price_ms(39, others))
