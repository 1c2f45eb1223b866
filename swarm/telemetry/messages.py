"""What a node tells the world over MQTT: topics, bodies, signatures, bounds. Pure.

Reference: docs/reference/telemetry.md.

A payload is JSON: a body (itself JSON text), the node's public key, and a signature over domain, topic and body.
Whether a body may be believed is `swarm.telemetry.guard`'s question. Owns no broker and no clock.
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
from swarm.ids import PeerId
from swarm.layers import Span
from swarm.telemetry import fields as read
from swarm.telemetry.fields import TelemetryError

MAX_PAYLOAD_BYTES: Final = 8_192
MAX_TOPIC_CHARACTERS: Final = 512
MAX_EVENT_CHARACTERS: Final = 200
MAX_LAYERS: Final = 4_096
MAX_TTL_S: Final = 600.0
STATUS_TTL_S: Final = 180.0
"""How long a retained status may be believed: three times as long as a node waits until it sends the next."""
STATUS_S: Final = 60.0
METRICS_S: Final = 5.0
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
    """What a node says of itself; that it is offline only its will says."""

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
    """The model of which a node serves some layers; the fingerprint is hex."""

    name: str
    fingerprint: str
    num_layers: int


@dataclass(frozen=True, slots=True)
class Stamp:
    """Where a message stands: `nonce` is one connection's (hex), `seq` rises within it, `at` is Unix seconds."""

    nonce: str
    seq: int
    at: float


@dataclass(frozen=True, slots=True)
class Status:
    """What a node is: retained. is_birth: the first one of a connection. ttl_s: how long it may be believed.

    device: kind or product name, never a host's. name: None unless its owner chose one. started_at: Unix seconds.
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


@dataclass(frozen=True, slots=True)
class Will:
    """The broker says that the connection broke. Signed when it was opened: `at` is then, `seq` is 0."""

    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a node has done since it started, and how it is now.

    sweeps … errors: running totals; tokens: tree nodes that became committed; layer_tokens: tokens × layers served.
    busy: fraction of time since the last metrics. queue_ms, compute_ms: means per sweep since then. sweep_ms: (tree
    nodes, ms) as measured when the span was loaded.
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
    """Something happened; `text` is plain and holds no address."""

    stamp: Stamp
    event: EventKind
    text: str


Body = Status | Will | Metrics | Event


@dataclass(frozen=True, slots=True)
class Signed:
    """A message whose signature and bounds hold; whether it is new is another question."""

    peer: PeerId
    fingerprint: str
    body: Body


def check_prefix(prefix: str) -> str:
    """Return a prefix under which topics may stand.

    Raises:
        ConfigError: it is something else.
    """
    if _PREFIX.fullmatch(prefix) is None:
        raise ConfigError(f"--mqtt-prefix {prefix[:80]!r}: write letters, digits, . _ - and up to three /, as canopy")
    return prefix


def topic_of(prefix: str, fingerprint: str, peer: str, part: str) -> str:
    """Where a node publishes a part of what it says about a model."""
    return f"{prefix}/v{_VERSION}/{fingerprint}/{peer}/{part}"


def part_of(body: Body) -> MessageKind:
    """The part to which a body belongs."""
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
    """Check everything but whether the message is new.

    Raises:
        TelemetryError: the part at fault and why.
    """
    below, (fingerprint, peer, part) = _split(prefix, topic)
    _check_size(payload)
    envelope = read.an_object("payload", read.parse("payload", payload))
    if envelope.get("v") != _VERSION or type(envelope["v"]) is not int:
        raise TelemetryError("v", "another version of the format")
    text = envelope.get("body")
    if not isinstance(text, str) or not text.startswith("{"):
        raise TelemetryError("body", "must be the text of a JSON object")
    key, signature = read.base64_bytes(envelope, "key"), read.base64_bytes(envelope, "sig")
    if not verify(peer, key, _signed_bytes(below, text), signature):
        raise TelemetryError("signature", f"not made by {peer}")
    return Signed(peer, fingerprint, _decode(read.an_object("body", read.parse("body", text)), part, fingerprint))


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
    """A node is as strict with itself as others are with it."""
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
    """Fields that this version does not know are left out: a later one may add some."""
    stamp = Stamp(_nonce(raw), read.whole(raw, "seq"), read.real(raw, "at", _MAX_TIME_S))
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
    told = read.an_object("model", raw.get("model"))
    if told.get("fingerprint") != fingerprint:
        raise TelemetryError("model", "is another one than the topic's")
    model = ServedModel(read.text(told, "name", 96), fingerprint, read.whole(told, "num_layers", MAX_LAYERS))
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
        started_at=read.real(raw, "started_at", _MAX_TIME_S),
        kv_tokens_total=read.whole(raw, "kv_tokens_total"),
        ttl_s=read.real(raw, "ttl_s", MAX_TTL_S),
    )


def _metrics(raw: Mapping[str, Any], stamp: Stamp) -> Metrics:
    total = read.whole(raw, "kv_tokens_total")
    return Metrics(
        stamp=stamp,
        uptime_s=read.real(raw, "uptime_s", _MAX_TIME_S),
        sweeps=read.whole(raw, "sweeps"),
        tree_nodes=read.whole(raw, "tree_nodes"),
        tokens=read.whole(raw, "tokens"),
        layer_tokens=read.whole(raw, "layer_tokens"),
        bytes_in=read.whole(raw, "bytes_in"),
        bytes_out=read.whole(raw, "bytes_out"),
        errors=read.whole(raw, "errors"),
        busy=read.real(raw, "busy", 1.0),
        queue_ms=read.real(raw, "queue_ms", read.MAX_MS),
        compute_ms=read.real(raw, "compute_ms", read.MAX_MS),
        kv_tokens_free=read.whole(raw, "kv_tokens_free", total),
        kv_tokens_total=total,
        sessions=read.whole(raw, "sessions"),
        sweep_ms=read.pairs(raw, "sweep_ms"),
        device_memory_bytes=_known(raw, "device_memory_bytes", read.whole),
        device_temperature_c=_known(raw, "device_temperature_c", read.temperature),
    )


def _known(raw: Mapping[str, Any], field: str, reader: Callable[[Mapping[str, Any], str], T]) -> T | None:
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
