"""Which machines a session runs on: the chain over the layers with the lowest predicted time per sweep. Pure.

`swarm.route_costs` says what everything costs, `swarm.route_search` finds the cheapest chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from swarm.coverage import serve_line
from swarm.errors import RouteError
from swarm.layers import Span, missing_layers
from swarm.messages import RouteHop
from swarm.record import NodeRecord, NodeState
from swarm.route_costs import (
    Candidate,
    HopCost,
    RouteQuery,
    can_join,
    client_delay_ms,
    delay_ms,
    sweep_ms,
    tabulate,
    transfer_ms,
    wait_ms,
)
from swarm.route_search import Found, cheapest

__all__ = ["Route", "RouteQuery", "best_route", "no_route", "runner_up"]


@dataclass(frozen=True, slots=True)
class Route:
    """A chain: its hops with the layers that each computes, where they listen, and what a sweep should take.

    costs: per hop. return_ms: from the tail to the client. gap_ms: the very best chain may be faster by this at most.
    """

    hops: tuple[RouteHop, ...]
    records: tuple[NodeRecord, ...]
    costs: tuple[HopCost, ...]
    return_ms: float
    gap_ms: float = 0.0

    @property
    def addresses(self) -> tuple[str, ...]:
        """`host:port` per hop, from the signed records."""
        return tuple(record.address for record in self.records)

    @property
    def numeric_class(self) -> str:
        """The one numeric class of the chain."""
        return self.records[0].numeric_class

    @property
    def sweep_ms(self) -> float:
        """Predicted time of a sweep, from the client and back, drafting not counted."""
        return sum(cost.total_ms for cost in self.costs) + self.return_ms


def best_route(records: Sequence[NodeRecord], query: RouteQuery) -> Route:
    """The fastest chain of one numeric class over layers `[0, num_layers)`; with a seed, one of the nearly fastest.

    Args:
        records: valid records of one model.
        query: what the chain is wanted for.

    Raises:
        RouteError: some layers have no node that takes the session; names them and the line that would fill the gap.
    """
    ordered = sorted(records, key=lambda record: (record.span.start, record.peer))
    found = [one for kind in _classes(ordered, query) if (one := _best_of(kind, query)) is not None]
    if found:
        return min(found, key=lambda pair: pair[0])[1]
    raise _nobody(ordered, query)


def runner_up(records: Sequence[NodeRecord], query: RouteQuery, best: Route) -> Route | None:
    """The fastest chain that does without at least one machine of `best`, or None."""
    others = []
    for hop in best.hops:
        try:
            others.append(best_route(records, replace(query, avoid=query.avoid | {hop.peer}, seed=None)))
        except RouteError:
            continue
    return min(others, key=lambda route: route.sweep_ms, default=None)


def _classes(records: Iterable[NodeRecord], query: RouteQuery) -> list[list[Candidate]]:
    """What machines offer, by numeric class."""
    kept = {hop.peer: hop.span for hop in query.keep}
    classes: dict[str, list[Candidate]] = {}
    for record in records:
        if record.peer in query.avoid or query.numeric_class not in (None, record.numeric_class):
            continue
        offers = classes.setdefault(record.numeric_class, [])
        span = kept.get(record.peer)
        if span is not None and record.span.contains(span):
            offers.append(Candidate(record, span, kept=True))
        if can_join(record, query):
            offers.append(Candidate(record, record.span))
    return [classes[kind] for kind in sorted(classes) if classes[kind]]


def _best_of(candidates: Sequence[Candidate], query: RouteQuery) -> tuple[float, Route] | None:
    """The cheapest chain of one class and its cost."""
    found = cheapest(tabulate(candidates, query), query.num_layers)
    return None if found is None else (found.cost_ms, _route(candidates, found, query))


def _route(candidates: Sequence[Candidate], found: Found, query: RouteQuery) -> Route:
    chosen = [candidates[leg.row].record for leg in found.legs]
    hops = [RouteHop(record.peer, Span(leg.start, leg.end)) for record, leg in zip(chosen, found.legs, strict=True)]
    senders = [None, *chosen[:-1]]
    costs = [
        _hop_cost(*link, hop.span, query) for link, hop in zip(zip(senders, chosen, strict=True), hops, strict=True)
    ]
    return Route(tuple(hops), tuple(chosen), tuple(costs), client_delay_ms(chosen[-1], query)[0], found.gap_ms)


def _hop_cost(sender: NodeRecord | None, record: NodeRecord, span: Span, query: RouteQuery) -> HopCost:
    whole_ms = sweep_ms(record, query.nodes + 1)
    link = client_delay_ms(record, query) if sender is None else delay_ms(sender, record, query)
    return HopCost(
        *link,
        transfer_ms=0.0 if sender is None else transfer_ms(sender, query),
        queue_ms=wait_ms(record, whole_ms),
        compute_ms=whole_ms * len(span) / len(record.span),
    )


def _nobody(records: Sequence[NodeRecord], query: RouteQuery) -> RouteError:
    """Why there is no chain: nobody serves some layers, nobody has room there, or no class covers them all."""
    serving = [record for record in records if record.state is NodeState.SERVING and record.peer not in query.avoid]
    missing = missing_layers([record.span for record in serving], query.num_layers)
    full = missing_layers([record.span for record in serving if can_join(record, query)], query.num_layers)
    if full and not missing:
        gaps, line = _gaps(full), serve_line(query.name, Span(*full[0]), query.join)
        need = f"no node of layers {gaps} of {query.name} has KV room for {query.kv_tokens} tokens"
        return RouteError(f"{need}; ask for fewer, wait, or add room: {line}", full)
    return no_route(query, missing, sorted({record.numeric_class for record in serving}))


def no_route(query: RouteQuery, missing: Sequence[tuple[int, int]], classes: Sequence[str] = ()) -> RouteError:
    """The error for a model that no chain covers: names the gaps and the command that fills the first."""
    if not missing:
        kinds = f"the numeric class {query.numeric_class}" if query.numeric_class else "one numeric class"
        return RouteError(f"no chain of {kinds} covers {query.name} (there are {', '.join(classes)})", ())
    line = serve_line(query.name, Span(*missing[0]), query.join)
    return RouteError(f"nobody serves layers {_gaps(missing)} of {query.name}; this fills the gap: {line}", missing)


def _gaps(missing: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{start}-{end}" for start, end in missing)
