"""What clients signed for at this node: checked against what it computed, added up, and waiting to be published.

A session leaves a claim here: what it computed of whose tokens, and the way to the next machine. A receipt that its
claim does not cover changes nothing. Bounded: claims of sessions that are over go after a while, and of what waits to
be published the oldest goes. Owns no file and no broker.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import grpc.aio

from swarm.base.errors import RemoteProtocolError
from swarm.base.ids import PeerId, SessionId
from swarm.base.layers import Span
from swarm.protocol.limits import MAX_COUNT
from swarm.protocol.messages import Attach
from swarm.trust.receipt import FRESH_S, SKEW_S, Receipt, opened

CLAIM_S: Final = 30.0
"""How long a receipt may come after its session's end."""
MAX_CLAIMS: Final = 4_096
MAX_WAITING: Final = 4_096
"""Receipts that wait to be published, one per session: the newest."""
PASS_S: Final = 5.0
"""How long the next machine may take to hear of a receipt; nothing waits for it."""
FRAME_BYTES: Final = 6
"""What stands around a receipt in a message."""
NextChannel = Callable[[], grpc.aio.Channel | None]


@dataclass(slots=True)
class SessionClaim:
    """What this node did in one session.

    Attributes:
        fingerprint: of the model.
        span: the layers that the session used here.
        num_layers: of the whole model.
        joined_at: when it came here, in Unix seconds.
        next_channel: leads to the machine that comes next, if there is one now.
        tokens: that became committed in what was computed here.
        signed: the total of the newest receipt.
        base: from where on all up to there is covered by what was computed here.
        granted: of that, how many tokens receipts have counted.
        began_at: of the first receipt; None before it.
        over_at: when it ended, in Unix seconds; None while it runs.
    """

    fingerprint: str
    span: Span
    num_layers: int
    joined_at: float
    next_channel: NextChannel = lambda: None
    tokens: int = 0
    signed: int = 0
    base: int = 0
    granted: int = 0
    began_at: int | None = None
    over_at: float | None = None


@dataclass(slots=True)
class ReceiptBook:
    """The receipts of one node and model.

    Attributes:
        layer_tokens: that clients signed for in this run.
        waiting: the newest receipt of each session, until it is published.
        dropped: receipts that gave way to newer ones of other sessions.
    """

    peer: PeerId
    clock: Callable[[], float] = time.time
    layer_tokens: int = 0
    waiting: OrderedDict[SessionId, bytes] = field(default_factory=OrderedDict)
    dropped: int = 0
    _running: dict[SessionId, SessionClaim] = field(default_factory=dict)
    _over: OrderedDict[SessionId, SessionClaim] = field(default_factory=OrderedDict)

    def begin(self, attach: Attach, next_channel: NextChannel) -> SessionClaim:
        """A session begins here."""
        session, route = attach.session, attach.route
        claim = self._running[session] = SessionClaim(
            *(attach.open.fingerprint, route[attach.index].span, route[-1].span.end, self.clock(), next_channel)
        )
        self._over.pop(session, None)
        return claim

    def end(self, session: SessionId, claim: SessionClaim) -> None:
        """It is over: a receipt may still come, for a while."""
        if self._running.get(session) is not claim:
            return
        del self._running[session]
        channel, claim.over_at = claim.next_channel(), self.clock()
        claim.next_channel = lambda: channel
        self._over[session] = claim
        while len(self._over) > MAX_CLAIMS or self._is_late(next(iter(self._over.values()))):
            self._over.popitem(last=False)

    def _is_late(self, claim: SessionClaim) -> bool:
        return claim.over_at is not None and not 0 <= self.clock() - claim.over_at <= CLAIM_S

    def take(self, receipt: Receipt, sealed: bytes) -> SessionClaim | None:
        """Take a receipt in, whose signature holds; None where it is no news.

        Args:
            sealed: as it came.

        Raises:
            RemoteProtocolError: names what its session's claim does not cover; nothing is changed.
        """
        session, hop, now = receipt.session, receipt.hop_of(self.peer), self.clock()
        claim = self._running.get(session) or self._over.get(session)
        if claim is None or self._is_late(claim):
            raise RemoteProtocolError("session", "is not, or no longer, of this node")
        if receipt.fingerprint != claim.fingerprint:
            raise RemoteProtocolError("fingerprint", "is of another model")
        if hop is None or (hop.span, receipt.num_layers) != (claim.span, claim.num_layers):
            raise RemoteProtocolError("route", "does not have this node's layers of this model")
        if (field_name := receipt.untimely(now)) is not None:
            raise RemoteProtocolError(field_name, "is too far from now")
        if claim.began_at not in {None, receipt.began_at} or receipt.began_at > claim.joined_at + SKEW_S:
            raise RemoteProtocolError("began_at", "is not when this session began")
        if receipt.tokens <= claim.signed:
            return None
        if receipt.since < claim.base:
            raise RemoteProtocolError("since", "is before this node had a part")
        grown = receipt.tokens - max(claim.signed, receipt.since)
        if claim.granted + grown > claim.tokens:
            raise RemoteProtocolError("tokens", f"{claim.tokens} were computed here")
        claim.base = receipt.since if receipt.since > claim.signed else claim.base
        claim.granted, claim.signed, claim.began_at = claim.granted + grown, receipt.tokens, receipt.began_at
        self.layer_tokens = min(self.layer_tokens + grown * len(claim.span), MAX_COUNT)
        self.waiting.pop(session, None)
        self.waiting[session] = sealed
        if len(self.waiting) > MAX_WAITING:
            self.waiting.popitem(last=False)
            self.dropped += 1
        return claim

    def published(self, sent: Iterable[bytes]) -> None:
        """These have left."""
        gone = set(sent)
        for session in [session for session, sealed in self.waiting.items() if sealed in gone]:
            del self.waiting[session]

    def batch(self, most_bytes: int, most: int) -> tuple[bytes, ...]:
        """What is to be published next, the oldest first; what is too old to count goes.

        Args:
            most_bytes: of all of it, with `FRAME_BYTES` for each.
            most: receipts.
        """
        for session in [one for one, sealed in self.waiting.items() if _issued_at(sealed) < self.clock() - FRESH_S]:
            del self.waiting[session]
        found = list[bytes]()
        for sealed in self.waiting.values():
            most_bytes -= len(sealed) + FRAME_BYTES
            if most_bytes < 0 or len(found) == most:
                break
            found.append(sealed)
        return tuple(found)

    def load(self, waiting: object) -> None:
        """Let receipts of an earlier run wait again; what is none is left out."""
        for sealed in waiting if isinstance(waiting, list) else ():
            with suppress(RemoteProtocolError, TypeError):
                self.waiting.setdefault(opened(sealed).session, sealed)
        while len(self.waiting) > MAX_WAITING:
            self.waiting.popitem(last=False)


def _issued_at(sealed: bytes) -> int:
    return opened(sealed).issued_at
