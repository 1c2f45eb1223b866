"""A node's announcement, signed by its identity: encoding, bounds, checks. Pure; time is a parameter.

A sealed record is msgpack of [public key, body, signature]; the body is msgpack of the record's fields, in order.
Every DHT peer runs `open_filed` on what it stores, every reader runs `live_records` or `unseal`.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

import msgpack

from swarm.discovery.identity import Identity, is_peer_id, verify
from swarm.errors import LayersError, RemoteProtocolError
from swarm.ids import ModelIdentity, PeerId
from swarm.layers import Span
from swarm.protocol.limits import MAX_RECORD_BYTES
from swarm.transport.certificate import check_certificate
from swarm.transport.endpoint import Endpoint

MAX_TTL_S: Final = 300.0
"""How far ahead a record may expire."""
MAX_LAYERS: Final = 4_096
MAX_DELAYS: Final = 16
"""Delays that a record may hold."""
MAX_ROW_BYTES: Final = 2**20
CLOCK_SLACK_S: Final = 5.0  # the DHT tolerates clocks that differ by 3 s
MAX_NAME_CHARACTERS: Final = 64
VERIFIED_KEPT: Final = 1_024
"""Records whose signatures are not checked again; a few kilobytes each."""
_MAX_NUMBER: Final = 2**62
_DOMAIN: Final = b"canopy-record"


class RecordError(RemoteProtocolError):
    """A record that is not valid; `field` names the part at fault."""


class NodeState(enum.Enum):
    """Whether a node takes sessions: only `SERVING` ones do."""

    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node's announcement.

    Attributes:
        peer: the node's identity.
        model: what it serves.
        span: which layers of it.
        address: `host:port` of its gRPC service.
        state: whether it takes sessions.
        numeric_class: device kind, dtype and lossy codec; at most 96 characters.
        version: of the program; at most 32 characters.
        name: at most `MAX_NAME_CHARACTERS`; None unless the owner chose one.
        sweep_ms: at most 8 pairs (tree nodes, measured ms per sweep): a hint, which nobody can verify.
        kv_tokens_free: KV tokens that no session has reserved.
        kv_tokens_total: KV tokens for all sessions together.
        sequence: grows with every announcement of one run.
        expires_at: DHT time (Unix seconds).
        delays_ms: measured one-way delays to nodes that may follow it in a chain; at most `MAX_DELAYS`.
        busy: fraction of the time in which it computes.
        uplink_mbit_per_s: None while it is not measured.
        row_bytes: of a hidden row in the lossless codec; None if it is not announced.
        movable: whether it would now move to layers where the swarm needs it.
        certificate: DER of the certificate with which it answers since its start; empty only in an insecure swarm.
        sealed: the signed bytes that the record was read from; empty for a record made here.
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
    certificate: bytes = field(default=b"", repr=False)
    sealed: bytes = field(default=b"", compare=False, repr=False)

    @property
    def endpoint(self) -> Endpoint:
        """Where it is reached, and what proves that it answers."""
        return Endpoint(self.peer, self.address, self.certificate)


@dataclass(frozen=True, slots=True)
class Sealed:
    """A record whose signature and bounds hold.

    Attributes:
        record: the announcement.
        left: whether it is the last one of a node that has left.
    """

    record: NodeRecord
    left: bool


def seal(record: NodeRecord, identity: Identity, *, left: bool = False) -> bytes:
    """Encode and sign a record.

    Args:
        record: the announcement.
        identity: its peer's.
        left: whether the node leaves.

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
    """Decode a record and check everything but whether it has expired.

    Args:
        data: the sealed record.
        now: DHT time in seconds.

    Raises:
        RecordError: the field at fault and why.
    """
    sealed = _opened(bytes(data))
    if sealed.record.expires_at > now + MAX_TTL_S + CLOCK_SLACK_S:
        raise RecordError("expires_at", f"more than {MAX_TTL_S:.0f} s ahead")
    return sealed


@lru_cache(VERIFIED_KEPT)
def _opened(data: bytes) -> Sealed:
    """A record whose signature and bounds hold at some time; the same bytes are verified once."""
    public_key, body, signature = _unsealed(data)
    sealed = _decode(_unpack_list(body, len(_FIELDS)), data)
    if not verify(sealed.record.peer, public_key, _DOMAIN + body, signature):
        raise RecordError("signature", f"not made by {sealed.record.peer}")
    return sealed


def claimed_peer(data: bytes) -> str | None:
    """Whose record it says that it is, before its signature is checked; None if it is none."""
    try:
        values = _unpack_list(_unsealed(data)[1], len(_FIELDS))
    except RecordError:
        return None
    peer = values[_FIELDS.index("peer")]
    return peer if isinstance(peer, str) else None


def _unsealed(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Public key, body and signature."""
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError("data", f"{len(data)} bytes; a record has at most {MAX_RECORD_BYTES}")
    public_key, body, signature = _unpack_list(data, 3)
    if not (isinstance(public_key, bytes) and isinstance(body, bytes) and isinstance(signature, bytes)):
        raise RecordError("data", "not a sealed record")
    return public_key, body, signature


def open_filed(data: bytes, peer: object, expires_at: float, now: float) -> Sealed:
    """Check a record as the DHT stores it: only under its signer's own id, for exactly the signed time.

    Args:
        data: the sealed record.
        peer: the id under which it is stored.
        expires_at: the expiry with which it is stored.
        now: DHT time in seconds.

    Raises:
        RecordError: as `open_sealed`, or it is stored under another peer or expiry.
    """
    sealed = open_sealed(data, now)
    if sealed.record.peer != peer:
        raise RecordError("peer", f"{sealed.record.peer} cannot speak for {peer!r}")
    if sealed.record.expires_at != expires_at:
        raise RecordError("expires_at", "not the signed one")
    return sealed


def live_records(blobs: Iterable[bytes], now: float) -> list[NodeRecord]:
    """The records of nodes that are present: the newest one per peer, ordered by layers.

    The record that expires last is the newest, as in the DHT itself; of equals, the one with the higher sequence.

    Args:
        blobs: sealed records; invalid ones are skipped.
        now: DHT time in seconds.
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
    """The record that replaces another when its node leaves: 1 ms newer, to be sealed with `left`."""
    return replace(record, sequence=record.sequence + 1, expires_at=record.expires_at + 0.001)


def bracketed(host: str) -> str:
    """A host as it is written before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of `host:port` (IPv6 in brackets).

    Raises:
        RecordError: the address is malformed.
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
    "movable", "certificate",
)  # fmt: skip
_FORMAT: Final = 2
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
        record.certificate,
    ]


def _decode(values: list[Any], data: bytes) -> Sealed:
    raw = dict(zip(_FIELDS, values, strict=True))
    if raw["version_of_format"] != _FORMAT or type(raw["left"]) is not bool:
        raise RecordError("data", "a record of another format")
    address = _text("address", raw["address"], 280)
    split_address(address)
    model = _model(raw["model"])
    total = _whole("kv_tokens_total", raw["kv_tokens_total"])
    peer = _peer(raw["peer"])
    record = NodeRecord(
        peer=peer,
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
        certificate=_certificate(raw["certificate"], peer),
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


def _certificate(value: object, peer: PeerId) -> bytes:
    if not isinstance(value, bytes):
        raise RecordError("certificate", "must be bytes")
    if value:
        try:
            check_certificate(value, peer)
        except ValueError as error:
            raise RecordError("certificate", str(error)) from error
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
