"""What all sessions of a node share."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc.aio

from node.engine import Engine
from node.journals import JOURNAL_BYTES, JournalRoom
from node.span import SpanModel
from node.sweep_run import NoiseSource
from node.tally import Tally
from swarm.dial import Dialer
from swarm.errors import Unreachable
from swarm.ids import PeerId
from swarm.messages import Credits, RouteHop
from swarm.registry import KNOWN_S, Registry
from swarm.session import Limits


@dataclass(frozen=True, slots=True)
class Workshop:
    """What all sessions of a node share."""

    peer: PeerId
    model: SpanModel
    engine: Engine
    registry: Registry
    dialer: Dialer
    tally: Tally
    valid_tokens: int
    noise: NoiseSource
    journals: JournalRoom = field(default_factory=lambda: JournalRoom(JOURNAL_BYTES))

    async def dial(self, fingerprint: str, hop: RouteHop) -> tuple[grpc.aio.Channel, bool]:
        """The connection to a hop at the address of its own signed record and nowhere else; whether it is cold.

        Raises:
            Unreachable: it has no such record.
        """
        for within_s in (KNOWN_S, 0.0):
            for record in await self.registry.records(fingerprint, self.model.num_layers, within_s=within_s):
                if record.peer == hop.peer and record.span.contains(hop.span):
                    return self.dialer.channel(record.address), self.dialer.was_cold(record.address)
        raise Unreachable(hop.peer, str(hop.span), "has no valid record in the registry")

    def limits(self, credits: Credits) -> Limits:
        """What a session with these credits may hold."""
        return Limits(self.model.vocab_size, credits.window_tokens, credits.sweeps, credits.nodes)
