"""Which telemetry may be believed: signed, in time, newer than what is known. Pure; time is a parameter.

Per peer and model the guard keeps one connection's nonce and how far each part came in it:
    a status with a greater `seq` of the same nonce, or of another nonce and signed later, goes on from there;
    metrics and events count in the nonce of the last believed status only, in rising order;
    a will counts for that nonce only, once, whatever its age.
So nothing that was said before can be said again by someone else, and a message that is refused changes nothing.
What is kept is bounded, in peers and for each of them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from swarm.ids import PeerId
from swarm.telemetry.fields import TelemetryError
from swarm.telemetry.messages import (
    DEFAULT_PREFIX,
    MAX_TTL_S,
    Body,
    Event,
    MessageKind,
    Metrics,
    Signed,
    Status,
    Will,
    check_prefix,
    open_payload,
    part_of,
)

MAX_PEERS: Final = 4_096
MAX_MODELS_PER_PEER: Final = 8
SKEW_S: Final = 60.0
"""How far a peer's clock may be off, the way of its message included."""
FORGOTTEN_S: Final = MAX_TTL_S + 2 * SKEW_S
"""Silence after which a peer may be forgotten: all that it ever signed is too old to be believed again."""
TIDY_S: Final = 1.0
BURST_MESSAGES: Final = 60.0
MESSAGES_PER_S: Final = 3.0
"""What one peer may say of one model; a node says less than one message a second."""


class Reason(enum.StrEnum):
    """Why a message is not believed."""

    MALFORMED = "malformed"
    OVERSIZED = "oversized"
    OTHER_VERSION = "other_version"
    FORGED = "forged"
    SKEWED = "skewed"
    EXPIRED = "expired"
    REPLAYED = "replayed"
    REPEATED = "repeated"
    """The very message that is believed already: brokers send it again. No sign of malice."""
    FOREIGN_WILL = "foreign_will"
    UNBORN = "unborn"
    """Metrics or an event of a connection whose birth was not seen."""
    FLOOD = "flood"
    CROWDED = "crowded"


@dataclass(frozen=True, slots=True)
class AcceptedMessage:
    """A message that counts."""

    peer: PeerId
    fingerprint: str
    body: Body


@dataclass(frozen=True, slots=True)
class RejectedMessage:
    """A message that does not. peer: who signed it, if the signature holds; who sent it nobody knows."""

    reason: Reason
    peer: PeerId | None = None
    fingerprint: str | None = None


_BY_FIELD: Final = {"size": Reason.OVERSIZED, "v": Reason.OTHER_VERSION, "signature": Reason.FORGED}


@dataclass(slots=True)
class _Known:
    """One peer's word about one model. signed_at: of the last believed status. ended: its will was believed."""

    nonce: str
    signed_at: float
    heard_at: float
    sequences: dict[MessageKind, int] = field(default_factory=dict)
    ended: bool = False
    allowance: float = BURST_MESSAGES


class TelemetryGuard:
    """Tells what is believed from what is not; never raises, whatever the bytes."""

    def __init__(
        self,
        prefix: str = DEFAULT_PREFIX,
        max_peers: int = MAX_PEERS,
        vouched: Callable[[str, PeerId], bool] = lambda *_: False,
    ) -> None:
        """A guard of the topics below `prefix`, which knows so many peers at most (a peer counts once per model).

        When there are so many, one that is `vouched` for (with a model's fingerprint: the DHT lists it) takes the place
        of one that is not; what that one said within the last minute could be said again, and nobody vouches for it.

        Raises:
            ConfigError: the prefix is none.
        """
        self._prefix = check_prefix(prefix)
        self._max_peers = max_peers
        self._vouched = vouched
        self._known: dict[tuple[PeerId, str], _Known] = {}
        self._models: dict[PeerId, int] = {}
        self._tidied_at = 0.0
        self._counts = dict.fromkeys(Reason, 0)
        self._believed = dict.fromkeys(MessageKind, 0)

    @property
    def counts(self) -> Mapping[Reason, int]:
        """How many messages were refused, by reason."""
        return MappingProxyType(self._counts)

    @property
    def believed(self) -> Mapping[MessageKind, int]:
        """How many messages were believed, by part; a will is of the status."""
        return MappingProxyType(self._believed)

    def __len__(self) -> int:
        return len(self._known)

    def accept(self, topic: str, payload: bytes, retained: bool, now: float) -> AcceptedMessage | RejectedMessage:
        """Judge a message. retained: the broker kept it, from whenever. now: Unix seconds."""
        try:
            signed = open_payload(self._prefix, topic, payload)
        except TelemetryError as error:
            return self._refuse(_BY_FIELD.get(error.field, Reason.MALFORMED))
        match signed.body:
            case Status() as status:
                reason = self._status(signed, status, retained, now)
            case Will() as will:
                reason = self._will(signed, will)
            case (Metrics() | Event()) as passing:
                reason = self._passing(signed, passing, retained, now)
        if reason is not None:
            return self._refuse(reason, signed)
        self._believed[part_of(signed.body)] += 1
        return AcceptedMessage(signed.peer, signed.fingerprint, signed.body)

    def _refuse(self, reason: Reason, signed: Signed | None = None) -> RejectedMessage:
        self._counts[reason] += 1
        return RejectedMessage(reason) if signed is None else RejectedMessage(reason, signed.peer, signed.fingerprint)

    def _status(self, signed: Signed, status: Status, retained: bool, now: float) -> Reason | None:
        stamp, key = status.stamp, (signed.peer, signed.fingerprint)
        known = self._known.get(key)
        is_new = known is None or known.nonce != stamp.nonce
        reason = _stale(known, status) or _untimely(status, retained, now)
        if reason is None and known is None:
            reason = self._make_room(signed.peer, signed.fingerprint, now)
        if reason is not None:
            return reason
        if known is None:
            known = self._known[key] = _Known(stamp.nonce, stamp.at, now)
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

    def _passing(self, signed: Signed, body: Metrics | Event, retained: bool, now: float) -> Reason | None:
        known = self._known.get((signed.peer, signed.fingerprint))
        reason = Reason.REPLAYED if retained else _stale(known, body)  # no node asks a broker to keep these
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
        if len(self._known) >= self._max_peers and now - self._tidied_at > TIDY_S:
            self._tidied_at = now
            for key in [key for key, known in self._known.items() if now - known.heard_at > FORGOTTEN_S]:
                self._drop(key)
        if self._models.get(peer, 0) >= MAX_MODELS_PER_PEER:
            return Reason.CROWDED
        if len(self._known) >= self._max_peers and self._vouched(fingerprint, peer):
            strangers = [
                (known.heard_at, key) for key, known in self._known.items() if not self._vouched(key[1], key[0])
            ]
            if strangers:
                self._drop(min(strangers)[1])
        return Reason.CROWDED if len(self._known) >= self._max_peers else None

    def _drop(self, key: tuple[PeerId, str]) -> None:
        del self._known[key]
        self._models[key[0]] -= 1
        if self._models[key[0]] == 0:
            del self._models[key[0]]


def _stale(known: _Known | None, body: Status | Metrics | Event) -> Reason | None:
    """Whether it is not newer than what is believed."""
    if known is None:
        return None
    if known.nonce != body.stamp.nonce:
        return Reason.REPLAYED if body.stamp.at <= known.signed_at else None
    newest = known.sequences.get(part_of(body), -1)
    if body.stamp.seq == newest:
        return Reason.REPEATED
    return Reason.REPLAYED if body.stamp.seq < newest else None


def _untimely(body: Status | Metrics | Event, retained: bool, now: float) -> Reason | None:
    age_s = now - body.stamp.at
    if isinstance(body, Status) and retained:
        if age_s > body.ttl_s:
            return Reason.EXPIRED
        return Reason.SKEWED if age_s < -SKEW_S else None
    return Reason.SKEWED if abs(age_s) > SKEW_S else None


def _spend(known: _Known, now: float) -> bool:
    """Whether the peer may say one thing more now."""
    passed_s = max(now - known.heard_at, 0.0)
    known.allowance = min(known.allowance + MESSAGES_PER_S * passed_s, BURST_MESSAGES)
    known.heard_at = max(now, known.heard_at)
    if known.allowance < 1.0:
        return False
    known.allowance -= 1.0
    return True
