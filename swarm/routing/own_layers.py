"""Layers that only machines of the user's choice may compute: what others may compute is cut to the rest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from swarm.base.errors import ConfigError
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.directory.identity import Identity, default_identity_path
from swarm.directory.node_record import NodeRecord
from swarm.protocol.peer_keys import is_peer_id

_PART = re.compile(r"(first|last):(\d{1,6})")


@dataclass(frozen=True, slots=True)
class OwnLayers:
    """Which layers only trusted machines may compute.

    Attributes:
        trusted: these machines.
        first: so many layers at the model's beginning; None for all layers of the model.
        last: so many at its end.
    """

    trusted: frozenset[PeerId]
    first: int | None = None
    last: int = 0

    @classmethod
    def read(cls, own: str | None, trusted: Sequence[str]) -> OwnLayers | None:
        """What two options say; a node of this machine is trusted too.

        Args:
            own: `first:4`, `last:2`, or both with a comma; None for all layers.
            trusted: peer ids, or addresses that end with one.

        Returns:
            None where both are left out: any machine may compute everything.

        Raises:
            ConfigError: an option says something else, or nobody is trusted.
            IdentityError: this machine's identity cannot be read.
        """
        if own is None and not trusted:
            return None
        peers = [peer.rpartition("/")[2] for peer in trusted]
        if wrong := next((peer for peer in peers if not is_peer_id(peer)), None):
            raise ConfigError(f"trusted: {wrong!r} is no peer id; give the address that this node prints, or its end")
        if (here := Identity.load(default_identity_path())) is not None:
            peers.append(here.peer_id)
        parts: dict[str, int | None] = {"first": None}
        if own is not None:
            found = [_PART.fullmatch(part.strip()) for part in own.split(",")]
            parts = {match[1]: int(match[2]) for match in found if match is not None}
            if len(parts) < len(found) or 0 in parts.values():
                raise ConfigError(f"own: {own!r}; write first:4, last:2 or first:4,last:2")
        if not peers:
            raise ConfigError("own: no node ran on this machine yet, so name yours: --trusted PEER")
        return cls(frozenset(map(PeerId, peers)), parts.get("first", 0), parts.get("last") or 0)

    def keep_to(self, records: Iterable[NodeRecord]) -> list[NodeRecord]:
        """The machines that may take part, each with the layers that it may compute, and its time for these alone."""
        kept = []
        for record in records:
            end = record.model.num_layers - self.last
            if record.peer in self.trusted:
                kept.append(record)
            elif self.first is not None and max(record.span.start, self.first) < min(record.span.end, end):
                span = Span(max(record.span.start, self.first), min(record.span.end, end))
                part = len(span) / len(record.span)
                kept.append(
                    replace(record, span=span, sweep_ms=tuple((rows, took * part) for rows, took in record.sweep_ms))
                )
        return kept
