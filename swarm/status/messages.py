"""What a node publishes over MQTT: topics, bodies, signatures, bounds. Pure.

Reference: docs/reference/telemetry.md.

A payload is JSON: a body (itself JSON text), the node's public key, and a signature over domain, topic and body.
Whether a message is new, `swarm.status.guard` decides. Owns no broker and no clock.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from swarm.base.declared import RISING_PAIRS, Broken, JsonForm, Printable, Rule, Size, Within, Written
from swarm.base.errors import ConfigError, LayersError, RemoteProtocolError
from swarm.base.ids import PeerId, is_model_name
from swarm.base.layers import Span
from swarm.directory.identity import Identity
from swarm.directory.node_record import MAX_SPEEDS
from swarm.protocol.limits import (
    MAX_COUNT,
    MAX_LAYERS,
    MAX_RECEIPT_BYTES,
    MAX_SUCCESSION_BYTES,
    MAX_SWEEP_ROWS,
)
from swarm.protocol.peer_keys import is_peer_id, verify

MAX_PAYLOAD_BYTES: Final = 8_192
MAX_TOPIC_CHARACTERS: Final = 512
MAX_EVENT_CHARACTERS: Final = 200
MAX_PLACES: Final = 8
"""Positions that a `refuted` event names."""
MAX_OFF: Final = 1e9
"""Distances that are larger, or infinite, are told as this."""
MAX_TTL_S: Final = 600.0
STATUS_TTL_S: Final = 180.0
"""How long a retained status is valid: three times the interval between two of them."""
STATUS_S: Final = 60.0
"""Interval between two statuses of a node."""
METRICS_S: Final = 5.0
"""Interval between two metrics of a node."""
MAX_RECEIPTS: Final = 64
"""Receipts of one message."""
RECEIPTS_BYTES: Final = 4_600
"""What they take before they are written as text, so that `MAX_PAYLOAD_BYTES` holds them under any key."""
MAX_SUCCESSIONS: Final = 3
DEFAULT_PREFIX: Final = "canopy"
WholeCount = Annotated[int, Within(0, MAX_COUNT)]
TimeS = Annotated[float, Within(0.0, 1e11)]
TimeMs = Annotated[float, Within(0.0, 1e7)]
"""A wait or a computation: at most nearly three hours."""

_VERSION: Final = 1
_DOMAIN: Final = b"canopy-telemetry\n"
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,32}(/[A-Za-z0-9_.-]{1,32}){0,3}")
_FINGERPRINT = re.compile(r"[0-9a-f]{8,128}")
_NONCE = re.compile(r"[0-9a-f]{16,64}")


class TelemetryError(RemoteProtocolError):
    """A message that is rejected; `field` is topic, size, v, payload, signature, or a field of its body."""


class MessageKind(enum.StrEnum):
    """The last level of a topic."""

    STATUS = "status"
    METRICS = "metrics"
    EVENTS = "events"
    RECEIPTS = "receipts"


class Presence(enum.StrEnum):
    """A node's state, as it announces it; that it is offline, only its will announces."""

    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"
    LEFT = "left"


class EventKind(enum.StrEnum):
    JOINED = "joined"
    DRAINING = "draining"
    MOVED = "moved"
    RESTORED = "restored"
    ERROR = "error"
    DIFFERENCE = "difference"
    LEFT = "left"
    REFUTED = "refuted"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of which a node serves some layers.

    Attributes:
        name: the hub id, or a folder's name.
        fingerprint: hex digits.
        num_layers: layers of the whole model.
    """

    name: Annotated[str, Rule("a name of a model", is_model_name)]
    fingerprint: Annotated[str, Printable(128, 8, _FINGERPRINT)]
    num_layers: Annotated[int, Within(0, MAX_LAYERS)]


@dataclass(frozen=True, slots=True)
class Stamp:
    """Where a message stands among a node's messages.

    Attributes:
        nonce: of the connection, hex digits.
        seq: rises within the connection.
        at: Unix seconds when it was signed.
    """

    nonce: Annotated[str, Printable(64, 16, _NONCE)]
    seq: WholeCount
    at: TimeS


Stamped = Annotated[Stamp, Written(inline=True)]


@dataclass(frozen=True, slots=True)
class Status:
    """What a node is; brokers retain it.

    Attributes:
        stamp: its place among the node's messages.
        is_birth: whether it is the first one of a connection, which its kind says.
        model: what the node serves.
        span: which layers of it.
        state: whether it takes sessions.
        device: kind or product name, never a host's.
        numeric_class: what decides the last bits of its results.
        version: of the program.
        name: None unless the owner chose one.
        started_at: Unix seconds.
        kv_tokens_total: KV tokens for all sessions together.
        ttl_s: how long the status is valid.
        path: how its layers run, such as `plain`; None where it runs one way, or does not say.
    """

    stamp: Stamped
    is_birth: Annotated[bool, Written(not_sent=True)]
    model: ServedModel
    span: Annotated[Span, Written(as_list=True, as_one=True)]
    state: Presence
    device: Annotated[str, Printable(96)]
    numeric_class: Annotated[str, Printable(96)]
    version: Annotated[str, Printable(32)]
    name: Annotated[str, Printable(64)] | None
    started_at: TimeS
    kv_tokens_total: WholeCount
    ttl_s: Annotated[float, Within(0.0, MAX_TTL_S)] = STATUS_TTL_S
    path: Annotated[str, Printable(32)] | None = None

    def check(self) -> None:
        """Refuse layers that the model has not.

        Raises:
            Broken: with the field.
        """
        try:
            self.span.within(self.model.num_layers)
        except LayersError:
            raise Broken("span", f"no span of {self.model.num_layers} layers") from None


@dataclass(frozen=True, slots=True)
class Will:
    """The connection broke: the broker publishes it, the node signed it when it connected, with `seq` 0."""

    stamp: Stamped

    def check(self) -> None:
        """Refuse another `seq`.

        Raises:
            Broken: with the field.
        """
        if self.stamp.seq != 0:
            raise Broken("seq", "a will has 0")


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a node has done since it started, and how it is now.

    Attributes:
        stamp: its place among the node's messages.
        uptime_s: seconds since the start.
        sweeps: sweeps finished, in all.
        tree_nodes: tree nodes received, in all.
        tokens: tree nodes that became committed, in all.
        layer_tokens: `tokens` × layers served, in all.
        bytes_in: received on links, in all.
        bytes_out: sent on links, in all.
        errors: in sessions, in all.
        busy: fraction of the time since the last metrics in which it computed.
        queue_ms: mean wait of a sweep since then.
        compute_ms: mean compute of a sweep since then.
        kv_tokens_free: KV tokens that no session has reserved.
        kv_tokens_total: KV tokens for all sessions together.
        sessions: open now.
        sweep_ms: (tree nodes, ms per sweep), measured when the span was loaded.
        device_memory_bytes: in use on the device; None where it is unknown.
        device_temperature_c: None where it is unknown.
        preferred_sessions: sessions whose owners its operator prefers; None from older nodes.
        contributor_sessions: sessions of proven contributors (0097); None from older nodes.
    """

    stamp: Stamped
    uptime_s: TimeS
    sweeps: WholeCount
    tree_nodes: WholeCount
    tokens: WholeCount
    layer_tokens: WholeCount
    bytes_in: WholeCount
    bytes_out: WholeCount
    errors: WholeCount
    busy: Annotated[float, Within(0.0, 1.0)]
    queue_ms: TimeMs
    compute_ms: TimeMs
    kv_tokens_free: WholeCount
    kv_tokens_total: WholeCount
    sessions: WholeCount
    sweep_ms: Annotated[
        tuple[tuple[Annotated[int, Within(1, MAX_SWEEP_ROWS)], TimeMs], ...], Size(MAX_SPEEDS), RISING_PAIRS
    ]
    device_memory_bytes: WholeCount | None = None
    device_temperature_c: Annotated[float, Within(-273.15, 1_000.0)] | None = None
    preferred_sessions: WholeCount | None = None
    contributor_sessions: WholeCount | None = None

    def check(self) -> None:
        """Refuse more room than there is.

        Raises:
            Broken: with the field.
        """
        if self.kv_tokens_free > self.kv_tokens_total:
            raise Broken("kv_tokens_free", f"{self.kv_tokens_free} of {self.kv_tokens_total}")


@dataclass(frozen=True, slots=True)
class RefutedPart:
    """What another machine signed of its layers, and this node's own computation of them contradicts.

    Attributes:
        peer: the machine.
        span: its layers.
        numeric_class: in which it says to compute.
        what: `rows` or `picks`.
        places: their positions in the text, the first ones.
        off: how far they are off, of a row or in logits.
        bound: how far is honest.
        evidence: SHA-256 of the file that shows it, hex digits.
    """

    peer: Annotated[PeerId, Rule("a peer id", is_peer_id)]
    span: Annotated[Span, Written(as_list=True, as_one=True)]
    numeric_class: Annotated[str, Printable(96)]
    what: Annotated[str, Printable(16)]
    places: Annotated[tuple[WholeCount, ...], Size(MAX_PLACES)]
    off: Annotated[float, Within(0.0, MAX_OFF)]
    bound: Annotated[float, Within(0.0, MAX_OFF)]
    evidence: Annotated[str, Printable(64, 64, _NONCE)]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a node.

    Attributes:
        stamp: its place among the node's messages.
        event: what happened.
        text: plain text without addresses.
        refuted: what a `refuted` event is about; None in all others.
    """

    stamp: Stamped
    event: EventKind
    text: Annotated[str, Printable(MAX_EVENT_CHARACTERS)]
    refuted: RefutedPart | None = None

    def check(self) -> None:
        """Refuse a refutation beside another event.

        Raises:
            Broken: with the field.
        """
        if self.refuted is not None and self.event is not EventKind.REFUTED:
            raise Broken("refuted", f"does not belong to {self.event.value}")


@dataclass(frozen=True, slots=True)
class Receipts:
    """What clients signed for at a node (S7), since its last such message.

    Attributes:
        stamp: its place among the node's messages.
        receipts: as the clients sealed them (`swarm.trust.receipt`).
        successions: of keys that this node had before (`swarm.protocol.succession`).
    """

    stamp: Stamped
    receipts: Annotated[tuple[Annotated[bytes, Size(MAX_RECEIPT_BYTES, 1)], ...], Size(MAX_RECEIPTS)] = ()
    successions: Annotated[tuple[Annotated[bytes, Size(MAX_SUCCESSION_BYTES, 1)], ...], Size(MAX_SUCCESSIONS)] = ()


Body = Status | Will | Metrics | Event | Receipts
KINDS: Final[Mapping[str, tuple[MessageKind, type[Body]]]] = {
    "birth": (MessageKind.STATUS, Status),
    "status": (MessageKind.STATUS, Status),
    "will": (MessageKind.STATUS, Will),
    "metrics": (MessageKind.METRICS, Metrics),
    "event": (MessageKind.EVENTS, Event),
    "receipts": (MessageKind.RECEIPTS, Receipts),
}
"""Each kind of message: the last level of its topic, and its declaration."""
_FORMS: Final = {body: JsonForm(body, TelemetryError, "body") for _, body in KINDS.values()}


_OBJECT: Final = Rule("the text of a JSON object", lambda text: text.startswith("{"))


@dataclass(frozen=True, slots=True)
class _Envelope:
    """A payload: the text of a JSON object, the node's public key, and its signature over domain, topic and text."""

    v: Annotated[int, Within(_VERSION, _VERSION)]
    body: Annotated[str, _OBJECT]
    key: bytes
    sig: bytes


_ENVELOPES: Final = JsonForm(_Envelope, TelemetryError, "payload")


@dataclass(frozen=True, slots=True)
class Signed:
    """A message whose signature and bounds hold; it may be a replay.

    Attributes:
        peer: who signed it.
        fingerprint: of the model in its topic.
        body: its contents.
    """

    peer: PeerId
    fingerprint: str
    body: Body


def check_prefix(prefix: str) -> str:
    """Return the prefix of topics, if it is well formed.

    Raises:
        ConfigError: it is not.
    """
    if _PREFIX.fullmatch(prefix) is None:
        raise ConfigError(f"--mqtt-prefix {prefix[:80]!r}: write letters, digits, . _ - and up to three /, as canopy")
    return prefix


def topic_of(prefix: str, fingerprint: str, peer: str, part: str) -> str:
    """The topic of a node's messages about a model; `part` is a `MessageKind`."""
    return f"{prefix}/v{_VERSION}/{fingerprint}/{peer}/{part}"


def part_of(body: Body) -> MessageKind:
    """The last level of a body's topic."""
    return KINDS[_kind(body)][0]


def _kind(body: Body) -> str:
    if isinstance(body, Status):
        return "birth" if body.is_birth else "status"
    return type(body).__name__.lower()


def seal_body(body: Body, topic: str, identity: Identity) -> bytes:
    """Encode and sign a body for the topic on which it will be published.

    Raises:
        TelemetryError: the body breaks its own bounds, or the topic is not this identity's.
    """
    below = topic.split("/")[-4:]
    _, (fingerprint, peer, part) = _split("own", "/".join(["own", *below]))
    if peer != identity.peer_id or part is not part_of(body):
        raise TelemetryError("topic", "is not this node's for such a message")
    written = {"kind": _kind(body), **_FORMS[type(body)].encode(body)}
    _decode(written, part, fingerprint)  # as receivers will
    text = json.dumps(written, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    signature = identity.sign(_signed_bytes("/".join(below), text))
    envelope = _ENVELOPES.encode(_Envelope(_VERSION, text, identity.public_key, signature))
    payload = json.dumps(envelope, separators=(",", ":"), ensure_ascii=False).encode()
    _check_size(payload)
    return payload


def open_payload(prefix: str, topic: str, payload: bytes) -> Signed:
    """Decode a message and check everything but whether it is new.

    Raises:
        TelemetryError: the field at fault and why.
    """
    below, (fingerprint, peer, part) = _split(prefix, topic)
    _check_size(payload)
    envelope = _ENVELOPES.decode(_parse("payload", payload))
    if not verify(peer, envelope.key, _signed_bytes(below, envelope.body), envelope.sig):
        raise TelemetryError("signature", f"not made by {peer}")
    return Signed(peer, fingerprint, _decode(_parse("body", envelope.body), part, fingerprint))


def _parse(field: str, data: bytes | str) -> dict[str, Any]:
    """A JSON object; numbers that JSON does not have are refused."""
    try:
        text = data.decode() if isinstance(data, bytes) else data
        found = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise TelemetryError(field, "is not JSON") from error
    if not isinstance(found, dict):
        raise TelemetryError(field, "must be a JSON object")
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _signed_bytes(below: str, text: str) -> bytes:
    try:
        return _DOMAIN + f"{below}\n{text}".encode()
    except UnicodeEncodeError as error:
        raise TelemetryError("body", "is not Unicode text") from error


def _split(prefix: str, topic: str) -> tuple[str, tuple[str, PeerId, MessageKind]]:
    below = topic.removeprefix(f"{prefix}/")
    levels = below.split("/")
    if len(topic) > MAX_TOPIC_CHARACTERS or below == topic or len(levels) != 4:
        raise TelemetryError("topic", "is not one of a node's")
    version, fingerprint, peer, part = levels
    if version != f"v{_VERSION}" or _FINGERPRINT.fullmatch(fingerprint) is None or part not in set(MessageKind):
        raise TelemetryError("topic", "is not one of a node's")
    if not is_peer_id(peer):
        raise TelemetryError("topic", "does not name a peer")
    return below, (fingerprint, PeerId(peer), MessageKind(part))


def _check_size(payload: bytes) -> None:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise TelemetryError("size", f"{len(payload)} bytes; a message has at most {MAX_PAYLOAD_BYTES}")


def _decode(raw: dict[str, Any], part: MessageKind, fingerprint: str) -> Body:
    """The checked body; unknown fields are ignored, because a later version may add some."""
    kind = raw.get("kind")
    belongs, declared = KINDS.get(kind, (None, None)) if isinstance(kind, str) else (None, None)
    if declared is None or belongs is not part:
        raise TelemetryError("kind", f"is not one of …/{part}")
    body = _FORMS[declared].decode(raw, is_birth=kind == "birth")
    if isinstance(body, Status) and body.model.fingerprint != fingerprint:
        raise TelemetryError("model", "is another one than the topic's")
    return body
