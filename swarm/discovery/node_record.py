"""What a node says about itself, signed by its identity: encoding, bounds, checks. Pure; time is a parameter.

A sealed record is msgpack of {public key, body, signature}; the body is msgpack of the record's fields.
Every DHT peer runs `open_sealed` on what it stores, every reader runs `unseal`.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgpack

from swarm.discovery.identity import Identity, is_peer_id, verify
from swarm.errors import LayersError, RemoteProtocolError
from swarm.ids import ModelIdentity, PeerId
from swarm.layers import Span
from swarm.protocol.limits import MAX_RECORD_BYTES

MAX_TTL_S: Final = 300.0
MAX_LAYERS: Final = 4_096
MAX_DELAYS: Final = 16
MAX_ROW_BYTES: Final = 2**20
CLOCK_SLACK_S: Final = 5.0  # the DHT tolerates clocks that differ by 3 s
MAX_NAME_CHARACTERS: Final = 64
_MAX_NUMBER: Final = 2**62
_DOMAIN: Final = b"canopy-record"


class RecordError(RemoteProtocolError):
    """A record that is not believed; `field` names the part at fault."""


class NodeState(enum.Enum):
    """Whether a node takes sessions: only `SERVING` ones do."""

    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node's announcement.

    address: `host:port` of its gRPC service. sweep_ms: (tree nodes, measured ms per sweep) pairs, a hint only.
    expires_at: DHT time (Unix seconds). sequence: grows with every announcement of one run.
    delays_ms: one-way delays, measured, to nodes that may follow it in a chain. busy: the fraction of time for which it
    computes. uplink_mbit_per_s: None while not measured. row_bytes: of a hidden row, lossless; None if it does not say.
    movable: it goes where the swarm needs it, and would now. sealed: what its node signed, where it was read.
    """

    peer: PeerId
    model: ModelIdentity
    span: Span
    address: str
    state: NodeState
    numeric_class: str
    version: str
    name: str | None
    sweep_ms: tuple[tuple[int, float], ...]
    kv_tokens_free: int
    kv_tokens_total: int
    sequence: int
    expires_at: float
    delays_ms: tuple[tuple[PeerId, float], ...] = ()
    busy: float = 0.0
    uplink_mbit_per_s: float | None = None
    row_bytes: int | None = None
    movable: bool = False
    sealed: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Sealed:
    """A record whose signature and bounds hold; `left` marks the last word of a node that is gone."""

    record: NodeRecord
    left: bool


def seal(record: NodeRecord, identity: Identity, *, left: bool = False) -> bytes:
    """Encode and sign a record.

    Raises:
        RecordError: the record breaks its own bounds, or names another peer.
    """
    if record.peer != identity.peer_id:
        raise RecordError("peer", "a record is signed by the peer that it names")
    body = msgpack.packb(_encode(record, left))
    sealed: bytes = msgpack.packb([identity.public_key, body, identity.sign(_DOMAIN + body)])
    open_sealed(sealed, record.expires_at)
    return sealed


def unseal(data: bytes, now: float) -> NodeRecord:
    """Decode and check a record of a node that is still there.

    Raises:
        RecordError: with `field` among data, signature, peer, model, span, address, expires_at, …
    """
    sealed = open_sealed(data, now)
    if sealed.record.expires_at <= now:
        raise RecordError("expires_at", f"expired {now - sealed.record.expires_at:.1f} s ago")
    if sealed.left:
        raise RecordError("state", "the node has left")
    return sealed.record


def open_sealed(data: bytes, now: float) -> Sealed:
    """Check everything but whether the record is over: what a DHT peer asks before it stores one.

    Raises:
        RecordError: the field at fault and why.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError("data", f"{len(data)} bytes; a record has at most {MAX_RECORD_BYTES}")
    public_key, body, signature = _unpack_list(data, 3)
    if not (isinstance(public_key, bytes) and isinstance(body, bytes) and isinstance(signature, bytes)):
        raise RecordError("data", "not a sealed record")
    sealed = _decode(_unpack_list(body, len(_FIELDS)), data)
    if not verify(sealed.record.peer, public_key, _DOMAIN + body, signature):
        raise RecordError("signature", f"not made by {sealed.record.peer}")
    if sealed.record.expires_at > now + MAX_TTL_S + CLOCK_SLACK_S:
        raise RecordError("expires_at", f"more than {MAX_TTL_S:.0f} s ahead")
    return sealed


def open_filed(data: bytes, peer: object, expires_at: float, now: float) -> Sealed:
    """Check a record as the DHT files it: only under its signer's own name, for exactly the signed time.

    Raises:
        RecordError: as `open_sealed`, or the record is filed under another peer or expiry.
    """
    sealed = open_sealed(data, now)
    if sealed.record.peer != peer:
        raise RecordError("peer", f"{sealed.record.peer} cannot speak for {peer!r}")
    if sealed.record.expires_at != expires_at:
        raise RecordError("expires_at", "not the signed one")
    return sealed


def live_records(blobs: Iterable[bytes], now: float) -> list[NodeRecord]:
    """The nodes that are there: the newest valid record per peer, ordered by layers; what does not hold is skipped.

    The record that expires last is the newest, as in the DHT itself, then the one with the higher sequence.
    """
    newest: dict[PeerId, Sealed] = {}
    for blob in blobs:
        try:
            sealed = open_sealed(blob, now)
        except RecordError:
            continue
        known = newest.get(sealed.record.peer)
        if known is None or _age(sealed) > _age(known):
            newest[sealed.record.peer] = sealed
    live = [sealed.record for sealed in newest.values() if not sealed.left and sealed.record.expires_at > now]
    return sorted(live, key=lambda record: (record.span, record.peer))


def tombstone(record: NodeRecord) -> NodeRecord:
    """What replaces `record` when its node leaves: a moment newer, to be sealed with `left`."""
    return replace(record, sequence=record.sequence + 1, expires_at=record.expires_at + 0.001)


def bracketed(host: str) -> str:
    """A host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def split_address(address: str) -> tuple[str, int]:
    """Take `host:port` (IPv6 in brackets) apart.

    Raises:
        RecordError: it is something else.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65_536:
        raise RecordError("address", f"{address[:80]!r} is not host:port")
    return match["host"], int(match["port"])


def _age(sealed: Sealed) -> tuple[float, int]:
    return sealed.record.expires_at, sealed.record.sequence


_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})")
_HEX = re.compile(r"[0-9a-f]{8,128}")
_FIELDS = (
    "version_of_format", "left", "peer", "model", "span", "address", "state", "numeric_class", "version", "name",
    "sweep_ms", "kv_tokens_free", "kv_tokens_total", "sequence", "expires_at",
    "delays_ms", "busy", "uplink_mbit_per_s", "row_bytes",
    "movable",
)  # fmt: skip
_FORMAT: Final = 1
_DELAY_MS: Final = (0.0, 60_000.0)
_MBIT_PER_S: Final = (0.001, 1e6)


def _encode(record: NodeRecord, left: bool) -> list[Any]:
    model = record.model
    return [
        _FORMAT,
        left,
        record.peer,
        [
            model.name,
            model.fingerprint,
            model.config_digest,
            model.weights_digest,
            model.tokenizer_digest,
            model.num_layers,
        ],
        [record.span.start, record.span.end],
        record.address,
        record.state.value,
        record.numeric_class,
        record.version,
        record.name,
        [list(pair) for pair in record.sweep_ms],
        record.kv_tokens_free,
        record.kv_tokens_total,
        record.sequence,
        float(record.expires_at),
        [list(pair) for pair in record.delays_ms],
        record.busy,
        record.uplink_mbit_per_s,
        record.row_bytes,
        record.movable,
    ]


def _decode(values: list[Any], data: bytes) -> Sealed:
    raw = dict(zip(_FIELDS, values, strict=True))
    if raw["version_of_format"] != _FORMAT or type(raw["left"]) is not bool:
        raise RecordError("data", "a record of another format")
    address = _text("address", raw["address"], 280)
    split_address(address)
    model = _model(raw["model"])
    total = _whole("kv_tokens_total", raw["kv_tokens_total"])
    record = NodeRecord(
        peer=_peer(raw["peer"]),
        model=model,
        span=_span(raw["span"], model.num_layers),
        address=address,
        state=_state(raw["state"]),
        numeric_class=_text("numeric_class", raw["numeric_class"], 96),
        version=_text("version", raw["version"], 32),
        name=None if raw["name"] is None else _text("name", raw["name"], MAX_NAME_CHARACTERS),
        sweep_ms=_sweep_ms(raw["sweep_ms"]),
        kv_tokens_free=_whole("kv_tokens_free", raw["kv_tokens_free"], total),
        kv_tokens_total=total,
        sequence=_whole("sequence", raw["sequence"]),
        expires_at=_real("expires_at", raw["expires_at"]),
        delays_ms=_delays_ms(raw["delays_ms"]),
        busy=_within("busy", raw["busy"], (0.0, 1.0)),
        uplink_mbit_per_s=_uplink(raw["uplink_mbit_per_s"]),
        row_bytes=None if raw["row_bytes"] is None else _whole("row_bytes", raw["row_bytes"], MAX_ROW_BYTES),
        movable=_flag("movable", raw["movable"]),
        sealed=data,
    )
    return Sealed(record, raw["left"])


def _unpack_list(data: bytes, length: int) -> list[Any]:
    try:
        values = msgpack.unpackb(data)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise RecordError("data", "malformed") from error
    if not isinstance(values, list) or len(values) != length:
        raise RecordError("data", "malformed")
    return values


def _text(field: str, value: object, limit: int) -> str:
    if not isinstance(value, str) or len(value) > limit or not value.isprintable():
        raise RecordError(field, f"must be printable text of at most {limit} characters")
    return value


def _whole(field: str, value: object, limit: int = _MAX_NUMBER) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise RecordError(field, f"must be a whole number in [0, {limit}]")
    return value


def _real(field: str, value: object) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise RecordError(field, "must be a finite number")
    return value


def _flag(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RecordError(field, "must be true or false")
    return value


def _within(field: str, value: object, bounds: tuple[float, float]) -> float:
    number = _real(field, value)
    if not bounds[0] <= number <= bounds[1]:
        raise RecordError(field, f"must be a number in [{bounds[0]:g}, {bounds[1]:g}]")
    return number


def _items(field: str, value: object, limit: int, read: Callable[[str, Any], Any]) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) > limit:
        raise RecordError(field, f"must be a list of at most {limit}")
    return tuple(read(field, item) for item in value)


def _peer(value: object, field: str = "peer") -> PeerId:
    text = _text(field, value, 64)
    if not is_peer_id(text):
        raise RecordError(field, "not a peer id")
    return PeerId(text)


def _model(value: object) -> ModelIdentity:
    if not isinstance(value, list) or len(value) != 6:
        raise RecordError("model", "malformed")
    name, *digests, layers = value
    if not all(isinstance(digest, str) and _HEX.fullmatch(digest) for digest in digests):
        raise RecordError("model", "digests are lower-case hex")
    num_layers = _whole("model", layers, MAX_LAYERS)
    return ModelIdentity(_text("model", name, 96), digests[0], digests[1], digests[2], digests[3], num_layers)


def _span(value: object, num_layers: int) -> Span:
    ends = _items("span", value, 2, _whole)
    try:
        return Span(*ends).within(num_layers)
    except (LayersError, TypeError) as error:
        raise RecordError("span", f"{ends} is no span of {num_layers} layers") from error


def _state(value: object) -> NodeState:
    try:
        return NodeState(value)
    except ValueError as error:
        raise RecordError("state", "unknown") from error


def _sweep_ms(value: object) -> tuple[tuple[int, float], ...]:
    pairs = _items("sweep_ms", value, 8, _pair)
    return tuple((_whole("sweep_ms", nodes), _real("sweep_ms", milliseconds)) for nodes, milliseconds in pairs)


def _delays_ms(value: object) -> tuple[tuple[PeerId, float], ...]:
    pairs = _items("delays_ms", value, MAX_DELAYS, _pair)
    return tuple(
        (_peer(peer, "delays_ms"), _within("delays_ms", milliseconds, _DELAY_MS)) for peer, milliseconds in pairs
    )


def _pair(field: str, value: object) -> list[Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise RecordError(field, "must be pairs")
    return value


def _uplink(value: object) -> float | None:
    return None if value is None else _within("uplink_mbit_per_s", value, _MBIT_PER_S)
