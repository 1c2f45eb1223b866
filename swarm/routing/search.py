"""The cheapest chain over a table of costs: a dynamic programme over span borders. Pure numpy; knows no records.

A chain is *valid* when each machine stands in it once. The dynamic programme cannot see that, so it allows repetitions:
a relaxation. Where its answer uses a machine twice, for layers before `b` and again from `c` on, every valid chain is
in one of three smaller problems: the machine ends by `c`, it begins from `b` on, or it alone computes `[b, c)`. These
are searched best first (branch and bound). With links slower than layers an answer that repeats a machine is rare;
after `MAX_SPLITS` splits the best valid chain so far is taken, which costs at most `CheapestChain.gap_ms` more than the
cheapest one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.routing.costs import Bools, CostTable, Floats, Ints

MAX_SPLITS = 24
"""Problems that are split at most: bounds the time of a search."""


@dataclass(frozen=True, slots=True)
class Leg:
    """Layers `[start, end)` of a chain, computed by the candidate in row `row` of the cost table."""

    row: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CheapestChain:
    """A valid chain: every machine stands in it once.

    Attributes:
        legs: in order of the layers.
        cost_ms: what it costs.
        gap_ms: the cheapest valid chain may cost less by at most this; 0 where this is the cheapest.
    """

    legs: tuple[Leg, ...]
    cost_ms: float
    gap_ms: float


def cheapest(costs: CostTable, num_layers: int) -> CheapestChain | None:
    """The cheapest chain over layers `[0, num_layers)`, or None when there is none."""
    layers = np.arange(num_layers)[:, None]
    allowed = (costs.start <= layers) & (layers < costs.end)
    legs = _relaxed(costs, allowed)
    if legs is None:
        return None
    # (lower bound in ms, tie-breaker, relaxed chain, what is allowed) of each open problem
    problems = [(cost_ms(costs, legs), 0, legs, allowed)]
    best, best_ms, pushed = legs, float("inf"), 0
    for _ in range(MAX_SPLITS):
        bound_ms, _, legs, allowed = heapq.heappop(problems)
        valid = _without_repetition(costs, legs)
        if (valid_ms := cost_ms(costs, valid)) < best_ms:
            best, best_ms = valid, valid_ms
        repeated = _find_repetition(costs, legs)
        if repeated is None or bound_ms >= best_ms:
            return CheapestChain(best, best_ms, 0.0)
        for smaller in _split(costs, allowed, repeated):
            relaxed = _relaxed(costs, smaller)
            if relaxed is not None and (relaxed_ms := cost_ms(costs, relaxed)) < best_ms:
                pushed += 1
                heapq.heappush(problems, (relaxed_ms, pushed, relaxed, smaller))
        if not problems:
            return CheapestChain(best, best_ms, 0.0)
    return CheapestChain(best, best_ms, max(best_ms - problems[0][0], 0.0))


def cost_ms(costs: CostTable, legs: Sequence[Leg]) -> float:
    """The cost of a chain, from the client and back."""
    rows = np.array([leg.row for leg in legs])
    lengths = np.array([leg.end - leg.start for leg in legs])
    hops = costs.fixed_ms[rows] + costs.layer_ms[rows] * lengths
    links = costs.send_ms[rows[:-1]] + costs.links_ms[rows[:-1], rows[1:]]
    return float(costs.client_ms[rows[0]] + hops.sum() + links.sum() + costs.client_ms[rows[-1]])


def _relaxed(costs: CostTable, allowed: Bools) -> tuple[Leg, ...] | None:
    """The cheapest chain in which a machine may stand several times, though not twice in a row.

    `open_ms[row]` is the cheapest way to have the row's hop running after layer `l`, less what its layers up to `l`
    cost, so that hops begun at different borders compare. Rows are in the order of their spans: those of a layer lie
    close together, so slices suffice.

    Args:
        costs: of n rows.
        allowed: [layers, n] which rows may compute which layers.

    Returns:
        Its legs, or None where the allowed rows do not cover the layers.
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


def _entered(costs: CostTable, done_ms: Floats, here: slice) -> Floats:
    """The cheapest way to have the hidden rows of all layers so far at each row of `here`.

    The two cheapest senders give an upper bound, so senders that cost more before their link are skipped.

    Args:
        costs: of n rows.
        done_ms: [n] cheapest way to have each row's hop done at this border.
        here: rows that may begin here.
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


def _traced(costs: CostTable, done_ms: Floats, begun: Ints) -> tuple[Leg, ...] | None:
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


def _find_repetition(costs: CostTable, legs: Sequence[Leg]) -> tuple[Leg, Leg] | None:
    """Two legs of one machine, or None."""
    seen: dict[int, Leg] = {}
    for leg in legs:
        machine = int(costs.machine[leg.row])
        if machine in seen:
            return seen[machine], leg
        seen[machine] = leg
    return None


def _split(costs: CostTable, allowed: Bools, repeated: tuple[Leg, Leg]) -> Iterator[Bools]:
    """What is allowed in each of the three smaller problems of the module's docstring."""
    first, second = repeated
    own = costs.machine == costs.machine[first.row]
    ends, begins, alone = allowed.copy(), allowed.copy(), allowed.copy()
    ends[second.start :, own] = False
    begins[: first.end, own] = False
    alone[first.end : second.start, ~own] = False
    yield from (ends, begins, alone)


def _without_repetition(costs: CostTable, legs: tuple[Leg, ...]) -> tuple[Leg, ...]:
    """A valid chain: each repeated machine also computes what lies between its legs."""
    while repeated := _find_repetition(costs, legs):
        first, second = repeated
        row = second.row if costs.kept[first.row] else first.row
        joined = Leg(row, first.start, second.end)
        legs = (*legs[: legs.index(first)], joined, *legs[legs.index(second) + 1 :])
    return legs
