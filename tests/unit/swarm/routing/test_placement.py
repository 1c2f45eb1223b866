"""Placement: what is needed first, who may move and who does."""

from __future__ import annotations

import random
from dataclasses import replace

from benchmarks.routing.placement import small_swarm
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.routing.placement import (
    MAX_MOVES,
    Holder,
    Layout,
    Newcomer,
    layout_of,
    own_move,
    plan_join,
    plan_moves,
    typical_capacity,
)
from tests.unit.swarm.directory.test_coverage import MODEL, record

LAYERS = 12


def holder(name: str, start: int, end: int, capacity: float = 6.0, may_move: bool = True) -> Holder:
    return Holder(PeerId(name), Span(start, end), capacity, may_move)


def join(*holders: Holder, num_layers: int = 4, capacity: float = 6.0) -> Span:
    return plan_join(Layout(LAYERS, holders), Newcomer(PeerId("new"), num_layers, capacity)).span


def fixed(name: str, start: int, end: int, capacity: float = 6.0) -> Holder:
    return holder(name, start, end, capacity, may_move=False)


def test_holes_come_first() -> None:
    slow = fixed("slow", 0, 4, 0.1)
    assert join(slow, fixed("b", 4, 8), fixed("c", 4, 8)) == Span(8, 12)


def test_then_single_points_of_failure() -> None:
    one = fixed("fast", 4, 8, 1e3)
    ends = [fixed("a", 0, 4, 0.1), fixed("b", 0, 4, 0.1), fixed("c", 8, 12, 0.1), fixed("d", 8, 12, 0.1)]
    assert join(one, *ends) == Span(4, 8)


def test_then_the_weakest_layer() -> None:
    spans = [(0, 4, 3.0), (4, 8, 2.0), (8, 12, 2.5)]
    assert join(*(fixed(f"{n}{s}", s, e, c) for s, e, c in spans for n in "ab")) == Span(4, 8)


def test_of_equal_spans_the_first_so_that_what_is_left_fits_the_next_machine() -> None:
    """Whatever was measured: no layer may stay alone between two machines because a sum was rounded differently."""
    rng = random.Random(1)
    for _ in range(500):
        first = fixed("a", 0, 4, rng.uniform(1e3, 3e3))
        assert join(first, capacity=first.capacity) == Span(4, 8)
        assert join(first, fixed("b", 4, 8, first.capacity), capacity=first.capacity) == Span(8, 12)


def test_a_move_never_opens_a_hole_on_the_way() -> None:
    rng = random.Random(3)
    moved = 0
    for _ in range(50):
        layout = Layout(LAYERS, [])
        for number, (size, capacity) in enumerate(small_swarm(rng, LAYERS).machines):
            found = plan_join(layout, Newcomer(PeerId(str(number)), size, capacity))
            layout = layout.joined(holder(str(number), found.span.start, found.span.end, capacity))
            assert len(found.moves) <= MAX_MOVES
            for move in found.moves:
                left = Layout(LAYERS, [one for one in layout.holders if one.peer != move.peer])
                assert not layout.counts.all() or left.counts.all()
                layout = layout.moved(move)
                moved += 1
            layout = Layout(LAYERS, [replace(one, may_move=True) for one in layout.holders])
    assert moved > 20


def test_who_may_not_move_stays_and_one_machine_alone_finds_that_it_is_its_turn() -> None:
    crowd = [holder(name, 0, 6) for name in "abcd"]
    rest = [fixed("e", 6, 12)]
    layout = Layout(LAYERS, [*crowd, *rest])
    assert plan_moves(layout)
    movers = [one.peer for one in layout.holders if own_move(layout, one.peer)]
    assert len(movers) == 1
    assert not plan_moves(Layout(LAYERS, [replace(one, may_move=False) for one in layout.holders]))
    loading = [replace(one, serving=False) for one in crowd[1:]]
    assert not plan_moves(Layout(LAYERS, [crowd[0], *loading, *rest])), "nobody would serve what it leaves"


def test_small_gains_move_nobody() -> None:
    pairs = [("a", 0, 6, 10.0), ("b", 0, 6, 10.0), ("c", 6, 12, 9.0), ("d", 6, 12, 9.0), ("e", 0, 6, 1.0)]
    assert not plan_moves(Layout(LAYERS, [holder(*one) for one in pairs]))


def test_records_of_all_states() -> None:
    serving = replace(record(0, 4), sweep_ms=((1, 2.0), (64, 9.0)), movable=True)
    joining = replace(record(4, 8, NodeState.JOINING), peer=PeerId("b"), sweep_ms=(), movable=True)
    records: list[NodeRecord] = [serving, joining, replace(record(8, 12, NodeState.DRAINING), peer=PeerId("c"))]
    assert typical_capacity(records[:2]) == 2_000
    layout = layout_of(records, MODEL.num_layers, 8.0)
    assert [(one.capacity, one.may_move, one.serving) for one in layout.holders] == [
        (2_000, True, True),
        (8.0, False, False),
    ]
    assert plan_join(layout, Newcomer(PeerId("d"), 4, 1.0)).span == Span(8, 12)
