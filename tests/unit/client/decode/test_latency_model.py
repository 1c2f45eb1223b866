"""What a sweep and a node of a tree cost, learned among machines that are busy with others, or only seem to be."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from statistics import fmean

import pytest

from client.base.stats import SweepMeasurement
from client.decode.latency_model import MIN_FIRST_ROWS, PINGS_MS, USUAL_SWEEPS, LatencyModel
from client.decode.policy import SWEEPS_IN_FLIGHT
from swarm.routing.costs import RouteForecast
from tests.sweep_measurements import measured, with_pings

ROW_MS, CLAIMED_MS, NOISE_MS = 0.25, 0.3, 12.0
SIZES = (16, 12, 8, 6, 4, 8, 3, 6)
PINGED = measured(16, total_ms=120, waited_ms=0, computed_ms=20, hops=3, network_ms=100)


def taught(seed: int, sweeps: int, row_ms: float = ROW_MS) -> LatencyModel:
    """A route whose machines claimed `CLAIMED_MS` per row, after sweeps whose compute hung on chance too."""
    rng, cost = random.Random(seed), LatencyModel(RouteForecast(40, 12, CLAIMED_MS))
    for number in range(sweeps):
        nodes = SIZES[number % len(SIZES)]
        computed_ms = 12 + row_ms * (nodes + 1) + rng.gauss(0, NOISE_MS)
        cost.learn(
            measured(nodes=nodes, total_ms=40 + 5 * computed_ms, waited_ms=4 * computed_ms, computed_ms=computed_ms)
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


def cheap(links_ms: float) -> LatencyModel:
    """A route whose forwards take next to nothing."""
    return LatencyModel(RouteForecast(links_ms, compute_ms=1.5, row_ms=0.3, hops=3))


def test_a_slot_is_at_least_its_share_of_a_trip() -> None:
    """Else sweeps that cost nothing would leave until none may, and then wait for a trip."""
    for cost in (cheap(400), cheap(4)):
        share_ms = cost.sweep_ms(0) / SWEEPS_IN_FLIGHT
        for nodes in (1, 2, 8, 64):
            hop_ms = cost.compute.at(nodes) / 3
            assert cost.service_interval_ms(nodes) == pytest.approx(max(hop_ms, share_ms))
            assert cost.price_ms(nodes) == pytest.approx(cost.service_interval_ms(nodes))
    assert cheap(400).service_interval_ms(2) > 3 * cheap(4).service_interval_ms(2)


def test_a_slot_is_the_slowest_hops() -> None:
    """As it is claimed, until sweeps say who computes how long; a single stall says little."""
    alike, claimed, told = (
        LatencyModel(RouteForecast(100, 24, 0.3, hops=3, bottleneck_share=bottleneck_share))
        for bottleneck_share in (0.0, 0.75, 0.25)
    )
    for _ in range(USUAL_SWEEPS):
        told.learn(measured(8, 124, 0, 24, 3, computes_ms=(3, 18, 3)))
    told.learn(measured(8, 1100, 0, 1000, 3, computes_ms=(994, 3, 3)))
    for nodes in (1, 8, 64):
        even_ms = alike.compute.at(nodes) / 3
        assert alike.service_interval_ms(nodes) == pytest.approx(even_ms)
        assert claimed.service_interval_ms(nodes) == pytest.approx(even_ms * 3 * 0.75)
        assert claimed.price_ms(nodes) == pytest.approx(claimed.service_interval_ms(nodes))
        assert told.service_interval_ms(nodes) == pytest.approx(told.compute.at(nodes) * 0.75, rel=0.04)
    assert claimed.node_price_ms() == pytest.approx(3 * 0.75 * alike.node_price_ms())


def test_a_slot_is_that_of_the_hop_where_others_wait() -> None:
    """One of three machines that are alike has three other sweeps before each of ours."""
    popular, shared = (LatencyModel(RouteForecast(100, 24, 0.0, hops=3)) for _ in range(2))
    for cost, waits_ms in ((popular, (0, 24, 0)), (shared, (8, 8, 8))):
        for _ in range(USUAL_SWEEPS):
            cost.learn(measured(8, 148, 24, 24, 3, waits_ms=waits_ms, computes_ms=(8, 8, 8)))
    assert popular.load == shared.load == pytest.approx(2)
    assert popular.service_interval_ms(8) == pytest.approx(8 + 24)
    assert shared.service_interval_ms(8) == pytest.approx(8 + 8)


def test_a_tree_is_not_cut_where_that_saves_less_than_a_parts_share_of_a_trip() -> None:
    """Else, with forwards that cost nothing, it went in eight parts."""
    assert cheap(400).chunk(48) >= 24
    assert cheap(4).chunk(48) <= 12


def test_a_node_that_fills_up_its_sweeps_share_of_a_trip_costs_something_all_the_same() -> None:
    """Else drafting would go on for nodes of any chance."""
    cost = cheap(400)
    assert cost.price_ms(2) == cost.price_ms(1)
    assert cost.node_price_ms() == pytest.approx(0.3 / 3)
    busy = LatencyModel(RouteForecast(40, 12, CLAIMED_MS, waiting_ms=36, hops=3))
    assert busy.load == pytest.approx(4)
    for others in (1.0, 2.0):
        assert busy.node_price_ms(others) == pytest.approx(busy.price_ms(40, others) - busy.price_ms(39, others))


def load_after(cost: LatencyModel, waits_ms: list[float]) -> float:
    """The load that is believed in after such waits."""
    for wait_ms in waits_ms:
        cost.learn(measured(8, total_ms=120 + wait_ms, waited_ms=wait_ms, computed_ms=20, hops=3))
    return cost.load


def test_a_load_that_went_away_is_forgotten_within_as_many_sweeps_as_are_compared() -> None:
    """With weights that fade, half of it was believed in after twenty-three sweeps, and a tenth after seventy-six."""
    cost = LatencyModel(RouteForecast(100, 20, 0.1, hops=3))
    assert load_after(cost, [100.0] * 100) == pytest.approx(6)
    assert load_after(cost, [0.0] * (USUAL_SWEEPS // 2)) == pytest.approx(3.5, rel=0.1)
    assert load_after(cost, [0.0] * (USUAL_SWEEPS // 2)) == 1


def test_a_stall_is_no_crowd() -> None:
    """One machine that slept for ten seconds made a hundred sharers of two for whole texts."""
    cost = LatencyModel(RouteForecast(100, 20, 0.1, hops=3))
    assert load_after(cost, [2.0] * 40) == pytest.approx(1.1)
    assert load_after(cost, [10_000.0]) < 1.3
    assert load_after(cost, [2.0] * USUAL_SWEEPS) == pytest.approx(1.1)


def test_waits_that_differ_as_those_of_a_queue_do_all_count() -> None:
    rng, cost = random.Random(5), LatencyModel(RouteForecast(100, 20, 0.1, hops=3))
    waits_ms = [rng.expovariate(1 / 40) for _ in range(400)]
    loads = [load_after(cost, [wait_ms]) for wait_ms in waits_ms][USUAL_SWEEPS:]
    assert fmean(loads) == pytest.approx(1 + fmean(waits_ms) / 20, rel=0.05)


def piped(
    link_row_ms: float, rows: int, *, behind: int = 1, delays_ms: float = 100, held_ms: float = 0.0
) -> LatencyModel:
    """Thirty sweeps that leave one after another over two links, said to take .1 ms per row; pings know their delays.

    held_ms: for how long a lost packet held what came after it, in the middle.
    """
    cost = LatencyModel(RouteForecast(delays_ms, 20, 0.1, 0.2, hops=3))
    cost.learn(measured(1, total_ms=delays_ms + 20.6, waited_ms=0, computed_ms=20, hops=3))
    free_ms, back_ms = 0.0, 0.0
    for number in range(30):
        left_ms = number * 10.0
        free_ms = max(free_ms, left_ms) + link_row_ms * rows
        back_ms = max(free_ms + link_row_ms * rows + delays_ms, back_ms, held_ms if number >= 10 else 0.0)
        cost.learn(
            measured(
                rows - 1,
                total_ms=20 + back_ms - left_ms,
                waited_ms=0,
                computed_ms=20,
                hops=3,
                is_alone=False,
                network_ms=delays_ms,
                sent_ms=left_ms,
                behind=behind if number else 0,
            )
        )
    return cost


@pytest.mark.parametrize("link_row_ms", [1.0, 5.0, 30.0])
def test_a_link_that_sweeps_queue_for_is_found_out_by_how_late_they_are(link_row_ms: float) -> None:
    """None of them is alone, so none says what it would take by itself; a full pipe would be filled ever more."""
    cost = piped(link_row_ms, rows=20)
    assert cost.links.b == pytest.approx(2 * link_row_ms, rel=0.2)
    assert cost.service_interval_ms(20) == pytest.approx(20 * link_row_ms, rel=0.2)
    assert cost.load == 1
    assert piped(link_row_ms, rows=20, behind=0).links.b < link_row_ms, "where none was on its way it is none's queue"


def test_a_link_that_keeps_up_is_left_alone() -> None:
    assert piped(0.1, rows=20).links.b == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize("link_row_ms", [0.25, 5.0])
def test_a_row_takes_no_more_on_links_than_any_sweep_left_for_it(link_row_ms: float) -> None:
    """Late packets made rows seem ten times as dear as they were: sweeps became small, and told even less of them."""
    for seed in range(20):
        rng, cost, most_ms = random.Random(seed), LatencyModel(RouteForecast(400, 20, 0.1, 0.25, hops=3)), list[float]()
        for number in range(40):
            rows = 8 + SIZES[number % len(SIZES)] // 4
            links_ms = 400 + link_row_ms * rows + rng.expovariate(1 / 15)
            cost.learn(measured(rows - 1, total_ms=20 + links_ms, waited_ms=0, computed_ms=20, hops=3, network_ms=400))
            most_ms.append((links_ms - 400 + PINGS_MS) / rows)
        assert cost.links.b <= min(most_ms[-USUAL_SWEEPS:]) < link_row_ms + 1
        assert cost.links.at(10) == pytest.approx(400 + 10 * link_row_ms + 15, abs=10)


def test_what_a_lost_packet_held_back_is_no_slow_link() -> None:
    """All of it comes at once, which rows that waited for each other do not."""
    assert piped(0.1, rows=20, held_ms=500).links.b == pytest.approx(0.2, rel=0.2)


def test_delays_that_are_longer_than_said_are_no_slow_link() -> None:
    for network_ms in (0.0, 200.0):
        cost = LatencyModel(RouteForecast(50, 20, 0.1, 0.2, hops=3))
        for number in range(30):
            sent_ms, is_alone = 10.0 * number, number > 5
            cost.learn(
                measured(19, 224, 0, 20, 3, is_alone=is_alone, network_ms=network_ms, sent_ms=sent_ms, behind=number)
            )
        assert cost.links.b == pytest.approx(0.2, rel=0.2)
        assert cost.sweep_ms(19) == pytest.approx(224, rel=0.05)


def test_the_first_sweep_that_is_late_by_more_than_machines_explain_tells_of_its_bytes() -> None:
    """Where pings know the delays; else it may be those."""
    first = measured(19, total_ms=120 + 20 * 30, waited_ms=0, computed_ms=20, hops=3, network_ms=100, sent_ms=0.0)
    cost = LatencyModel(RouteForecast(100, 20, 0.1, 0.2, hops=3))
    cost.learn(first)
    assert cost.links.b == pytest.approx(30)
    assert cost.links.a == pytest.approx(100)
    unknown = LatencyModel(RouteForecast(100, 20, 0.1, 0.2, hops=3))
    unknown.learn(with_pings(first, 0.0))
    assert unknown.links.b == pytest.approx(0.2)


def prompt(rows: int, links_ms: float, *, network_ms: float = 100) -> LatencyModel:
    """A prompt was read over links that are said to take .2 ms per row."""
    cost = LatencyModel(RouteForecast(100, 20, 0.1, 0.2, hops=3))
    cost.learn_prompt(measured(rows - 1, links_ms + 30, 0, 30, 3, network_ms=network_ms, sent_ms=0.0, is_prompt=True))
    return cost


def test_a_prompt_tells_how_slow_links_are_before_a_tree_has_to() -> None:
    cost = prompt(100, 100 + 30 * 100)
    assert 15 < cost.links.b <= 30
    assert not cost.links.is_known, "it is no line"
    cost.learn(measured(0, total_ms=150, waited_ms=0, computed_ms=20, hops=3, network_ms=100, sent_ms=9e3))
    assert cost.links.b > 15


def test_a_prompt_for_which_tcp_begins_slowly_says_nothing_of_links() -> None:
    """A hundred packets, of which ten leave at first, take three round trips more on a link without end."""
    assert prompt(100, 100 + 3 * 200).links.b == pytest.approx(0.2)


def test_without_pings_what_a_prompt_and_a_tree_behind_it_take_may_be_all_delay() -> None:
    """Three seconds each, where a tenth of one was claimed; the tree left while the prompt was on its way."""
    cost = LatencyModel(RouteForecast(100, 20, 0.1, 0.2, hops=2))
    cost.learn_prompt(measured(99, 3030, 0, 30, 2, sent_ms=0.0, is_prompt=True))
    assert cost.links.b == pytest.approx(0.2)
    cost.learn(measured(8, 3020, 0, 20, 2, is_alone=False, sent_ms=300.0, behind=1))
    assert cost.links.b < 1


def test_a_prompt_tells_that_links_are_much_faster_than_said() -> None:
    assert prompt(100, 100 + 0.05 * 100).links.b == pytest.approx(0.05)
    assert prompt(100, 100 + 0.19 * 100).links.b == pytest.approx(0.2), "as was said, more or less"


def test_parts_of_a_prompt_wait_for_each_other() -> None:
    """Each row takes 15 ms on each of two links; a part is behind all that left before it."""
    cost = LatencyModel(RouteForecast(100, 20, 0.1, 0.2, hops=3))
    for behind, back_ms in enumerate((100 + 2 * 1500, 100 + 3 * 1500)):
        behind_of = partial(measured, network_ms=100.0, sent_ms=0.0, is_alone=False)
        cost.learn_prompt(behind_of(99, 30 + back_ms, 0, 30, 3, behind=behind, is_prompt=True))
        assert 15 < cost.links.b <= 30
    total_ms = 20 + 100 + 3 * 1500 + 9 * 15
    cost.learn(measured(8, total_ms, 0, 20, 3, is_alone=False, network_ms=100, sent_ms=10.0, behind=2))
    assert 15 < cost.links.b <= 45, "a tree behind them waited for rows, and did not take so long itself"


def test_what_came_right_behind_other_rows_may_have_waited_for_them() -> None:
    """Where links are slower than said, a sweep is thought to be alone that is not."""
    cost = prompt(100, 100 + 30 * 100)
    first = measured(8, 20 + 100 + 9 * 30, 0, 20, 3, network_ms=100, sent_ms=9_000.0)
    cost.learn(replace(first, is_alone=False))
    behind = measured(0, 20 + 100 + 9 * 30 + 15 - 10, 0, 20, 3, network_ms=100, sent_ms=9_010.0, behind=1)
    cost.learn(behind)
    assert not cost.links.is_known or cost.links.a < 200


def test_until_links_were_measured_no_more_leaves_than_ten_times_slower_ones_take_in_a_trip() -> None:
    quick, slow = (LatencyModel(RouteForecast(400, 20, 0.1, row_ms, hops=3)) for row_ms in (0.25, 4.0))
    assert quick.max_unanswered_nodes == pytest.approx(quick.sweep_ms(0) / 2.5)
    assert slow.max_unanswered_nodes == MIN_FIRST_ROWS
    quick.learn(measured(16, total_ms=430, waited_ms=0, computed_ms=22, hops=3))
    assert quick.max_unanswered_nodes == math.inf


def closed_queue_ms(clients: int, away_ms: float, served_ms: float) -> float:
    """For how long each of so many clients is at a server that they come back to: exact mean value analysis."""
    there, at_ms = 0.0, 0.0
    for present in range(1, clients + 1):
        at_ms = served_ms * (1 + there)
        there = at_ms * present / (away_ms + at_ms)
    return at_ms


@pytest.mark.parametrize("clients", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("links_ms", [5, 20, 60, 200])
@pytest.mark.parametrize("compute_ms", [5, 15])
def test_a_millisecond_is_as_dear_as_a_closed_queue_makes_it(clients: int, links_ms: float, compute_ms: float) -> None:
    at_ms = closed_queue_ms(clients, links_ms, compute_ms)
    cost = LatencyModel(RouteForecast(links_ms, compute_ms, 0.0))
    for _ in range(200):
        cost.learn(measured(0, links_ms + at_ms, at_ms - compute_ms, compute_ms))
    slower, faster = (closed_queue_ms(clients, links_ms, compute_ms + by) for by in (1e-3, -1e-3))
    assert cost.shadow_price == pytest.approx((slower - faster) / 2e-3, rel=0.06)


def test_a_network_that_became_slower_is_no_load_once_pings_say_so() -> None:
    """Pings come seldom, and only when all of the last ones were slow it is the network: what was thought is undone."""
    cost, slower = LatencyModel(), replace(PINGED, total_ms=PINGED.total_ms + 40)
    for _ in range(100):
        cost.learn(PINGED)
    for _ in range(USUAL_SWEEPS):
        cost.learn(slower)
    assert cost.sharers > 2.5, "nothing says yet that nobody else is there"
    cost.learn(with_pings(slower, 140.0))
    assert cost.sharers == pytest.approx(1, abs=0.01)
    for _ in range(USUAL_SWEEPS):
        cost.learn(replace(with_pings(slower, 140.0), total_ms=slower.total_ms + 40))
    assert cost.sharers > 2.5, "later than that network"


def test_pings_that_are_not_known_yet_or_better_by_now_excuse_nothing() -> None:
    for before_ms, now_ms in ((0.0, 140.0), (140.0, 100.0), (140.0, 0.0)):
        cost = LatencyModel()
        for _ in range(100):
            cost.learn(with_pings(PINGED, before_ms))
        for _ in range(USUAL_SWEEPS):
            cost.learn(replace(with_pings(PINGED, now_ms), total_ms=PINGED.total_ms + 40))
        assert cost.sharers > 2.5


@pytest.mark.parametrize("row_ms", [0.0, 0.3])
def test_who_is_alone_finds_no_crowd_however_rough_the_network(row_ms: float) -> None:
    """Every tenth sweep is late by more than its compute, and what a row costs is learned only as one goes."""
    cost, draw = LatencyModel(), random.Random(5)
    for sweep, nodes in enumerate((0, 64, 16, 48) * 20):
        links_ms = 100 + row_ms * (nodes + 1) + draw.uniform(0, 4) + 40 * (sweep % 10 == 9)
        cost.learn(measured(nodes, links_ms + 20, 0.0, 20.0, hops=3))
    assert cost.sharers == pytest.approx(1, abs=0.05)


def stalled(nodes: int, computed_ms: float = 930.0) -> SweepMeasurement:
    """A sweep of which hops say that they computed for so long."""
    return measured(nodes, total_ms=100 + computed_ms, waited_ms=0, computed_ms=computed_ms, hops=3)


def test_a_stall_far_beyond_what_machines_claim_counts_when_it_comes_again() -> None:
    """A card that loads kernels for each new size made whole texts plain ones."""
    cost = LatencyModel(RouteForecast(100, 24, 0.3, hops=3))
    cost.learn(stalled(16))
    assert cost.compute.at(17) == pytest.approx(24 + 16 * 0.3, rel=0.05), "once is no news"
    cost.learn(stalled(64))
    assert cost.compute.at(65) < 60, "nor is it with another size"
    cost.learn(stalled(48))
    assert cost.compute.at(49) > 500, "but with about the same one"
    cost = LatencyModel(RouteForecast(100, 24, 0.3, hops=3))
    for nodes in (4, 16, 64):
        cost.learn(stalled(nodes))
    assert cost.compute.at(65) > 500, "and three times"


def test_a_sweep_that_takes_a_fraction_of_what_those_before_took_shows_that_they_stalled() -> None:
    cost = LatencyModel(RouteForecast(100, 24, 0.3, hops=3))
    for _ in range(2):
        cost.learn(stalled(16))
    cost.learn(stalled(16, 28.0))
    assert cost.compute.at(17) == pytest.approx(28, rel=0.1)
    cost = LatencyModel(RouteForecast(100, 24, 0.3, hops=3))
    for _ in range(2):
        cost.learn(stalled(64))
    cost.learn(stalled(2, 26.0))
    assert cost.compute.at(65) > 500, "a small one says nothing of what rows take"


@pytest.mark.parametrize(("sent_ms", "is_crowd"), [(10.0, False), (2_000.0, True)])
def test_what_waited_for_a_sweep_of_ours_that_stalled_met_no_crowd(sent_ms: float, is_crowd: bool) -> None:
    """It seemed to be alone: the one before it should have been over."""
    cost = LatencyModel(RouteForecast(100, 24, 0.3, hops=3))
    cost.learn(measured(16, 1_024, 0, 924, 3, computes_ms=(908.0, 8.0, 8.0), sent_ms=0.0))
    waits_ms, computes_ms = (890.0, 0.0, 0.0), (8.0, 8.0, 8.0)
    cost.learn(measured(8, 1_024, 890, 24, 3, waits_ms=waits_ms, computes_ms=computes_ms, sent_ms=sent_ms))
    assert (cost.load > 1.5) == is_crowd
