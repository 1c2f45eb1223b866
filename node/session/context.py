"""What all sessions of a node share: the model, the engine, the directory, connections. Owns no session."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import grpc.aio

from node.engine.scheduler import Engine
from node.engine.sweep_run import NoiseSource
from node.model.span import SpanModel
from node.session.journal_budget import JOURNAL_BYTES, JournalBudget
from node.telemetry.counters import NodeCounters
from swarm.discovery.node_record import live_records
from swarm.discovery.registry import KNOWN_S, Registry
from swarm.errors import Busy, Unreachable
from swarm.ids import PeerId
from swarm.inference.kv_cache import KvCache
from swarm.layers import Span
from swarm.protocol.messages import Credits, RouteHop
from swarm.protocol.session import Limits
from swarm.transport.certificate import ServerCertificate
from swarm.transport.dial import Connection, Dialer
from swarm.transport.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class NodeContext:
    """What all sessions of a node share."""

    peer: PeerId
    """This node."""
    model: SpanModel
    engine: Engine
    registry: Registry
    dialer: Dialer
    counters: NodeCounters
    certificate: ServerCertificate | None
    """With which this node answers; None in an insecure swarm."""
    valid_tokens: int
    """Ids that the tail may pick are below this."""
    noise: NoiseSource
    journals: JournalBudget = field(default_factory=lambda: JournalBudget(JOURNAL_BYTES))

    async def dial(
        self,
        fingerprint: str,
        hop: RouteHop,
        records: Iterable[bytes] = (),
        stuck: grpc.aio.Channel | None = None,
    ) -> Connection:
        """The connection to a hop at the address of its own signed record and nowhere else.

        Args:
            fingerprint: of the model.
            hop: whom to dial.
            records: signed ones that the client passed on: with these the directory is not asked.
            stuck: a connection on which nothing comes through any more; another one is made.

        Raises:
            Unreachable: it has no such record.
            SwarmError: its record announces no certificate.
        """
        for record in live_records(records, time.time()):
            if record.peer == hop.peer and record.model.fingerprint == fingerprint and record.span.contains(hop.span):
                return self._connect(record.endpoint, stuck)
        for within_s in (KNOWN_S, 0.0):
            for record in await self.registry.records(fingerprint, self.model.num_layers, within_s=within_s):
                if record.peer == hop.peer and record.span.contains(hop.span):
                    return self._connect(record.endpoint, stuck)
        raise Unreachable(hop.peer, str(hop.span), "has no valid record in the registry")

    def _connect(self, endpoint: Endpoint, stuck: grpc.aio.Channel | None) -> Connection:
        return Connection(self.dialer.channel(endpoint, stuck), endpoint, self.dialer.was_cold(endpoint))

    async def kv_cache(self, span: Span, tokens: int) -> KvCache:
        """KV for so many tokens of some layers.

        Raises:
            Busy: there is no memory for it.
        """
        try:
            return await self.engine.on_thread(lambda: KvCache(self.model.layout.within(span), tokens))
        except (RuntimeError, MemoryError) as error:  # torch's ways to say that there is no memory
            reason = f"has no memory for the KV of {tokens} tokens ({str(error).partition(chr(10))[0]})"
            raise Busy(self.peer, str(span), reason) from error

    def limits(self, credits: Credits) -> Limits:
        """What a session with these credits may hold."""
        return Limits(self.model.vocab_size, credits.window_tokens, credits.sweeps, credits.nodes)
