"""Which telemetry is accepted: signed, in time, newer than what is known (replay protection). Pure; gets the time.

Per peer and model the guard keeps one connection's nonce and the last `seq` of each kind of message in it:
    a status is accepted with a greater `seq` of the same nonce, or with another nonce and a later signature;
    metrics, events and receipts are accepted in the nonce of the last accepted status only, in rising order;
    a will is accepted for that nonce only, once, whatever its age.
So no message can be replayed, and a message that is rejected changes nothing. Memory is bounded, in peers and for each
of them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from swarm.base.ids import PeerId
from swarm.status.messages import (
    DEFAULT_PREFIX,
    MAX_TTL_S,
    Body,
    Event,
    MessageKind,
    Metrics,
    Receipts,
    Signed,
    Status,
    TelemetryError,
    Will,
    check_prefix,
    open_payload,
    part_of,
)

MAX_PEERS: Final = 4_096
MAX_MODELS_PER_PEER: Final = 8
MAX_SKEW_S: Final = 60.0
"""How far a message's time may be off: the peer's clock, and the message's way."""
FORGET_AFTER_S: Final = MAX_TTL_S + 2 * MAX_SKEW_S
"""Silence after which a peer may be forgotten: everything that it signed is too old to be accepted again."""
CLEANUP_INTERVAL_S: Final = 1.0
BURST_MESSAGES: Final = 60.0
"""Size of the token bucket of one peer and model."""
MESSAGES_PER_S: Final = 3.0
"""Rate at which that bucket fills; a node publishes less than one message a second."""


class Reason(enum.StrEnum):
    MALFORMED = "malformed"
    OVERSIZED = "oversized"
    OTHER_VERSION = "other_version"
    FORGED = "forged"
    """The signature does not hold."""
    SKEWED = "skewed"
    """Signed more than `MAX_SKEW_S` from now."""
    EXPIRED = "expired"
    """A retained status beyond its time to live."""
    REPLAYED = "replayed"
    """Not newer than what was accepted."""
    REPEATED = "repeated"
    """The very message that was accepted last: brokers send it again. No sign of malice."""
    FOREIGN_WILL = "foreign_will"
    """A will of another connection than the accepted one."""
    UNBORN = "unborn"
    """Metrics or an event of a connection without an accepted status."""
    FLOOD = "flood"
    """More messages than the token bucket allows."""
    CROWDED = "crowded"
    """No room for another peer, or for another model of this one."""


@dataclass(frozen=True, slots=True)
class AcceptedMessage:
    """A message that is accepted."""

    peer: PeerId
    fingerprint: str
    body: Body


@dataclass(frozen=True, slots=True)
class RejectedMessage:
    """A message that is not.

    Attributes:
        peer: who signed it, where the signature holds; who sent it is unknown.
        fingerprint: of the model that it is about, where the signature holds.
    """

    reason: Reason
    peer: PeerId | None = None
    fingerprint: str | None = None


_BY_FIELD: Final = {"size": Reason.OVERSIZED, "v": Reason.OTHER_VERSION, "signature": Reason.FORGED}


@dataclass(slots=True)
class _PeerState:
    """What is known of one peer's messages about one model.

    Attributes:
        nonce: of its connection.
        signed_at: Unix seconds of the last accepted status.
        heard_at: Unix seconds when the last message arrived.
        sequences: the last accepted `seq` of each kind.
        ended: whether its will was accepted.
        allowance: messages left in the token bucket.
    """

    nonce: str
    signed_at: float
    heard_at: float
    sequences: dict[MessageKind, int] = field(default_factory=dict)
    ended: bool = False
    allowance: float = BURST_MESSAGES

    def is_old(self, now: float) -> bool:
        """Whether nothing that it signed would be accepted again: too old, or of a clock that has been set back."""
        return not -FORGET_AFTER_S <= now - self.heard_at <= FORGET_AFTER_S


class TelemetryGuard:
    """Accepts or rejects telemetry messages; never raises, whatever the bytes."""

    def __init__(
        self,
        prefix: str = DEFAULT_PREFIX,
        max_peers: int = MAX_PEERS,
        is_listed: Callable[[str, PeerId], bool] = lambda *_: False,
    ) -> None:
        """A guard of the topics below a prefix.

        Args:
            max_peers: peers that it keeps at a time; a peer counts once per model.
            is_listed: whether the DHT lists a peer for a model's fingerprint. When the guard is full, a listed peer
                takes the place of an unlisted one; messages of that one's last minute could then be replayed.

        Raises:
            ConfigError: the prefix is malformed.
        """
        self._prefix = check_prefix(prefix)
        self._max_peers = max_peers
        self._is_listed = is_listed
        self._known: dict[tuple[PeerId, str], _PeerState] = {}
        self._models: dict[PeerId, int] = {}
        self._cleaned_at = 0.0
        self._rejected = dict.fromkeys(Reason, 0)
        self._accepted = dict.fromkeys(MessageKind, 0)

    @property
    def rejected(self) -> Mapping[Reason, int]:
        """How many messages were rejected, by reason."""
        return MappingProxyType(self._rejected)

    @property
    def accepted(self) -> Mapping[MessageKind, int]:
        """How many messages were accepted, by kind; a will counts as a status."""
        return MappingProxyType(self._accepted)

    def __len__(self) -> int:
        return len(self._known)

    def accept(self, topic: str, payload: bytes, retained: bool, now: float) -> AcceptedMessage | RejectedMessage:
        """Accept or reject a message.

        Args:
            retained: whether the broker had stored it, so that it may be old.
            now: Unix seconds.
        """
        try:
            signed = open_payload(self._prefix, topic, payload)
        except TelemetryError as error:
            return self._reject(_BY_FIELD.get(error.field, Reason.MALFORMED))
        match signed.body:
            case Status() as status:
                reason = self._status(signed, status, retained, now)
            case Will() as will:
                reason = self._will(signed, will)
            case (Metrics() | Event() | Receipts()) as transient:
                reason = self._transient(signed, transient, retained, now)
        if reason is not None:
            return self._reject(reason, signed)
        self._accepted[part_of(signed.body)] += 1
        return AcceptedMessage(signed.peer, signed.fingerprint, signed.body)

    def _reject(self, reason: Reason, signed: Signed | None = None) -> RejectedMessage:
        self._rejected[reason] += 1
        return RejectedMessage(reason) if signed is None else RejectedMessage(reason, signed.peer, signed.fingerprint)

    def _status(self, signed: Signed, status: Status, retained: bool, now: float) -> Reason | None:
        stamp, key = status.stamp, (signed.peer, signed.fingerprint)
        known = self._known.get(key)
        is_new = known is None or known.nonce != stamp.nonce
        reason = _stale(known, status, now) or _untimely(status, retained, now)
        if reason is None and known is None:
            reason = self._make_room(signed.peer, signed.fingerprint, now)
        if reason is not None:
            return reason
        if known is None:
            known = self._known[key] = _PeerState(stamp.nonce, stamp.at, now)
            self._models[signed.peer] = self._models.get(signed.peer, 0) + 1
        if not _spend(known, now):
            return Reason.FLOOD
        if is_new:
            known.nonce, known.sequences = stamp.nonce, {}
        known.signed_at, known.sequences[MessageKind.STATUS], known.ended = stamp.at, stamp.seq, False
        return None

    def _will(self, signed: Signed, will: Will) -> Reason | None:
        known = self._known.get((signed.peer, signed.fingerprint))
        if known is None or known.nonce != will.stamp.nonce:
            return Reason.FOREIGN_WILL
        if known.ended:
            return Reason.REPEATED
        known.ended = True
        return None

    def _transient(self, signed: Signed, body: Metrics | Event | Receipts, retained: bool, now: float) -> Reason | None:
        known = self._known.get((signed.peer, signed.fingerprint))
        reason = Reason.REPLAYED if retained else _stale(known, body, now)  # no node has brokers retain these
        reason = reason or _untimely(body, retained, now)
        if reason is not None:
            return reason
        if known is None or known.nonce != body.stamp.nonce:
            return Reason.UNBORN
        if not _spend(known, now):
            return Reason.FLOOD
        known.sequences[part_of(body)] = body.stamp.seq
        return None

    def _make_room(self, peer: PeerId, fingerprint: str, now: float) -> Reason | None:
        if len(self._known) >= self._max_peers and not 0 <= now - self._cleaned_at <= CLEANUP_INTERVAL_S:
            self._cleaned_at = now
            for key in [key for key, known in self._known.items() if known.is_old(now)]:
                self._drop(key)
        if self._models.get(peer, 0) >= MAX_MODELS_PER_PEER:
            return Reason.CROWDED
        if len(self._known) >= self._max_peers and self._is_listed(fingerprint, peer):
            unlisted = [
                (known.heard_at, key) for key, known in self._known.items() if not self._is_listed(key[1], key[0])
            ]
            if unlisted:
                self._drop(min(unlisted)[1])
        return Reason.CROWDED if len(self._known) >= self._max_peers else None

    def _drop(self, key: tuple[PeerId, str]) -> None:
        del self._known[key]
        self._models[key[0]] -= 1
        if self._models[key[0]] == 0:
            del self._models[key[0]]


def _stale(known: _PeerState | None, body: Status | Metrics | Event | Receipts, now: float) -> Reason | None:
    """Why a message is not newer than what was accepted; None where it is.

    A time further ahead than any message may have was accepted before this clock was set back: it forbids nothing.
    """
    if known is None:
        return None
    if known.nonce != body.stamp.nonce:
        return Reason.REPLAYED if body.stamp.at <= known.signed_at <= now + MAX_SKEW_S else None
    newest = known.sequences.get(part_of(body), -1)
    if body.stamp.seq == newest:
        return Reason.REPEATED
    return Reason.REPLAYED if body.stamp.seq < newest else None


def _untimely(body: Status | Metrics | Event | Receipts, retained: bool, now: float) -> Reason | None:
    """Why a message's time is too far from now; None where it is not."""
    age_s = now - body.stamp.at
    if isinstance(body, Status) and retained:
        if age_s > body.ttl_s:
            return Reason.EXPIRED
        return Reason.SKEWED if age_s < -MAX_SKEW_S else None
    return Reason.SKEWED if abs(age_s) > MAX_SKEW_S else None


def _spend(known: _PeerState, now: float) -> bool:
    """Take one message from the peer's token bucket; whether there was one."""
    passed_s = max(now - known.heard_at, 0.0)
    known.allowance = min(known.allowance + MESSAGES_PER_S * passed_s, BURST_MESSAGES)
    known.heard_at = now
    if known.allowance < 1.0:
        return False
    known.allowance -= 1.0
    return True
