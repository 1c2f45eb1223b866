"""Which layers of a model are served, and the command that fills a gap. Pure: records in, answers out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from swarm.base.ids import ModelIdentity
from swarm.base.layers import Span, missing_layers
from swarm.directory.node_record import NodeRecord, NodeState, Reach

_NAME: Final = re.compile(r"[A-Za-z0-9./_][A-Za-z0-9./:_-]{0,255}")
"""What a hub id or a path is made of: no option, nothing that a shell reads, nothing that looks like something else."""
_SPAN: Final = re.compile(r"[0-9]{1,6}-[0-9]{1,6}|auto")


@dataclass(frozen=True, slots=True)
class Coverage:
    """One model's nodes, and the layers that no serving node holds."""

    model: ModelIdentity
    records: tuple[NodeRecord, ...]
    missing: tuple[Span, ...]

    @property
    def complete(self) -> bool:
        """Whether a chain over all layers can be built now."""
        return not self.missing


def shown_address(record: NodeRecord) -> str:
    """A node's address as tables show it: with the word for how it is reached, unless its own port is."""
    if record.reach is Reach.DIRECT:
        return record.address
    relay = record.endpoint.relay
    return f"{record.reach.value}, {record.address}" if relay is None else f"{record.reach.value}, via {relay}"


def cover(model: ModelIdentity, records: Iterable[NodeRecord]) -> Coverage:
    """The coverage of a model; only nodes that take sessions count."""
    own = tuple(record for record in records if record.model.fingerprint == model.fingerprint)
    spans = [record.span for record in own if record.state is NodeState.SERVING]
    gaps = missing_layers(spans, model.num_layers)
    return Coverage(model, own, tuple(Span(start, end) for start, end in gaps))


def serve_line(model: str, span: Span | str, join: Sequence[str]) -> str:
    """The exact command that serves these layers. People copy it into a shell, so strangers' words do not enter it.

    Args:
        model: as the user calls it; a name that is no hub id and no plain path is written MODEL.
        span: layers, half-open.
        join: addresses of the swarm; the command has the first.
    """
    parts = ["node", "serve", model if _NAME.fullmatch(model) else "MODEL", "--layers", str(span)]
    for address in join[:1]:
        parts += ["--join", address]
    return shlex.join(parts)


def is_serve_line(line: str) -> bool:
    """Whether a line that came from elsewhere is one that `serve_line` makes, and so can be offered to copy."""
    try:
        _, _, model, _, span, *rest = shlex.split(line)
    except ValueError:
        return False
    join = [word for word in rest if word.startswith("/")][:1]
    return _SPAN.fullmatch(span) is not None and line == serve_line(model, span, join)


def fill_lines(coverage: Coverage, join: Sequence[str]) -> list[str]:
    return [serve_line(coverage.model.name, gap, join) for gap in coverage.missing]
