"""Which machines a session runs on: the chain over the layers with the lowest predicted time per sweep. Pure.

`swarm.routing.costs` has the cost of each part, `swarm.routing.search` finds the cheapest chain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from swarm.base.errors import RouteError
from swarm.base.ids import PeerId
from swarm.base.layers import Span, missing_layers, name_layers
from swarm.directory.coverage import serve_line
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.link.endpoint import Endpoint
from swarm.protocol.limits import RECORDS_BYTES
from swarm.protocol.messages import Hedge, RouteHop
from swarm.routing.costs import (
    HOP_OVERHEAD_MS,
    RELAYED_MS,
    Candidate,
    HopCost,
    RouteForecast,
    RouteQuery,
    can_join,
    client_delay_ms,
    delay_ms,
    expected_ms,
    is_relayed,
    penalty_ms,
    tabulate,
    transfer_ms,
    wait_ms,
)
from swarm.routing.search import CheapestChain, cheapest
from swarm.routing.staircase import BucketSteps

MANY_ROWS = 64
"""Size of the sweep that, beside one of a single row, gives the cost of a further row."""
MIN_STEP = 1.25
"""Buckets whose rows differ by a smaller factor count as one."""
ALIKE_SLOWER = 2.0
"""A chain of processors that round alike may take so many times as long as one that promises no text."""
MARKS_TRIED = 16
"""Kinds of processors, those that most machines have: anybody can make up a mark."""

__all__ = ["Route", "RouteQuery", "best_route", "hedged", "no_route", "runner_up"]


@dataclass(frozen=True, slots=True)
class Route:
    """A chain and what a sweep should take on it.

    Attributes:
        hops: machines and the layers that each computes, in order.
        records: [hops] their records.
        costs: [hops] predicted milliseconds.
        return_ms: delay from the tail to the client.
        forecast: what sweeps should take by their size.
        gap_ms: the cheapest chain may be faster by at most this.
        hedge: the hop that has a replica, None without.
        replica: the replica's record, None without.
    """

    hops: tuple[RouteHop, ...]
    records: tuple[NodeRecord, ...]
    costs: tuple[HopCost, ...]
    return_ms: float
    forecast: RouteForecast
    gap_ms: float = 0.0
    hedge: Hedge | None = None
    replica: NodeRecord | None = None

    @property
    def replicas(self) -> tuple[RouteHop, ...]:
        """The replica with the layers that it computes; empty without one."""
        return () if self.hedge is None else (RouteHop(self.hedge.replica, self.hops[self.hedge.index].span),)

    @property
    def sealed(self) -> tuple[bytes, ...]:
        """The signed records of its machines, hop 0 first, as many as may travel with it."""
        blobs = [record.sealed for record in self._all_records if record.sealed]
        sizes = accumulate(len(blob) for blob in blobs)
        return tuple(blob for blob, size in zip(blobs, sizes, strict=True) if size <= RECORDS_BYTES)

    @property
    def ends_only(self) -> bool:
        """Whether all its machines do without token ids between its ends (P17)."""
        return all(record.ends_only for record in self._all_records)

    def endpoint(self, peer: PeerId) -> Endpoint:
        """How to reach a machine of the chain, or the replica, from its signed record.

        Raises:
            KeyError: it is neither.
        """
        return {record.peer: record.endpoint for record in self._all_records}[peer]

    def relay_of(self, peer: str) -> str | None:
        """`host:port` of the relay through which a machine of the chain is reached; None where there is none."""
        return next((record.endpoint.relay for record in self._all_records if record.peer == peer), None)

    @property
    def _all_records(self) -> tuple[NodeRecord, ...]:
        return self.records if self.replica is None else (*self.records, self.replica)

    @property
    def addresses(self) -> tuple[str, ...]:
        """`host:port` per hop, from the signed records."""
        return tuple(record.address for record in self.records)

    @property
    def numeric_class(self) -> str:
        """The one numeric class of the chain."""
        return self.records[0].numeric_class

    @property
    def rounding(self) -> str | None:
        """The one mark of its processors; None where they round differently."""
        marks = {record.rounding for record in self._all_records}
        return marks.pop() if len(marks) == 1 else None

    @property
    def sweep_ms(self) -> float:
        """Predicted time of a sweep, from the client and back, drafting not counted."""
        return sum(cost.total_ms for cost in self.costs) + self.return_ms


def best_route(records: Sequence[NodeRecord], query: RouteQuery) -> Route:
    """The fastest chain of one numeric class over layers `[0, num_layers)`; with a seed, one of the nearly fastest.

    One whose processors round alike goes before faster ones, if it is not much slower.

    Args:
        records: valid records of one model.
        query: what the chain is needed for.

    Raises:
        RouteError: no node takes the session on some layers; names them and the command that would fill the gap.
    """
    ordered = sorted(records, key=lambda record: (record.span.start, record.peer))
    found = [one for kind in _classes(ordered, query) if (one := _best_of_class(kind, query)) is not None]
    if found:
        return min(found, key=lambda pair: pair[0])[1]
    raise _no_chain(ordered, query)


def runner_up(records: Sequence[NodeRecord], query: RouteQuery, best: Route) -> Route | None:
    """The fastest chain that does without at least one machine of `best`, or None."""
    others = []
    for hop in best.hops:
        try:
            others.append(best_route(records, replace(query, avoid=query.avoid | {hop.peer}, seed=None)))
        except RouteError:
            continue
    return min(others, key=lambda route: route.sweep_ms, default=None)


def hedged(route: Route, records: Iterable[NodeRecord], query: RouteQuery, first: int | None = None) -> Route:
    """The route with a replica for one of its hops: the fastest machine of the same numeric class and rounding.

    The slowest hop that can have one has it, unless a spare machine holds the session already for another hop.

    Args:
        route: without a replica.
        records: of machines that may be it.
        query: what the route was made for.
        first: place of a hop that has it before all others, if it can.
    """
    taken = {hop.peer for hop in route.hops} | query.avoid
    held = set(query.keep)
    spare = [one for one in records if one.peer not in taken and one.numeric_class == route.numeric_class]
    own_ms = [cost.queue_ms + cost.compute_ms for cost in route.costs]
    in_use = {hop.span for hop in held if hop.peer in {one.peer for one in spare}}

    def rank(place: int) -> tuple[bool, bool, float]:
        return route.hops[place].span not in in_use, place != first, -own_ms[place]

    for place in sorted(range(len(own_ms)), key=rank):
        hop, sender = route.hops[place], route.records[place - 1] if place else None

        def cost_ms(record: NodeRecord, hop: RouteHop = hop, sender: NodeRecord | None = sender) -> float:
            replay_ms = 0.0 if RouteHop(record.peer, hop.span) in held else query.replay_layer_ms * len(hop.span)
            price_ms = penalty_ms(record.peer, query) + RELAYED_MS * is_relayed(record)
            return _hop_cost(sender, record, hop.span, query).total_ms + replay_ms + price_ms

        fitting = [
            one
            for one in spare
            if one.span.contains(hop.span)
            and one.rounding == route.records[place].rounding
            and (can_join(one, query) or RouteHop(one.peer, hop.span) in held)
        ]
        if fitting:
            replica = min(fitting, key=cost_ms)
            return replace(route, hedge=Hedge(place, replica.peer), replica=replica)
    return route


def _classes(records: Iterable[NodeRecord], query: RouteQuery) -> list[list[Candidate]]:
    """The candidates that the query allows, by numeric class."""
    kept = {hop.peer: hop.span for hop in query.keep}
    classes: dict[str, list[Candidate]] = {}
    for record in records:
        if record.peer in query.avoid or query.numeric_class not in (None, record.numeric_class):
            continue
        offers = classes.setdefault(record.numeric_class, [])
        span = kept.get(record.peer)
        if span is not None and record.span.contains(span):
            offers.append(Candidate(record, span, kept=True))
        if can_join(record, query) and not (query.avoid and record.endpoint.relay in query.avoid):
            offers.append(Candidate(record, record.span))
    return [classes[kind] for kind in sorted(classes) if classes[kind]]


def _best_of_class(candidates: Sequence[Candidate], query: RouteQuery) -> tuple[float, Route] | None:
    """The chain that is taken of one class, and its cost."""
    best = _best_of(candidates, query)
    if best is None or (best[1].rounding is not None and query.rounding in (None, best[1].rounding)):
        return best

    def of_mark(mark: str) -> tuple[float, Route] | None:
        return _best_of([one for one in candidates if one.record.rounding == mark], query)

    alike = None
    if query.rounding is not None:  # a session's: with it the text goes on as it was
        alike = of_mark(query.rounding)
    elif not query.keep:
        marks = Counter(one.record.rounding for one in candidates).most_common(MARKS_TRIED)
        found = [of_mark(mark) for mark, _ in marks]
        alike = min((one for one in found if one is not None), key=lambda pair: pair[0], default=None)
        if alike is not None and not query.alike and alike[0] > ALIKE_SLOWER * best[0]:
            alike = None
    return alike if alike is not None or query.alike else best


def _best_of(candidates: Sequence[Candidate], query: RouteQuery) -> tuple[float, Route] | None:
    """The cheapest chain of one class and its cost."""
    found = cheapest(tabulate(candidates, query), query.num_layers)
    return None if found is None else (found.cost_ms, _route(candidates, found, query))


def _route(candidates: Sequence[Candidate], found: CheapestChain, query: RouteQuery) -> Route:
    chosen = [candidates[leg.row].record for leg in found.legs]
    hops = [RouteHop(record.peer, Span(leg.start, leg.end)) for record, leg in zip(chosen, found.legs, strict=True)]
    senders = [None, *chosen[:-1]]
    costs = [
        _hop_cost(*link, hop.span, query) for link, hop in zip(zip(senders, chosen, strict=True), hops, strict=True)
    ]
    return_ms = client_delay_ms(chosen[-1], query)[0]
    links_ms = sum(cost.delay_ms for cost in costs) + return_ms
    waits_ms = [wait_ms(record, expected_ms(record, 1, query)) for record in chosen]
    each_ms, row_ms = _compute_ms(hops, chosen, query)
    compute_ms, waiting_ms = sum(each_ms), sum(waits_ms)
    bottleneck_share = max(own + wait for own, wait in zip(each_ms, waits_ms, strict=True)) / (compute_ms + waiting_ms)
    link_row_ms = sum(transfer_ms(record, replace(query, nodes=0)) for record in chosen[:-1])
    rest = (link_row_ms, waiting_ms, len(hops), bottleneck_share, _steps(hops, chosen, query))
    forecast = RouteForecast(links_ms, compute_ms, row_ms, *rest)
    return Route(tuple(hops), tuple(chosen), tuple(costs), return_ms, forecast, found.gap_ms)


def _compute_ms(
    hops: Sequence[RouteHop], records: Sequence[NodeRecord], query: RouteQuery
) -> tuple[list[float], float]:
    """Each hop's predicted time of a sweep of one row, and what a further row adds at all hops together."""
    parts = [len(hop.span) / len(record.span) for hop, record in zip(hops, records, strict=True)]
    one_ms, many_ms = (
        [expected_ms(record, rows, query) * part for record, part in zip(records, parts, strict=True)]
        for rows in (1, MANY_ROWS)
    )
    row_ms = max((sum(many_ms) - sum(one_ms)) / (MANY_ROWS - 1), 0.0)
    return [hop_ms + HOP_OVERHEAD_MS for hop_ms in one_ms], row_ms


def _steps(hops: Sequence[RouteHop], records: Sequence[NodeRecord], query: RouteQuery) -> BucketSteps:
    """All hops' predicted time by the rows of a bucket; empty unless all of them pad their rows.

    Edges that follow each other closely are one step, the larger: a hostile record must not make many of them.
    """
    if not all(record.bucketed and record.sweep_ms for record in records):
        return ()
    edges: list[int] = []
    for edge in sorted({rows for record in records for rows, _ in record.sweep_ms}, reverse=True):
        if not edges or edge <= edges[-1] / MIN_STEP:
            edges.append(edge)
    parts = [len(hop.span) / len(record.span) for hop, record in zip(hops, records, strict=True)]
    return tuple(
        (rows, sum(_with_overhead(record, rows, part, query) for record, part in zip(records, parts, strict=True)))
        for rows in reversed(edges)
    )


def _with_overhead(record: NodeRecord, rows: int, part: float, query: RouteQuery) -> float:
    return expected_ms(record, rows, query) * part + HOP_OVERHEAD_MS


def _hop_cost(sender: NodeRecord | None, record: NodeRecord, span: Span, query: RouteQuery) -> HopCost:
    whole_ms = expected_ms(record, query.nodes + 1, query)
    link = client_delay_ms(record, query) if sender is None else delay_ms(sender, record, query)
    return HopCost(
        *link,
        transfer_ms=0.0 if sender is None else transfer_ms(sender, query),
        queue_ms=wait_ms(record, whole_ms),
        compute_ms=whole_ms * len(span) / len(record.span) + HOP_OVERHEAD_MS,
    )


def _no_chain(records: Sequence[NodeRecord], query: RouteQuery) -> RouteError:
    """Why there is no chain: some layers are not served, have no room, or no numeric class covers them all."""
    serving = [record for record in records if record.state is NodeState.SERVING and record.peer not in query.avoid]
    missing = missing_layers([record.span for record in serving], query.num_layers)
    full = missing_layers([record.span for record in serving if can_join(record, query)], query.num_layers)
    if full and not missing:
        gaps, line = _gaps(full), serve_line(query.name, Span(*full[0]), query.join)
        need = f"no node of {gaps} of {query.name} has KV room for {query.kv_tokens} tokens"
        return RouteError(f"{need}; ask for fewer, wait, or add room: {line}", full)
    return no_route(query, missing, sorted({record.numeric_class for record in serving}))


def no_route(query: RouteQuery, missing: Sequence[tuple[int, int]], classes: Sequence[str] = ()) -> RouteError:
    """The error for a model that no chain covers.

    Args:
        query: what the chain is needed for.
        missing: half-open ranges of layers that nobody serves; empty where no single numeric class has them all.
        classes: numeric classes that there are.
    """
    if not missing:
        kinds = f"the numeric class {query.numeric_class}" if query.numeric_class else "one numeric class"
        kinds += ", on processors that round alike," if query.alike else ""
        return RouteError(f"no chain of {kinds} covers {query.name} (there are {', '.join(classes)})", ())
    line = serve_line(query.name, Span(*missing[0]), query.join)
    return RouteError(f"nobody serves {_gaps(missing)} of {query.name}; this fills the gap: {line}", missing)


def _gaps(missing: Iterable[tuple[int, int]]) -> str:
    return name_layers([Span(start, end) for start, end in missing])
