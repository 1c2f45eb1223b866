"""The cheapest chain over a table of costs: a dynamic programme over span borders. Pure numpy; knows no records.

That a machine stands in a chain once is no matter of borders, so the programme at first allows it twice. Where its
answer does use a machine twice, for layers before `b` and again from `c` on, every rightful chain is in one of three
smaller problems: the machine ends by `c`, it begins from `b` on, or it alone computes `[b, c)`. These are searched best
first. With links slower than layers an answer that repeats a machine is rare; after `MAX_SPLITS` of them the best
rightful chain so far is taken, which costs at most what is said in `Found.gap_ms` more than the cheapest.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.routing.costs import Bools, Costs, Floats, Ints

MAX_SPLITS = 24


@dataclass(frozen=True, slots=True)
class Leg:
    """Layers `[start, end)` by the candidate in row `row`."""

    row: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Found:
    """A chain in which every machine stands once. gap_ms: the cheapest may cost this much less."""

    legs: tuple[Leg, ...]
    cost_ms: float
    gap_ms: float


def cheapest(costs: Costs, num_layers: int) -> Found | None:
    """The cheapest chain over layers `[0, num_layers)`, or None when there is none."""
    layers = np.arange(num_layers)[:, None]
    allowed = (costs.start <= layers) & (layers < costs.end)
    legs = _relaxed(costs, allowed)
    if legs is None:
        return None
    waiting = [(cost_ms(costs, legs), 0, legs, allowed)]
    best, best_ms, made = legs, float("inf"), 0
    for _ in range(MAX_SPLITS):
        bound_ms, _, legs, allowed = heapq.heappop(waiting)
        once = _each_once(costs, legs)
        if (once_ms := cost_ms(costs, once)) < best_ms:
            best, best_ms = once, once_ms
        twice = _twice(costs, legs)
        if twice is None or bound_ms >= best_ms:
            return Found(best, best_ms, 0.0)
        for smaller in _split(costs, allowed, twice):
            legs_there = _relaxed(costs, smaller)
            if legs_there is not None and (there_ms := cost_ms(costs, legs_there)) < best_ms:
                made += 1
                heapq.heappush(waiting, (there_ms, made, legs_there, smaller))
        if not waiting:
            return Found(best, best_ms, 0.0)
    return Found(best, best_ms, max(best_ms - waiting[0][0], 0.0))


def cost_ms(costs: Costs, legs: Sequence[Leg]) -> float:
    """What a chain costs."""
    rows = np.array([leg.row for leg in legs])
    lengths = np.array([leg.end - leg.start for leg in legs])
    hops = costs.fixed_ms[rows] + costs.layer_ms[rows] * lengths
    links = costs.send_ms[rows[:-1]] + costs.links_ms[rows[:-1], rows[1:]]
    return float(costs.client_ms[rows[0]] + hops.sum() + links.sum() + costs.client_ms[rows[-1]])


def _relaxed(costs: Costs, allowed: Bools) -> tuple[Leg, ...] | None:
    """The cheapest chain in which a machine may stand several times, though not twice in a row.

    allowed: [layers, rows]. `open_ms[row]` is the cheapest way to have the row's hop running after layer `l`, less what
    its layers up to `l` cost, so that hops begun at different borders compare. Rows are in the order of their spans, so
    that those of a layer lie close together, and slices do.
    """
    num_layers, count = allowed.shape
    layers = np.arange(num_layers)[:, None]
    may_begin = allowed & (~costs.kept | (costs.start == layers))
    may_end = allowed & (~costs.kept | (costs.end == layers + 1))
    done_ms, begun = np.full((num_layers + 1, count), np.inf), np.zeros((num_layers + 1, count), np.intp)
    open_ms = np.full(count, np.inf)
    for layer in range(num_layers):
        rows = np.flatnonzero(allowed[layer])
        if not rows.size:
            return None
        here = slice(rows[0], rows[-1] + 1)
        entered = _entered(costs, done_ms[layer], here) if layer else costs.client_ms[here]
        fresh = entered + costs.fixed_ms[here] - costs.layer_ms[here] * layer
        fresh[~may_begin[layer, here]] = np.inf
        going_on, open_ms = open_ms[here], np.full(count, np.inf)
        open_ms[here] = np.where(allowed[layer, here], np.minimum(fresh, going_on), np.inf)
        begun[layer + 1, here] = np.where(fresh < going_on, layer, begun[layer, here])
        done = open_ms[here] + costs.layer_ms[here] * (layer + 1)
        done_ms[layer + 1, here] = np.where(may_end[layer, here], done, np.inf)
    return _traced(costs, done_ms, begun)


def _entered(costs: Costs, done_ms: Floats, here: slice) -> Floats:
    """The cheapest way to have the hidden rows of every layer so far at each of `here`.

    The two cheapest senders bound it, so those who are dearer than that before their link need not be looked at.
    """
    sent_ms, links_ms = done_ms + costs.send_ms, costs.links_ms[:, here]
    first = sent_ms.argmin()
    others_ms = sent_ms.copy()
    others_ms[first] = np.inf
    second = others_ms.argmin()
    bound_ms = np.minimum(sent_ms[first] + links_ms[first], sent_ms[second] + links_ms[second]).max()
    senders = np.flatnonzero(sent_ms <= bound_ms)
    entered: Floats = (sent_ms[senders, None].astype(np.float32) + links_ms[senders]).min(axis=0)
    return entered


def _traced(costs: Costs, done_ms: Floats, begun: Ints) -> tuple[Leg, ...] | None:
    """Follow the cheapest end back to the first layer; both arrays are [borders, rows]."""
    end = len(done_ms) - 1
    row = int((done_ms[end] + costs.client_ms).argmin())
    if done_ms[end, row] == np.inf:
        return None
    legs: list[Leg] = []
    while True:
        start = int(begun[end, row])
        legs.append(Leg(row, start, end))
        if start == 0:
            return tuple(reversed(legs))
        row, end = int((done_ms[start] + costs.send_ms + costs.links_ms[:, row]).argmin()), start


def _twice(costs: Costs, legs: Sequence[Leg]) -> tuple[Leg, Leg] | None:
    """Two legs of one machine, or None."""
    seen: dict[int, Leg] = {}
    for leg in legs:
        machine = int(costs.machine[leg.row])
        if machine in seen:
            return seen[machine], leg
        seen[machine] = leg
    return None


def _split(costs: Costs, allowed: Bools, twice: tuple[Leg, Leg]) -> Iterator[Bools]:
    """The three smaller problems of the module's docstring."""
    first, second = twice
    own = costs.machine == costs.machine[first.row]
    ends, begins, alone = allowed.copy(), allowed.copy(), allowed.copy()
    ends[second.start :, own] = False
    begins[: first.end, own] = False
    alone[first.end : second.start, ~own] = False
    yield from (ends, begins, alone)


def _each_once(costs: Costs, legs: tuple[Leg, ...]) -> tuple[Leg, ...]:
    """The chain with repeated machines computing what lies between as well: dearer, but rightful."""
    while twice := _twice(costs, legs):
        first, second = twice
        row = second.row if costs.kept[first.row] else first.row
        joined = Leg(row, first.start, second.end)
        legs = (*legs[: legs.index(first)], joined, *legs[legs.index(second) + 1 :])
    return legs
