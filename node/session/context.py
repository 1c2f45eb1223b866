"""What all sessions of a node share: the model, the engine, the way to other machines. Owns no session."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import grpc.aio

from node.model.span import SpanModel
from node.session.admission import Admission
from node.session.counters import NodeCounters
from node.session.receipts import ReceiptBook
from node.session.scheduler import Engine
from node.session.settle import HopCommitments, SettledTexts
from swarm.base.errors import Busy, ConfigError, RemoteProtocolError
from swarm.base.ids import PeerId
from swarm.base.layers import Span
from swarm.compute.compute_thread import ComputeThread
from swarm.compute.grammars import CompiledGrammar, GrammarCompiler
from swarm.compute.kv_cache import KvCache
from swarm.compute.kv_slots import ancestor_bytes
from swarm.compute.sampling import NoiseSource
from swarm.link.certificate import ServerCertificate
from swarm.link.dial import Connection
from swarm.link.link import Signer, Uplink
from swarm.protocol.faults import SignatureCheck
from swarm.protocol.journal import Journal
from swarm.protocol.messages import Credits, RouteHop
from swarm.protocol.pick_rules import Grammar
from swarm.protocol.session import Limits
from swarm.trust.settlement import SettlingKey
from swarm.trust.verify import Refutation

logger = logging.getLogger(__name__)

# How much memory the journals of a node's sessions may take together.

JOURNAL_BYTES = 2 << 30


class JournalBudget:
    """A budget in bytes.

    Attributes:
        limit_bytes: for all journals.
        used_bytes: what those of sessions that run take now, with leaves of what travelled.
        settled: what is kept of sessions that are over, as long as nothing else needs its room.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.settled = SettledTexts()

    def settle(self, paid_bytes: int, journal: Journal, commitments: HopCommitments) -> int:
        """Account for a journal that grew or shrank; without room for it, leaves are dropped, then the journal (R8).

        Before either, the final rows that a tail keeps.

        Args:
            paid_bytes: what it and the leaves took at the last call.
            journal: the journal as it is now.
            commitments: of the same session.

        Returns:
            what they take now.
        """
        grown = journal.size_bytes + commitments.size_bytes - paid_bytes
        while grown > 0 and self._lacks(grown) and self.settled.give_way():
            pass
        if grown > 0 and self._lacks(grown):
            grown -= commitments.forget_picked()
        if grown > 0 and self._lacks(grown):
            commitments.drop()
            if self._lacks(journal.size_bytes - paid_bytes):
                logger.warning("no room for the journal of a session: another hop will replay it when this is needed")
                journal.drop()
        taken = journal.size_bytes + commitments.size_bytes
        self.used_bytes += taken - paid_bytes
        return taken

    def _lacks(self, more_bytes: int) -> bool:
        return self.used_bytes + self.settled.size_bytes + more_bytes > self.limit_bytes


HopDial = Callable[[RouteHop, Iterable[bytes], grpc.aio.Channel | None], Awaitable[Connection]]
"""Connects one session to a hop: its place, sealed records that its client passed on, a connection that is stuck."""


@dataclass(frozen=True, slots=True)
class NodeContext:
    """What all sessions of a node share."""

    peer: PeerId
    """This node."""
    signer: Signer
    """Its identity."""
    model: SpanModel
    engine: Engine
    dials: Callable[[str], HopDial]
    """How a session of some owner comes to the machine that comes next."""
    is_signed: SignatureCheck
    admission: Admission
    counters: NodeCounters
    uplink: Uplink
    """By which all that it sends leaves; counts into `counters`."""
    certificate: ServerCertificate | None
    """With which this node answers; None in an insecure swarm."""
    valid_tokens: int
    """Ids that the tail may pick are below this."""
    noise: NoiseSource | None
    """Makes rows of noise, kept between sweeps; None where picks are made on the device."""
    grammars: GrammarCompiler
    """For the model's tokenizer."""
    hashing: ComputeThread
    """Commits to what travelled."""
    receipts: ReceiptBook
    """What clients signed for."""
    settling: SettlingKey = field(default_factory=SettlingKey)
    """Signs what it committed to."""
    refuted: Callable[[Refutation], None] = lambda _: None
    """Told of a machine that computed something else than this node's own layers do."""
    journals: JournalBudget = field(default_factory=lambda: JournalBudget(JOURNAL_BYTES))

    @property
    def digest(self) -> bytes:
        """SHA-256 of this node's certificate; empty in an insecure swarm."""
        return b"" if self.certificate is None else self.certificate.digest

    async def kv_cache(self, span: Span, credits: Credits, expected_tokens: int) -> KvCache:
        """KV for a session's window and nodes, in some layers.

        On a card with memory for what is expected; a CPU takes memory as it is written to.

        Raises:
            Busy: there is no memory for it.
        """
        tokens, layout = credits.window_tokens + credits.nodes, self.model.layout.within(span)
        at_first = None if layout.device.type == "cpu" or not expected_tokens else expected_tokens
        try:
            return await self.engine.on_thread(lambda: KvCache(layout, tokens, credits.nodes, at_first))
        except (RuntimeError, MemoryError) as error:  # torch's ways to say that there is no memory
            reason = f"has no memory for the KV of {tokens} tokens ({str(error).partition(chr(10))[0]})"
            raise Busy(self.peer, str(span), reason) from error

    async def compile(self, span: Span, owner: str, grammar: Grammar) -> CompiledGrammar:
        """A session's grammar, compiled in a worker.

        Raises:
            RemoteProtocolError: it is none, or takes too much time or memory.
            Busy: too many others are followed here.
        """
        try:
            return await self.grammars.compile(grammar, owner)
        except ConfigError as error:
            raise RemoteProtocolError("grammar", str(error)) from error
        except MemoryError as error:
            raise Busy(self.peer, str(span), str(error)) from error

    def kv_tokens(self, credits: Credits, tokens: int = 0) -> int:
        """What a session costs of the KV budget; ancestors and states are counted by their bytes.

        Args:
            credits: what it was granted.
            tokens: of KV that it takes, or is expected to; 0 for all that it may take.
        """
        most, layout = credits.window_tokens + credits.nodes, self.model.layout
        beside = ancestor_bytes(credits.nodes) + layout.states_bytes(credits.nodes)
        return min(most, tokens or most) + beside // max(layout.bytes_per_token, 1)

    def limits(self, credits: Credits) -> Limits:
        """What a session with these credits may hold."""
        return Limits(self.model.vocab_size, credits.window_tokens, credits.sweeps, credits.nodes)
