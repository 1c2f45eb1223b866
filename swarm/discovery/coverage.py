"""Which layers of a model are served, and the command that fills a gap. Pure: records in, answers out."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.discovery.node_record import NodeRecord, NodeState
from swarm.ids import ModelIdentity
from swarm.layers import Span, missing_layers


@dataclass(frozen=True, slots=True)
class Coverage:
    """One model's nodes, and the layers that no serving node holds.

    Attributes:
        model: which model.
        records: of its nodes, also of those that do not serve now.
        missing: layers without a serving node, in order.
    """

    model: ModelIdentity
    records: tuple[NodeRecord, ...]
    missing: tuple[Span, ...]

    @property
    def complete(self) -> bool:
        """Whether a chain over all layers can be built now."""
        return not self.missing


def cover(model: ModelIdentity, records: Iterable[NodeRecord]) -> Coverage:
    """The coverage of a model; only nodes that take sessions count."""
    own = tuple(record for record in records if record.model.fingerprint == model.fingerprint)
    spans = [record.span for record in own if record.state is NodeState.SERVING]
    gaps = missing_layers(spans, model.num_layers)
    return Coverage(model, own, tuple(Span(start, end) for start, end in gaps))


def serve_line(model: str, span: Span | str, join: Sequence[str]) -> str:
    """The exact command that serves these layers.

    Args:
        model: as the user calls it.
        span: layers, half-open.
        join: addresses of the swarm; the command has the first.
    """
    parts = ["node", "serve", model, "--layers", str(span)]
    for address in join[:1]:
        parts += ["--join", address]
    return shlex.join(parts)


def fill_lines(coverage: Coverage, join: Sequence[str]) -> list[str]:
    """One command per gap."""
    return [serve_line(coverage.model.name, gap, join) for gap in coverage.missing]
