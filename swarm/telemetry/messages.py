"""What a node publishes over MQTT: topics, bodies, signatures, bounds. Pure.

Reference: docs/reference/telemetry.md.

A payload is JSON: a body (itself JSON text), the node's public key, and a signature over domain, topic and body.
Whether a message is new, `swarm.telemetry.guard` decides. Owns no broker and no clock.
"""

from __future__ import annotations

import base64
import enum
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

from swarm.discovery.identity import Identity, is_peer_id, verify
from swarm.errors import ConfigError, LayersError
from swarm.ids import MAX_MODEL_NAME, PeerId, is_model_name
from swarm.layers import Span
from swarm.protocol.limits import MAX_LAYERS
from swarm.telemetry import fields as read
from swarm.telemetry.fields import TelemetryError

MAX_PAYLOAD_BYTES: Final = 8_192
MAX_TOPIC_CHARACTERS: Final = 512
MAX_EVENT_CHARACTERS: Final = 200
MAX_TTL_S: Final = 600.0
STATUS_TTL_S: Final = 180.0
"""How long a retained status is valid: three times the interval between two of them."""
STATUS_S: Final = 60.0
"""Interval between two statuses of a node."""
METRICS_S: Final = 5.0
"""Interval between two metrics of a node."""
DEFAULT_PREFIX: Final = "canopy"

T = TypeVar("T")

_VERSION: Final = 1
_DOMAIN: Final = b"canopy-telemetry\n"
_MAX_TIME_S: Final = 1e11
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,32}(/[A-Za-z0-9_.-]{1,32}){0,3}")
_FINGERPRINT = re.compile(r"[0-9a-f]{8,128}")
_NONCE = re.compile(r"[0-9a-f]{16,64}")


class MessageKind(enum.StrEnum):
    """The last level of a topic."""

    STATUS = "status"
    METRICS = "metrics"
    EVENTS = "events"


class Presence(enum.StrEnum):
    """A node's state, as it announces it; that it is offline, only its will announces."""

    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"
    LEFT = "left"


class EventKind(enum.StrEnum):
    """What happened to a node."""

    JOINED = "joined"
    DRAINING = "draining"
    MOVED = "moved"
    RESTORED = "restored"
    ERROR = "error"
    DIFFERENCE = "difference"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of which a node serves some layers.

    Attributes:
        name: the hub id, or a folder's name; at most 96 characters.
        fingerprint: 8 to 128 hex digits.
        num_layers: layers of the whole model.
    """

    name: str
    fingerprint: str
    num_layers: int


@dataclass(frozen=True, slots=True)
class Stamp:
    """Where a message stands among a node's messages.

    Attributes:
        nonce: of the connection, 16 to 64 hex digits.
        seq: rises within the connection.
        at: Unix seconds when it was signed.
    """

    nonce: str
    seq: int
    at: float


@dataclass(frozen=True, slots=True)
class Status:
    """What a node is; brokers retain it.

    Attributes:
        stamp: its place among the node's messages.
        is_birth: whether it is the first one of a connection.
        model: what the node serves.
        span: which layers of it.
        state: whether it takes sessions.
        device: kind or product name, never a host's; at most 96 characters.
        numeric_class: what decides the last bits of its results; at most 96 characters.
        version: of the program; at most 32 characters.
        name: at most 64 characters; None unless the owner chose one.
        started_at: Unix seconds.
        kv_tokens_total: KV tokens for all sessions together.
        ttl_s: how long the status is valid, at most `MAX_TTL_S`.
        path: how its layers run, such as `plain`; at most 32 characters; None where it runs one way, or does not say.
    """

    stamp: Stamp
    is_birth: bool
    model: ServedModel
    span: Span
    state: Presence
    device: str
    numeric_class: str
    version: str
    name: str | None
    started_at: float
    kv_tokens_total: int
    ttl_s: float = STATUS_TTL_S
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Will:
    """The connection broke: the broker publishes it, the node signed it when it connected, with `seq` 0."""

    stamp: Stamp


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
        sweep_ms: at most 8 pairs (tree nodes, ms per sweep), measured when the span was loaded.
        device_memory_bytes: in use on the device; None where it is unknown.
        device_temperature_c: None where it is unknown.
    """

    stamp: Stamp
    uptime_s: float
    sweeps: int
    tree_nodes: int
    tokens: int
    layer_tokens: int
    bytes_in: int
    bytes_out: int
    errors: int
    busy: float
    queue_ms: float
    compute_ms: float
    kv_tokens_free: int
    kv_tokens_total: int
    sessions: int
    sweep_ms: tuple[tuple[int, float], ...]
    device_memory_bytes: int | None = None
    device_temperature_c: float | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a node.

    Attributes:
        stamp: its place among the node's messages.
        event: what happened.
        text: plain text without addresses, at most `MAX_EVENT_CHARACTERS`.
    """

    stamp: Stamp
    event: EventKind
    text: str


Body = Status | Will | Metrics | Event


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
    match body:
        case Status() | Will():
            return MessageKind.STATUS
        case Metrics():
            return MessageKind.METRICS
        case Event():
            return MessageKind.EVENTS


def seal_body(body: Body, topic: str, identity: Identity) -> bytes:
    """Encode and sign a body for the topic on which it will be published.

    Raises:
        TelemetryError: the body breaks its own bounds, or the topic is not this identity's.
    """
    below = topic.split("/")[-4:]
    _check_own(body, below, identity)
    text = json.dumps(_encode(body), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    signature = identity.sign(_signed_bytes("/".join(below), text))
    envelope = {
        "v": _VERSION,
        "body": text,
        "key": base64.b64encode(identity.public_key).decode(),
        "sig": base64.b64encode(signature).decode(),
    }
    payload = json.dumps(envelope, separators=(",", ":"), ensure_ascii=False).encode()
    _check_size(payload)
    return payload


def open_payload(prefix: str, topic: str, payload: bytes) -> Signed:
    """Decode a message and check everything but whether it is new.

    Args:
        prefix: of the topics.
        topic: where it was published.
        payload: what was published.

    Raises:
        TelemetryError: the field at fault and why.
    """
    below, (fingerprint, peer, part) = _split(prefix, topic)
    _check_size(payload)
    envelope = read.json_object("payload", read.parse("payload", payload))
    if envelope.get("v") != _VERSION or type(envelope["v"]) is not int:
        raise TelemetryError("v", "another version of the format")
    text = envelope.get("body")
    if not isinstance(text, str) or not text.startswith("{"):
        raise TelemetryError("body", "must be the text of a JSON object")
    key, signature = read.base64_bytes(envelope, "key"), read.base64_bytes(envelope, "sig")
    if not verify(peer, key, _signed_bytes(below, text), signature):
        raise TelemetryError("signature", f"not made by {peer}")
    return Signed(peer, fingerprint, _decode(read.json_object("body", read.parse("body", text)), part, fingerprint))


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


def _check_own(body: Body, below: list[str], identity: Identity) -> None:
    """Check a message of this node as receivers will."""
    _, (fingerprint, peer, part) = _split("own", "/".join(["own", *below]))
    if peer != identity.peer_id or part is not part_of(body):
        raise TelemetryError("topic", "is not this node's for such a message")
    _decode(_encode(body), part, fingerprint)


def _encode(body: Body) -> dict[str, Any]:
    stamp = {"nonce": body.stamp.nonce, "seq": body.stamp.seq, "at": body.stamp.at}
    values = {field.name: getattr(body, field.name) for field in fields(body) if field.name != "stamp"}
    match body:
        case Status():
            model, span = body.model, body.span
            values["model"] = {"name": model.name, "fingerprint": model.fingerprint, "num_layers": model.num_layers}
            values["span"] = [span.start, span.end]
            kind = "birth" if values.pop("is_birth") else "status"
        case Metrics():
            values["sweep_ms"] = [list(pair) for pair in body.sweep_ms]
            kind = "metrics"
        case Event():
            kind = "event"
        case Will():
            kind = "will"
    return {"kind": kind, **stamp, **values}


def _decode(raw: Mapping[str, Any], part: MessageKind, fingerprint: str) -> Body:
    """The checked body; unknown fields are ignored, because a later version may add some."""
    stamp = Stamp(_nonce(raw), read.integer(raw, "seq"), read.number(raw, "at", _MAX_TIME_S))
    match part, raw.get("kind"):
        case MessageKind.STATUS, ("birth" | "status") as kind:
            return _status(raw, stamp, kind == "birth", fingerprint)
        case MessageKind.STATUS, "will":
            if stamp.seq != 0:
                raise TelemetryError("seq", "a will has 0")
            return Will(stamp)
        case MessageKind.METRICS, "metrics":
            return _metrics(raw, stamp)
        case MessageKind.EVENTS, "event":
            event = EventKind(read.choice(raw, "event", EventKind))
            return Event(stamp, event, read.text(raw, "text", MAX_EVENT_CHARACTERS))
        case _:
            raise TelemetryError("kind", f"is not one of …/{part}")


def _status(raw: Mapping[str, Any], stamp: Stamp, is_birth: bool, fingerprint: str) -> Status:
    raw_model = read.json_object("model", raw.get("model"))
    if raw_model.get("fingerprint") != fingerprint:
        raise TelemetryError("model", "is another one than the topic's")
    num_layers = read.integer(raw_model, "num_layers", MAX_LAYERS)
    name = read.text(raw_model, "name", MAX_MODEL_NAME)
    if not is_model_name(name):
        raise TelemetryError("name", "is no name of a model")
    model = ServedModel(name, fingerprint, num_layers)
    return Status(
        stamp=stamp,
        is_birth=is_birth,
        model=model,
        span=_span(raw.get("span"), model.num_layers),
        state=Presence(read.choice(raw, "state", Presence)),
        device=read.text(raw, "device", 96),
        numeric_class=read.text(raw, "numeric_class", 96),
        version=read.text(raw, "version", 32),
        name=None if raw.get("name") is None else read.text(raw, "name", 64),
        started_at=read.number(raw, "started_at", _MAX_TIME_S),
        kv_tokens_total=read.integer(raw, "kv_tokens_total"),
        ttl_s=read.number(raw, "ttl_s", MAX_TTL_S),
        path=None if raw.get("path") is None else read.text(raw, "path", 32),
    )


def _metrics(raw: Mapping[str, Any], stamp: Stamp) -> Metrics:
    total = read.integer(raw, "kv_tokens_total")
    return Metrics(
        stamp=stamp,
        uptime_s=read.number(raw, "uptime_s", _MAX_TIME_S),
        sweeps=read.integer(raw, "sweeps"),
        tree_nodes=read.integer(raw, "tree_nodes"),
        tokens=read.integer(raw, "tokens"),
        layer_tokens=read.integer(raw, "layer_tokens"),
        bytes_in=read.integer(raw, "bytes_in"),
        bytes_out=read.integer(raw, "bytes_out"),
        errors=read.integer(raw, "errors"),
        busy=read.number(raw, "busy", 1.0),
        queue_ms=read.number(raw, "queue_ms", read.MAX_MS),
        compute_ms=read.number(raw, "compute_ms", read.MAX_MS),
        kv_tokens_free=read.integer(raw, "kv_tokens_free", total),
        kv_tokens_total=total,
        sessions=read.integer(raw, "sessions"),
        sweep_ms=read.pairs(raw, "sweep_ms"),
        device_memory_bytes=_optional(raw, "device_memory_bytes", read.integer),
        device_temperature_c=_optional(raw, "device_temperature_c", read.temperature),
    )


def _optional(raw: Mapping[str, Any], field: str, reader: Callable[[Mapping[str, Any], str], T]) -> T | None:
    return None if raw.get(field) is None else reader(raw, field)


def _nonce(raw: Mapping[str, Any]) -> str:
    value = raw.get("nonce")
    if not isinstance(value, str) or _NONCE.fullmatch(value) is None:
        raise TelemetryError("nonce", "must be 16 to 64 hex digits")
    return value


def _span(value: object, num_layers: int) -> Span:
    if not isinstance(value, list) or [type(end) for end in value] != [int, int]:
        raise TelemetryError("span", "must be two whole numbers")
    try:
        return Span(*value).within(num_layers)
    except LayersError as error:
        raise TelemetryError("span", f"no span of {num_layers} layers") from error
