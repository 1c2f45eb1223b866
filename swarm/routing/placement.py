"""Which layers a machine should serve: a newcomer's span, and who moves as machines come and go. Pure; moves nothing.

A machine that computes `capacity` layers per second and holds n layers passes `capacity / n` sweeps per second. A
layer's rate is the sum over its holders, and a model's the rate of its *weakest* layer: no chain, and no mixture of
chains, passes more sweeps. No layout of spans beats the *fluid bound*, all capacities over the number of layers.

A layout is judged by, in this order:

    1. holes      layers that nobody holds: without them there is no chain
    2. singles    layers with one holder: one machine's death makes them holes
    3. weakest    the rate of the weakest layer

    join:     every span for the newcomer ──▶ the best few ──▶ up to two moves after each ──▶ the best layout
    moves:    one move ──▶ the best few ──▶ one move more ──▶ the best layout, if it is worth it (hysteresis)

A greedy choice alone, as in Petals, makes spans depend on the order of arrivals. Two moves per join make up for it.

Source: Borzunov et al., "Petals: Collaborative Inference and Fine-tuning of Large Models" (2022), §3.2, server
load balancing: a newcomer takes the span whose weakest layers are the swarm's weakest (`petals_span`, the baseline).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from swarm.base.ids import PeerId
from swarm.base.layers import Span, SpanBorders
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.routing.plausible import plausible

FloatArray: TypeAlias = npt.NDArray[np.float64]
Moves: TypeAlias = tuple["Move", ...]

MAX_MOVES: Final = 2
"""Moves of other machines that one join may cause."""
MIN_SPEEDUP: Final = 1.2
"""A move for throughput must raise the weakest layer's rate by this factor, because measured speeds are noisy …"""
UNEVEN_SHARE: Final = 0.8
"""… or, while the weakest layer has less than this part of the fluid bound, as in a large swarm that lost many …"""
MIN_GAIN_SHARE: Final = 0.5
"""… by this part of the moving machine's own rate."""
JOIN_BEAM: Final = 12
"""A newcomer's spans for which moves are searched."""
MOVE_BEAM: Final = 48
"""First moves after which a second one is searched."""
MAX_SEARCH: Final = 10_000
"""Holders × layers × spans in a beam: bounds the time of a decision in large swarms."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A machine and its span.

    Attributes:
        peer: the machine.
        span: its layers.
        capacity: layers per second.
        may_move: it serves, and its owner lets it choose its layers.
        serving: it takes sessions; False while it joins.
    """

    peer: PeerId
    span: Span
    capacity: float
    may_move: bool = False
    serving: bool = True

    @property
    def rate(self) -> float:
        """Sweeps per second through its span."""
        return self.capacity / len(self.span)


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A machine that looks for a span.

    Attributes:
        peer: the machine.
        num_layers: how many it can hold.
        capacity: layers per second.
    """

    peer: PeerId
    num_layers: int
    capacity: float

    def at(self, start: int) -> Holder:
        """This machine with its span beginning at a layer."""
        return Holder(self.peer, Span(start, start + self.num_layers), self.capacity)


@dataclass(frozen=True, slots=True)
class Move:
    """One machine leaves its span for another of the same length.

    Attributes:
        peer: the machine.
        old: the span that it leaves.
        new: the span that it takes.
    """

    peer: PeerId
    old: Span
    new: Span


@dataclass(frozen=True, slots=True, order=True)
class LayoutScore:
    """How good a layout is; the greater the better, compared from the first field on.

    Attributes:
        minus_holes: minus the number of layers without a holder.
        minus_singles: minus the number of layers with one holder.
        weakest: sweeps per second of the weakest layer.
        evenness: minus the mean of `rate ** -8` over held layers, relative to the mean rate: a soft minimum that
            orders layouts with equal weakest layers. Rounded to float32: the order of summation must not matter.
    """

    minus_holes: int
    minus_singles: int
    weakest: float
    evenness: float


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """Where a newcomer goes, and who moves afterwards.

    Attributes:
        span: the newcomer's.
        moves: of other machines, in order.
        before: score without the newcomer.
        after: score when all have moved.
    """

    span: Span
    moves: Moves
    before: LayoutScore
    after: LayoutScore


class Layout:
    """Machines over a model's L layers.

    Attributes:
        num_layers: L.
        holders: the machines, by span.
        counts: [L] machines that hold the layer.
        rates: [L] sweeps per second that they pass together.
        serving: [L] machines that hold the layer and take sessions.
    """

    def __init__(self, num_layers: int, holders: Iterable[Holder]) -> None:
        self.num_layers = num_layers
        self.holders = tuple(sorted(holders, key=lambda holder: (holder.span, holder.peer)))
        self.counts, self.rates, self.serving = np.zeros((3, num_layers))
        for holder in self.holders:
            own = slice(holder.span.start, holder.span.end)
            self.counts[own] += 1
            self.rates[own] += holder.rate
            self.serving[own] += holder.serving

    def joined(self, holder: Holder) -> Layout:
        """With one more holder."""
        return Layout(self.num_layers, (*self.holders, holder))

    def moved(self, move: Move) -> Layout:
        """With one holder elsewhere, and not asked to move again."""
        holders = (
            replace(holder, span=move.new, may_move=False) if holder.peer == move.peer else holder
            for holder in self.holders
        )
        return Layout(self.num_layers, holders)

    def fluid_bound(self) -> float:
        """No layout of these machines has a faster weakest layer."""
        return sum(holder.capacity for holder in self.holders) / self.num_layers

    def score(self) -> LayoutScore:
        """The layout's score."""
        nothing = np.zeros((1, self.num_layers))
        return LayoutScores(self, nothing, nothing)[0]

    def spread(self, starts: npt.NDArray[Any], ends: npt.NDArray[Any]) -> FloatArray:
        """[n, L]: 1 where a layer is in `[start, end)`."""
        layers = np.arange(self.num_layers)
        return ((layers >= starts[:, None]) & (layers < ends[:, None])).astype(float)

    def is_free(self, holder: Holder) -> bool:
        """Whether a holder may leave its span: others serve all of it, or no chain exists that could break."""
        own = slice(holder.span.start, holder.span.end)
        return holder.may_move and bool((self.serving[own] > 1).all() or (self.counts < 1).any())


def layout_of(records: Iterable[NodeRecord], num_layers: int, capacity: float) -> Layout:
    """The layout that records describe: a machine that reserves a span counts already, one that drains does not.

    Claims that are too fast to be true count as fast as is plausible.

    Args:
        records: valid records of one model.
        num_layers: the model's.
        capacity: layers per second of a machine that has not measured itself yet.
    """
    return Layout(
        num_layers,
        (
            Holder(
                peer=record.peer,
                span=record.span,
                capacity=capacity_of(record) or capacity,
                may_move=record.movable and record.state is NodeState.SERVING,
                serving=record.state is NodeState.SERVING,
            )
            for record in plausible(list(records))
            if record.state is not NodeState.DRAINING
        ),
    )


def capacity_of(record: NodeRecord) -> float | None:
    """Announced layers per second in plain decoding; None before the machine has measured itself."""
    if not record.sweep_ms or min(record.sweep_ms)[1] <= 0:
        return None
    return 1e3 * len(record.span) / min(record.sweep_ms)[1]


def typical_capacity(records: Iterable[NodeRecord]) -> float:
    """The median of the announced capacities, in layers per second; 1 where there are none."""
    announced = [capacity for record in records if (capacity := capacity_of(record)) is not None]
    return float(np.median(announced)) if announced else 1.0


def plan_join(layout: Layout, newcomer: Newcomer) -> JoinPlan:
    """The newcomer's span after which, with at most two moves of other machines, the layout is best.

    Only spans that close as many holes as any are considered: a hole must not wait for a move, which takes minutes.
    """
    starts = np.arange(layout.num_layers - newcomer.num_layers + 1)
    counts = layout.spread(starts, starts + newcomer.num_layers)
    scores = LayoutScores(layout, counts, counts * (newcomer.capacity / newcomer.num_layers))
    plans = []
    for number in scores.best(_beam(layout, JOIN_BEAM)):
        if scores.minus_holes[number] < scores.minus_holes.max():
            break
        joining = newcomer.at(int(starts[number]))
        joined = layout.joined(joining)
        moves = plan_moves(joined)
        plans.append(JoinPlan(joining.span, moves, layout.score(), after(joined, moves).score()))
    return max(plans, key=lambda plan: (plan.after, -len(plan.moves)))


def keep_to_borders(found: JoinPlan, layout: Layout, newcomer: Newcomer, borders: SpanBorders) -> JoinPlan:
    """The plan as nodes carry it out: the nearest span that cuts nothing apart, and no move behind one that would.

    Raises:
        LayersError: what belongs together is longer than what the newcomer can hold.
    """
    span = borders.nearest(found.span)
    joined = layout.joined(replace(newcomer, num_layers=len(span)).at(span.start))
    moves = tuple(takewhile(lambda move: borders.allow(move.new), plan_moves(joined)))
    return JoinPlan(span, moves, layout.score(), after(joined, moves).score())


def plan_moves(layout: Layout) -> Moves:
    """The moves, in order, that are worth making: none, one or two.

    All machines that have the same records plan the same, and only the first machine of the plan moves; the others plan
    again when it has. No move opens a hole: other machines serve what the moving machine leaves.
    """
    before = layout.score()
    if not _can_be_worth_it(layout, before):
        return ()
    plans: list[tuple[LayoutScore, Moves]] = [
        (score, (move,)) for score, move in _best_moves(layout, _beam(layout, MOVE_BEAM))
    ]
    for _, (first, *_) in tuple(plans):
        plans += [(score, (first, second)) for score, second in _best_moves(layout.moved(first), 1)]
    worth = [plan for plan in plans if _is_worth_it(layout, before, plan)]
    return max(worth, key=lambda plan: (plan[0], -len(plan[1])), default=(before, ()))[1]


def own_move(layout: Layout, peer: PeerId) -> Move | None:
    """The move that a machine is to make now: the first of the plan if it is this machine's, else None."""
    moves = plan_moves(layout)
    return moves[0] if moves and moves[0].peer == peer else None


def _is_worth_it(layout: Layout, before: LayoutScore, plan: tuple[LayoutScore, Moves]) -> bool:
    """Hysteresis: fewer holes, else fewer single points of failure, else a much faster weakest layer."""
    score, moves = plan
    if score.minus_holes != before.minus_holes:
        return score.minus_holes > before.minus_holes
    if score.minus_singles != before.minus_singles:
        return score.minus_singles > before.minus_singles
    if before.weakest < UNEVEN_SHARE * layout.fluid_bound():
        moved_rate = max(holder.rate for holder in layout.holders if holder.peer in {move.peer for move in moves})
        if score.weakest >= before.weakest + MIN_GAIN_SHARE * moved_rate:
            return True
    return score.weakest >= MIN_SPEEDUP * before.weakest > 0


def after(layout: Layout, moves: Sequence[Move]) -> Layout:
    """The layout when all have moved."""
    for move in moves:
        layout = layout.moved(move)
    return layout


def _can_be_worth_it(layout: Layout, before: LayoutScore) -> bool:
    """False when no two moves could raise the weakest layer far enough: large, even swarms then skip the search."""
    if before.minus_holes or before.minus_singles or before.weakest < UNEVEN_SHARE * layout.fluid_bound():
        return True
    max_gain = sum(sorted((holder.rate for holder in layout.holders if holder.may_move), reverse=True)[:MAX_MOVES])
    return before.weakest + max_gain >= MIN_SPEEDUP * before.weakest


def _beam(layout: Layout, max_width: int) -> int:
    """How many variants to search further: `max_width` in small swarms, fewer in large ones."""
    return max(4, min(max_width, MAX_SEARCH // max(1, len(layout.holders) * layout.num_layers)))


def _best_moves(layout: Layout, beam: int) -> list[tuple[LayoutScore, Move]]:
    """The best single moves that help a layer in need, and the score after each, best first."""
    spans = np.array([(h.span.start, h.span.end, h.rate) for h in layout.holders if layout.is_free(h)]).reshape(-1, 3)
    owners, starts = np.nonzero(_helpful_starts(layout, spans))
    if not len(owners):
        return []
    old = spans[owners]
    counts = layout.spread(starts, starts + old[:, 1] - old[:, 0]) - layout.spread(old[:, 0], old[:, 1])
    scores = LayoutScores(layout, counts, counts * old[:, 2:])
    movers = [holder for holder in layout.holders if layout.is_free(holder)]
    found = []
    for number in scores.best(beam):
        mover, start = movers[owners[number]], int(starts[number])
        found.append((scores[number], Move(mover.peer, mover.span, Span(start, start + len(mover.span)))))
    return found


def _helpful_starts(layout: Layout, spans: FloatArray) -> npt.NDArray[np.bool_]:
    """Where a machine's new span may begin so that it helps a layer in need that the machine does not hold yet.

    Args:
        layout: of L layers.
        spans: [movers, 3] start, end and rate of each machine that may move.

    Returns:
        bool [movers, L]
    """
    needy = (layout.counts < 2) | (layout.rates <= layout.rates.min())
    fresh = needy & (layout.spread(spans[:, 0], spans[:, 1]) == 0)
    sums = np.concatenate([np.zeros((len(spans), 1)), fresh.cumsum(axis=1)], axis=1)
    starts = np.arange(layout.num_layers)
    ends = starts + (spans[:, 1] - spans[:, 0])[:, None].astype(int)
    helps = np.take_along_axis(sums, np.minimum(ends, layout.num_layers), axis=1) > sums[:, :-1]
    helpful: npt.NDArray[np.bool_] = helps & (ends <= layout.num_layers)
    return helpful


class LayoutScores:
    """Scores of n variants of a layout.

    Attributes:
        minus_holes: [n]
        minus_singles: [n]
        weakest: [n]
        evenness: [n]
    """

    def __init__(self, layout: Layout, counts: FloatArray, rates: FloatArray) -> None:
        """Score the layout with changes.

        Args:
            layout: of L layers.
            counts: [n, L] holders that each variant adds.
            rates: [n, L] sweeps per second that it adds.
        """
        held = layout.counts + counts
        passed = np.where(held > 0, layout.rates + rates, 0.0)
        min_rate = 1e-3 * layout.rates.mean() + 1e-12
        scarce = np.where(held > 0, max(layout.rates.mean(), 1e-12) / np.maximum(passed, min_rate), 0.0)
        self.minus_holes = -(held < 1).sum(axis=1)
        self.minus_singles = -(held == 1).sum(axis=1)
        self.weakest = passed.min(axis=1).round(9)
        self.evenness = -np.square(np.square(np.square(scarce))).mean(axis=1).astype(np.float32)

    def __getitem__(self, number: int) -> LayoutScore:
        """One variant's score."""
        return LayoutScore(
            int(self.minus_holes[number]),
            int(self.minus_singles[number]),
            float(self.weakest[number]),
            float(self.evenness[number]),
        )

    def best(self, count: int) -> list[int]:
        """The best variants' numbers, best first; of equals the first."""
        order = np.lexsort((-self.evenness, -self.weakest, -self.minus_singles, -self.minus_holes))
        return [int(number) for number in order[:count]]


def petals_span(layout: Layout, newcomer: Newcomer) -> Span:
    """The baseline: Petals' greedy rule takes the span whose rates, in rising order, come first.

    Source: Borzunov et al. (2022), §3.2; `petals.server.block_selection`.
    """
    spans = [newcomer.at(start).span for start in range(layout.num_layers - newcomer.num_layers + 1)]
    return min(spans, key=lambda span: (sorted(layout.rates[span.start : span.end].tolist()), span))
