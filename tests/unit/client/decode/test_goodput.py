"""The controller on simulated routes: it finds the best tree size, never loses to plain decoding, and follows change.

A simulated sweep of n nodes takes links + compute(n), with noise and outliers; a tree's node k has the chance that its
draft promises. Everything is counted in expected tokens per millisecond, so that luck decides nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from client.base.stats import SweepMeasurement, within_total
from client.decode.goodput import SIZES, Goodput
from client.decode.latency_model import Regression
from client.decode.policy import FixedPolicy, PipelineState, SpeculationPlan
from client.draft.search.tree import DraftTree, StopRule
from swarm.base.errors import RemoteProtocolError
from swarm.protocol import wire
from swarm.protocol.messages import HopTime, Reply
from swarm.protocol.v1 import node_pb2 as pb
from swarm.routing.costs import RouteForecast
from tests.sweep_measurements import measured, over_hops, with_wait

ROUTE = "route"


@dataclass(frozen=True, slots=True)
class World:
    """A route and a draft.

    Attributes:
        probabilities: of a tree's nodes, best first.
        round_nodes: that a pass of the draft model adds.
    """

    links_ms: float
    row_ms: float
    forward_ms: float
    node_ms: float
    round_ms: float
    probabilities: tuple[float, ...]
    round_nodes: int = 16
    others: float = 0.0

    def sweep(self, nodes: int) -> SweepMeasurement:
        """What a sweep takes; `others` sweeps like it wait at the hops as well."""
        compute = self.forward_ms + self.node_ms * (nodes + 1)
        links = self.links_ms + self.row_ms * (nodes + 1)
        return measured(nodes, links + compute * (1 + self.others), compute * self.others, compute)

    def draft_ms(self, nodes: int) -> float:
        """What drafting takes."""
        return self.rounds(nodes) * self.round_ms

    def rounds(self, nodes: int) -> int:
        """Passes of the draft model."""
        return -(-nodes // self.round_nodes)

    def goodput(self, nodes: int) -> float:
        """Expected tokens per millisecond at a fixed size."""
        return (1 + sum(self.probabilities[:nodes])) / (self.sweep(nodes).total_ms + self.draft_ms(nodes))


def falling(first: float, ratio: float, count: int = 256) -> tuple[float, ...]:
    """Chances whose sum converges."""
    return tuple(first * ratio**k for k in range(count))


def slow_tail(first: float, count: int = 256) -> tuple[float, ...]:
    """Chances that fall as one over the rank, as those of real trees do."""
    return tuple(first / (1 + 0.7 * k) for k in range(count))


PASSAGES, REPETITIVE, HOPELESS = slow_tail(0.6), falling(0.95, 0.97), falling(0.05, 0.7)
WORLDS = {
    "near, passages": World(6, 0.002, 12, 0.15, 6, PASSAGES),
    "25 ms, passages": World(100, 0.01, 15, 0.15, 6, PASSAGES),
    "100 ms, passages": World(400, 0.01, 15, 0.15, 6, PASSAGES),
    "slow uplink, passages": World(100, 2.0, 15, 0.15, 6, PASSAGES),
    "25 ms, repetitive": World(100, 0.01, 15, 0.15, 2, REPETITIVE),
    "near, hopeless draft": World(6, 0.002, 12, 0.15, 6, HOPELESS),
    "25 ms, hopeless draft": World(100, 0.01, 15, 0.15, 6, HOPELESS),
    "near, slow draft": World(6, 0.002, 12, 0.15, 80, PASSAGES),
    "25 ms, very slow draft": World(100, 0.01, 15, 0.15, 800, PASSAGES),
    "compute-bound nodes": World(6, 0.002, 30, 9.0, 6, PASSAGES),
    "busy nodes": World(100, 0.01, 15, 1.0, 6, PASSAGES, others=6.0),
}


def run(control: Goodput, world: World, sweeps: int, rng: random.Random) -> tuple[float, list[int]]:
    """Expected tokens per millisecond, and the chosen sizes."""
    tokens = time_ms = 0.0
    sizes = []
    forecast = RouteForecast(2 * world.links_ms, world.forward_ms / 2, world.node_ms / 2)
    control.expect(ROUTE, forecast)  # machines claim what they do, not very well
    for _ in range(sweeps):
        planned = control.plan(ROUTE, 0.0, 256)
        nodes = 0
        if planned.nodes:
            drafted = draft(world, planned.nodes, control.stop_rule(ROUTE, 0.0, planned))
            probabilities = world.probabilities[:drafted]
            tree = DraftTree((0,) * drafted, (None,) * drafted, probabilities, world.rounds(drafted))
            control.observe_draft(0.0, tree, planned, world.draft_ms(drafted) * rng.uniform(0.95, 1.05))
            nodes = control.trim(ROUTE, 0.0, probabilities, planned).nodes
            time_ms += world.draft_ms(drafted)
        spent = world.sweep(nodes)
        shaken = rng.uniform(0.95, 1.05) * rng.choice([1] * 30 + [5])
        seen = measured(nodes, spent.total_ms * shaken, spent.waited_ms * shaken, spent.computed_ms * shaken)
        control.observe_sweep(ROUTE, seen)
        tokens, time_ms = tokens + 1 + sum(world.probabilities[:nodes]), time_ms + spent.total_ms
        sizes.append(nodes)
    return tokens / time_ms, sizes


def draft(world: World, planned: int, rule: StopRule) -> int:
    """A draft that goes on in rounds until the tree is full, or not worth more of them."""
    nodes = 0
    while nodes < planned:
        block = world.probabilities[nodes : nodes + world.round_nodes]
        if nodes and (sum(block) < rule.per_round or block[0] < rule.min_probability):
            break
        nodes += world.round_nodes
    return sum(probability >= rule.min_probability for probability in world.probabilities[: min(nodes, planned)])


def best_fixed(world: World) -> float:
    return max(world.goodput(size) for size in SIZES)


@pytest.mark.parametrize("name", [name for name in WORLDS if not WORLDS[name].others])
def test_it_comes_near_the_best_fixed_size_and_never_loses_to_plain(name: str) -> None:
    world = WORLDS[name]
    control = Goodput(256)
    found, sizes = run(control, world, 400, random.Random(1))
    assert found >= 0.97 * world.goodput(0), sizes[-20:]
    assert found >= 0.95 * best_fixed(world), sizes[-20:]


@pytest.mark.parametrize("name", ["near, hopeless draft", "25 ms, very slow draft"])
def test_where_no_tree_pays_it_decodes_plainly_and_tries_again_seldom(name: str) -> None:
    world = WORLDS[name]
    control = Goodput(256)
    run(control, world, 30, random.Random(1))
    _, sizes = run(control, world, 1_000, random.Random(2))
    assert sum(size > 0 for size in sizes) <= 0.05 * len(sizes)


def test_a_draft_that_becomes_good_is_noticed() -> None:
    rng, control = random.Random(3), Goodput(256)
    run(control, WORLDS["25 ms, hopeless draft"], 200, rng)
    run(control, WORLDS["25 ms, repetitive"], 1_500, rng)
    found, _ = run(control, WORLDS["25 ms, repetitive"], 100, rng)
    assert found >= 0.9 * best_fixed(WORLDS["25 ms, repetitive"])


def test_a_slower_network_is_noticed_within_a_few_sweeps() -> None:
    rng, control = random.Random(4), Goodput(256)
    run(control, WORLDS["near, passages"], 200, rng)
    run(control, WORLDS["100 ms, passages"], 10, rng)
    found, _ = run(control, WORLDS["100 ms, passages"], 40, rng)
    assert found >= 0.95 * best_fixed(WORLDS["100 ms, passages"])


def test_under_load_trees_shrink() -> None:
    """The wait for others would grow with everybody's trees, so a node costs what it takes from all of them."""
    idle = World(100, 0.01, 15, 1.0, 6, PASSAGES)
    busy = WORLDS["busy nodes"]
    sizes = {}
    for name, world in (("idle", idle), ("busy", busy)):
        control = Goodput(256)
        run(control, world, 200, random.Random(5))
        sizes[name] = sum(run(control, world, 50, random.Random(6))[1]) / 50
    assert sizes["busy"] < sizes["idle"] / 2


def test_another_route_is_learned_apart_and_begins_with_what_the_last_one_taught() -> None:
    control = Goodput(64)
    for _ in range(50):
        control.observe_sweep("a", WORLDS["25 ms, passages"].sweep(8))
    first = control.latency_model("b").sweep_ms(8)
    assert first == pytest.approx(WORLDS["25 ms, passages"].sweep(8).total_ms, rel=0.05)
    for _ in range(3):
        control.observe_sweep("b", WORLDS["near, passages"].sweep(8))
    assert control.latency_model("b").sweep_ms(8) == pytest.approx(WORLDS["near, passages"].sweep(8).total_ms, rel=0.35)
    assert control.latency_model("a").sweep_ms(8) == pytest.approx(first, rel=0.05)


def heard(sweep: SweepMeasurement, lie: float) -> SweepMeasurement | None:
    """A sweep as the client hears of it, where the last hop reports a lie; None where the wire refuses it."""
    (hop,) = sweep.hops
    frame = pb.Frame.FromString(wire.encode_frame(Reply(1, 0, (), (hop, HopTime(0.0, 0.0, 0.0, 0.0)))))
    frame.reply.times[1].compute_ms = lie
    try:
        reply = wire.decode_frame(frame.SerializeToString())
    except RemoteProtocolError:
        return None
    assert isinstance(reply, Reply)
    first_link_ms, hops = within_total(sweep.first_link_ms, reply.times, sweep.total_ms)
    return replace(sweep, first_link_ms=first_link_ms, hops=hops)


@pytest.mark.parametrize("lie", [1e308, math.inf, math.nan, -1.0, 120_000.0, 0.0])
def test_a_hop_that_lied_is_forgotten_once_it_tells_the_truth(lie: float) -> None:
    rng, world, control = random.Random(7), WORLDS["25 ms, passages"], Goodput(256)
    run(control, world, 50, rng)
    for number in range(100):
        said = heard(world.sweep(SIZES[number % 12]), lie)
        assert (said is None) == (not 0 <= lie <= 120_000)
        if said is not None:
            control.observe_sweep(ROUTE, said)
            assert control.plan(ROUTE, 0.0, 256).nodes >= 0
    run(control, world, 60, rng)
    found, sizes = run(control, world, 40, rng)
    assert found >= 0.95 * best_fixed(world), sizes


def test_nothing_to_send_is_nothing_to_price() -> None:
    control = Goodput(64)
    assert control.extend(ROUTE, (), PipelineState(1, 0.0)).nodes == 0


def test_routes_and_room_are_bounded() -> None:
    control = Goodput(64)
    for number in range(100):
        control.observe_sweep(number, WORLDS["25 ms, passages"].sweep(8))
    assert len(control._routes) <= 8
    control.observe_draft(0.0, DraftTree((0,) * 16, (None,) * 16, PASSAGES[:16], 1), SpeculationPlan(16, None, ""), 1.0)
    assert control.plan(99, 0.0, 5).nodes <= 5
    assert control.plan(99, 0.0, 0).nodes == 0


def fitted(points: Sequence[tuple[float, float]]) -> Regression:
    line = Regression()
    for x, y in points:
        line.learn(x, y)
    return line


def test_a_line_is_found_through_noise_and_outliers() -> None:
    rng = random.Random(7)
    points = [(x := rng.choice([1, 5, 17, 65]), (100 + 0.5 * x) * rng.uniform(0.95, 1.05)) for _ in range(300)]
    points = [(x, y * 10 if number % 25 == 24 else y) for number, (x, y) in enumerate(points)]
    line = fitted(points)
    assert line.at(1) == pytest.approx(100.5, rel=0.03)
    assert line.at(65) == pytest.approx(132.5, rel=0.05)


def test_a_slope_nobody_measured_is_taken_to_be_small_and_never_negative() -> None:
    assert fitted([(17, 100.0)] * 20).b > 0
    assert fitted([(17, 100.0)] * 20).at(17) == pytest.approx(100.0)
    assert fitted([(1, 100.0), (65, 60.0)] * 20).b == 0


def test_a_new_level_is_believed_when_it_comes_several_times() -> None:
    line = fitted([(1, 100.0)] * 50)
    line.learn(1, 400.0)
    line.learn(1, 400.0)
    assert line.at(1) == pytest.approx(100.0, rel=0.01)
    for _ in range(3):
        line.learn(1, 400.0)
    assert line.at(1) > 300


def test_a_slope_that_is_wrong_is_found_out_though_most_sweeps_are_plain_and_bear_it_out() -> None:
    """A link of two was slow, both were taken for it: rows stayed twice too dear for text after text."""
    line = Regression(130.0)
    for _ in range(20):
        line.learn(1, 210.0)
    assert line.b == pytest.approx(130.0)
    for _ in range(12):
        line.learn(1, 210.0)
        line.learn(3, 340.0)
        line.learn(1, 210.0)
    assert line.b == pytest.approx(65.0, rel=0.1)
    assert line.at(1) == pytest.approx(210.0, rel=0.05)


def test_stalls_of_trees_are_kept_out_however_many_plain_sweeps_come_between_them() -> None:
    points = [(1, 100.0), (17, 108.0)] * 10 + [(1, 100.0), (17, 1000.0), (1, 100.0), (17, 108.0)] * 10
    line = fitted(points)
    assert line.at(17) == pytest.approx(108.0, rel=0.01)
    assert line.at(1) == pytest.approx(100.0, rel=0.01)


def known(world: World) -> Goodput:
    """A controller that has seen trees of all sizes on a route."""
    control = Goodput(256)
    control.observe_draft(
        0.0, DraftTree((0,) * 64, (None,) * 64, PASSAGES[:64], 4), SpeculationPlan(64, None, ""), 24.0
    )
    for nodes in (0, 4, 16, 64, 128) * 20:
        control.observe_sweep(ROUTE, replace(over_hops(world.sweep(nodes), 3), expected_tokens=1.0, emitted=2))
    return control


def test_a_large_tree_travels_in_parts_where_rows_are_dear_on_the_wire() -> None:
    """A hop works on one part while the next one travels; where forwards alone cost, cutting only adds to them."""
    sure = (0.99,) * 128
    planned = SpeculationPlan(128, None, "planned")
    slow, near = known(WORLDS["slow uplink, passages"]), known(World(6, 0.002, 30, 0.02, 6, PASSAGES))
    cut = slow.trim(ROUTE, 0.0, sure, planned)
    assert cut.nodes == 128
    assert cut.chunk is not None
    assert 8 <= cut.chunk <= 64
    cost = slow.latency_model(ROUTE)
    assert cost.chunk(128) == cut.chunk
    in_parts = cost.sweep_ms(cut.chunk) + (-(-128 // cut.chunk) - 1) * cost.service_interval_ms(cut.chunk + 1)
    assert in_parts < 0.9 * cost.sweep_ms(128)
    assert near.trim(ROUTE, 0.0, sure, planned).chunk is None
    assert slow.trim(ROUTE, 0.0, sure[:8], planned).chunk is None


def test_a_round_that_pays_for_a_sweep_of_its_own_waits_until_the_tree_is_on_its_way() -> None:
    """Far away another sweep costs little beside the trip; next door it costs a good part of it."""
    planned = SpeculationPlan(64, None, "planned")
    far, near = (known(WORLDS[name]).stop_rule(ROUTE, 0.0, planned) for name in ("100 ms, passages", "near, passages"))
    assert far.per_sweep < 0.3 < near.per_sweep


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("first", [0.9, 0.3, 0.02])
def test_another_sweep_carries_what_is_worth_its_slot(name: str, first: float) -> None:
    """Against every other number of nodes; and in parts where many are worth it."""
    control, probabilities = known(WORLDS[name]), falling(first, 0.93)[:150]
    least = control.min_probability(ROUTE, 0.0)
    cost, rate = control.latency_model(ROUTE), control._running

    def gain(nodes: int) -> float:
        brought = sum(probabilities[:nodes]) * control._correction.ratio
        return brought - rate * (cost.price_ms(nodes) + probabilities[0] * cost.marginal_latency_ms * nodes)

    best = max(range(1, len(probabilities) + 1), key=gain)
    choice = control.extend(ROUTE, probabilities, PipelineState(2, 7.0))
    if gain(best) <= 0:
        assert choice.nodes == 0
    else:
        assert choice.nodes == (cost.chunk(best) if best > 16 else best)
        assert probabilities[best - 1] > least
        assert choice.predicted_ms == pytest.approx(7 + cost.sweep_ms(choice.nodes - 1))
    assert control.extend(ROUTE, (), PipelineState(2, 7.0)).nodes == 0


@pytest.mark.parametrize(("accepted", "is_dearer"), [((1, 2), False), ((0, 1), True)])
def test_what_comes_beyond_the_promise_makes_sweeps_worth_more_and_time_no_dearer(
    accepted: tuple[int, int], is_dearer: bool
) -> None:
    """In a text that repeats itself more comes than was promised: the more reason to send on, not the less."""
    control, usual = known(WORLDS["100 ms, passages"]), known(WORLDS["100 ms, passages"])
    for world in (control, usual):
        for turn in range(30):
            sweep = WORLDS["100 ms, passages"].sweep(16)
            world.observe_sweep(
                ROUTE,
                replace(
                    over_hops(sweep, 3),
                    expected_tokens=1.0,
                    emitted=1 + (accepted[turn % 2] if world is control else 1),
                ),
            )
    ours, theirs = (world.min_probability(ROUTE, 0.0) for world in (control, usual))
    assert ours > 1.03 * theirs if is_dearer else ours < 0.9 * theirs
    assert control._running <= usual._running * 1.001


def test_another_sweep_is_sent_where_it_pays_and_in_parts_where_rows_are_dear_on_the_wire() -> None:
    """What the test above finds is not always nothing, nor always all."""
    sure, doubtful = (0.9,) * 96, (0.001,) * 96
    for world, parts in ((WORLDS["slow uplink, passages"], True), (World(6, 0.002, 30, 0.02, 6, PASSAGES), False)):
        control = known(world)
        control.min_probability(ROUTE, 0.0)
        assert control.extend(ROUTE, doubtful, PipelineState(1, 0.0)).nodes == 0
        chosen = control.extend(ROUTE, sure, PipelineState(1, 0.0)).nodes
        assert (8 <= chosen <= 48) if parts else chosen == 96


def test_what_waits_for_its_own_kind_teaches_nothing_of_links_and_load() -> None:
    control = known(WORLDS["25 ms, passages"])
    before = control.latency_model(ROUTE).sweep_ms(16), control.latency_model(ROUTE).load
    behind = replace(with_wait(WORLDS["25 ms, passages"].sweep(16), 500.0), is_alone=False)
    for _ in range(20):
        control.observe_sweep(ROUTE, replace(behind, total_ms=behind.total_ms + 900))
    assert (control.latency_model(ROUTE).sweep_ms(16), control.latency_model(ROUTE).load) == pytest.approx(
        before, rel=0.01
    )


def test_under_load_another_sweep_pays_for_those_who_wait_behind_it_at_every_hop() -> None:
    """With nobody there it costs the slot that it takes."""
    idle, busy = World(100, 0.01, 15, 1.0, 6, PASSAGES), WORLDS["busy nodes"]  # six others, three hops
    alone, among = (known(world).latency_model(ROUTE) for world in (idle, busy))
    assert alone.price_ms(8) == pytest.approx(alone.service_interval_ms(8))
    assert among.load == pytest.approx(7, rel=0.1)
    assert among.load < among.shadow_price < among.load**2
    waiting_ms = (among.shadow_price - 1) * among.compute.at(8)
    own_ms = among.shadow_price * among.compute.at(8) / 3
    assert among.price_ms(8) == pytest.approx(own_ms + waiting_ms * 2 / 3, rel=0.01)


def test_what_others_time_is_worth_follows_from_whole_trees_also_where_small_ones_are_sent() -> None:
    """Trees that end early, because the rest can go later, would else make everybody's time cheap, and so more go."""
    choice = SpeculationPlan(64, None, "")
    few = DraftTree(tuple(range(8)), (None,) * 8, (0.2,) * 8, rounds=1)
    priced = []
    for is_settled in (True, False):
        control = known(WORLDS["busy nodes"])
        for _ in range(40):
            control.observe_draft(0.0, replace(few, is_settled=is_settled), choice, 10.0)
        priced.append((control.stop_rule(ROUTE, 0.0, choice).per_sweep, control.min_probability(ROUTE, 0.0)))
    assert all(left > whole for whole, left in zip(*priced, strict=True)), priced
    cost = known(WORLDS["busy nodes"]).latency_model(ROUTE)
    waiting_ms = (cost.shadow_price - 1) * cost.compute.at(8)
    assert cost.price_ms(8, 3.0) - cost.price_ms(8) == pytest.approx(2 * waiting_ms)
    calm = known(World(100, 0.01, 15, 1.0, 0, PASSAGES)).latency_model(ROUTE)
    assert calm.price_ms(8, 3.0) == pytest.approx(calm.price_ms(8)), "where nobody waits nobody's time counts"


def test_links_that_become_late_while_machines_are_busy_are_load_too() -> None:
    """What shares the hops' cores makes everything late, not only what waits in a queue; a new network is no load."""
    world = WORLDS["25 ms, passages"]
    calm, crowded, moved = known(world), known(world), known(world)
    for _ in range(100):
        calm.observe_sweep(ROUTE, over_hops(world.sweep(16), 3))
        late = world.sweep(16)
        crowded.observe_sweep(ROUTE, replace(over_hops(late, 3), total_ms=late.total_ms + 50))
        moved.observe_sweep(ROUTE, replace(over_hops(late, 3), total_ms=late.total_ms + 400))
    calm_cost, crowded_cost, moved_cost = (control.latency_model(ROUTE) for control in (calm, crowded, moved))
    assert calm_cost.sharers == pytest.approx(1, abs=0.01)
    assert 2.5 < crowded_cost.sharers < 4.5
    assert crowded_cost.price_ms(8) > 3 * calm_cost.price_ms(8)
    assert moved_cost.sharers == pytest.approx(1, abs=0.01)


def test_drafting_goes_on_while_the_first_hop_is_busy() -> None:
    control = known(WORLDS["25 ms, passages"])  # a round takes 6 ms
    assert [control.has_time(PipelineState(1, busy_ms)) for busy_ms in (0.0, 5.0, 7.0, 1e9)] == [
        False,
        False,
        True,
        True,
    ]
    fixed = FixedPolicy(16, 3)
    assert [fixed.max_nodes(ROUTE, 0.0, 100, PipelineState(sweeps, 0.0)) for sweeps in (1, 2, 3)] == [16, 16, 0]
