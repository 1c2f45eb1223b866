"""Which machines a session runs on: a chain over the layers by lowest predicted time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.coverage import serve_line
from swarm.errors import RouteError
from swarm.layers import Span, missing_layers
from swarm.messages import RouteHop
from swarm.record import NodeRecord, NodeState

HOP_MS = 30.0
"""What one more hop is taken to cost while no link has been measured: a home link's one-way delay."""


@dataclass(frozen=True, slots=True)
class Route:
    """A chain: its hops with the layers that each computes, and where they listen."""

    hops: tuple[RouteHop, ...]
    records: tuple[NodeRecord, ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        """`host:port` per hop, from the signed records."""
        return tuple(record.address for record in self.records)

    @property
    def numeric_class(self) -> str:
        """The one numeric class of the chain."""
        return self.records[0].numeric_class


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What a chain is wanted for: a model, as the user calls it, and the expected tree size in nodes."""

    name: str
    num_layers: int
    nodes: int = 16
    join: tuple[str, ...] = ()


def best_route(records: Sequence[NodeRecord], query: RouteQuery) -> Route:
    """The fastest chain of one numeric class over layers `[0, num_layers)`, by dynamic programming over span borders.

    Args:
        records: valid records of one model.
        query: the model's layers, and the tree size at which claimed speeds are compared.

    Raises:
        RouteError: some layers have no serving node; names them and the line that would fill the gap.
    """
    serving = [record for record in records if record.state is NodeState.SERVING]
    classes = sorted({record.numeric_class for record in serving})
    found = [_fastest([r for r in serving if r.numeric_class == kind], query) for kind in classes]
    routes = [(cost, route) for cost, route in found if route is not None]
    if routes:
        return min(routes, key=lambda pair: pair[0])[1]
    missing = missing_layers([record.span for record in serving], query.num_layers)
    raise no_route(query, missing, classes)


def _fastest(records: Sequence[NodeRecord], query: RouteQuery) -> tuple[float, Route | None]:
    """Cheapest way to have computed layers `[0, end)`, for every span border `end` in rising order.

    A machine stands in a chain once: its second part would be a second session under the same id.
    """
    borders = sorted({record.span.end for record in records} | {record.span.start for record in records} - {0})
    best: dict[int, tuple[float, tuple[tuple[NodeRecord, Span], ...]]] = {0: (0.0, ())}
    for end in borders:
        options = [
            (cost + HOP_MS + _compute_ms(record, end - start, query.nodes), (*chosen, (record, Span(start, end))))
            for start, (cost, chosen) in best.items()
            for record in records
            if record.span.start <= start < end <= record.span.end
            and all(record.peer != other.peer for other, _ in chosen)
        ]
        if options:
            best[end] = min(options, key=lambda option: (option[0], [str(record.peer) for record, _ in option[1]]))
    if query.num_layers not in best:
        return float("inf"), None
    cost, chosen = best[query.num_layers]
    hops = tuple(RouteHop(record.peer, span) for record, span in chosen)
    return cost, Route(hops, tuple(record for record, _ in chosen))


def _compute_ms(record: NodeRecord, layers: int, nodes: int) -> float:
    """Claimed time for `layers` of its layers at the measured tree size nearest to `nodes`."""
    if not record.sweep_ms:
        return 0.0
    _, milliseconds = min(record.sweep_ms, key=lambda pair: abs(pair[0] - nodes))
    return milliseconds * layers / len(record.span)


def no_route(query: RouteQuery, missing: Sequence[tuple[int, int]], classes: Sequence[str] = ()) -> RouteError:
    """The error for a model that no chain covers: names the gaps and the command that fills the first."""
    if not missing:
        return RouteError(f"no chain of one numeric class covers {query.name} (there are {', '.join(classes)})", ())
    gaps = ", ".join(f"{start}-{end}" for start, end in missing)
    line = serve_line(query.name, Span(*missing[0]), query.join)
    return RouteError(f"nobody serves layers {gaps} of {query.name}; this fills the gap: {line}", missing)
