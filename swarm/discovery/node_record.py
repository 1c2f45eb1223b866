"""A node's announcement, signed by its identity: encoding, bounds, checks. Pure; time is a parameter.

A sealed record is msgpack of [public key, body, signature]; the body is msgpack of the record's fields, in order.
Every DHT peer runs `open_filed` on what it stores, every reader runs `live_records` or `unseal`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

import msgpack

from swarm.discovery import record_fields as fields
from swarm.discovery.identity import Identity, peer_id_of, verify
from swarm.discovery.record_fields import RecordError
from swarm.egress.host_port import split_host
from swarm.errors import LayersError
from swarm.ids import MAX_MODEL_NAME, SWARM_ID_BYTES, ModelIdentity, PeerId, SwarmId, as_swarm_id, is_model_name
from swarm.layers import Span
from swarm.protocol.limits import MAX_COUNT, MAX_LAYERS, MAX_RECORD_BYTES
from swarm.runtime.version import unknown_here
from swarm.transport.certificate import check_certificate
from swarm.transport.endpoint import Endpoint
from swarm.transport.relayed import first_stop, parse_relayed

MAX_TTL_S: Final = 90.0
"""How far ahead a record may expire."""
MAX_SPEEDS: Final = 8
"""Sizes of a sweep whose time a record may hold."""
MAX_KV_TOKENS: Final = 1 << 40
MAX_DELAYS: Final = 16
"""Delays that a record may hold."""
MAX_ROW_BYTES: Final = 2**20
MAX_ADDRESS: Final = 340
"""Characters of an address, at most: a host name of 253, or a relay's behind a peer id."""
CLOCK_SLACK_S: Final = 5.0  # the DHT tolerates clocks that differ by 3 s
MAX_NAME_CHARACTERS: Final = 64
VERIFIED_KEPT: Final = 4_096
"""Records whose signatures are not checked again; a few kilobytes each."""
_DOMAIN: Final = b"canopy-record"


class NodeState(enum.Enum):
    """Whether a node takes sessions: only `SERVING` ones do."""

    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"


class Reach(enum.Enum):
    """How others come to a node: by its own port, by a port that its router maps, or by a relay."""

    DIRECT = "direct"
    MAPPED = "mapped"
    RELAYED = "relayed"


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node's announcement. A later release may sign more fields behind these; they are read past.

    Attributes:
        peer: the node's identity.
        model: what it serves.
        span: which layers of it.
        address: `host:port` of its gRPC service, or `PEER.via.HOST:PORT` with its own peer id.
        state: whether it takes sessions.
        numeric_class: as `cpu-float32` (`swarm.protocol.numeric_class`); at most 96 characters.
        version: of the program; at most 32 characters.
        name: at most `MAX_NAME_CHARACTERS`; None unless the owner chose one.
        sweep_ms: at most `MAX_SPEEDS` pairs (tree nodes, measured ms per sweep), tree nodes rising in
            `[1, MAX_SWEEP_ROWS]`, ms within `SWEEP_MS`: a hint, which nobody can verify.
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
        reach: how others come to it.
        bucketed: whether a sweep takes the time of the next size in `sweep_ms`, so that rows in between are free;
            those times do not fall. A release that does not know this field interpolates them.
        aux_rows: whether it sends rows of further layers beside those of the last one (P14).
        swarm: the open swarm that it is of, which the directory fills in; None in a private one, or one without an id.
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
    reach: Reach = Reach.DIRECT
    bucketed: bool = False
    aux_rows: bool = False
    swarm: SwarmId | None = field(default=None, compare=False)
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
    sealed = _decode(fields.unpack_list(body, len(_FIELDS), or_more=True), data)
    check_signature(sealed.record.peer, public_key, _DOMAIN + body, signature)
    return sealed


def claimed_peer(data: bytes) -> str | None:
    """Whose record it says that it is, before its signature is checked; None if it is none."""
    try:
        values = fields.unpack_list(_unsealed(data)[1], len(_FIELDS), or_more=True)
    except RecordError:
        return None
    peer = values[_FIELDS.index("peer")]
    return peer if isinstance(peer, str) else None


def _unsealed(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Public key, body and signature."""
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError("data", f"{len(data)} bytes; a record has at most {MAX_RECORD_BYTES}")
    public_key, body, signature = fields.unpack_list(data, 3)
    if not (isinstance(public_key, bytes) and isinstance(body, bytes) and isinstance(signature, bytes)):
        raise RecordError("data", "not a sealed record")
    return public_key, body, signature


def check_signature(peer: PeerId, public_key: bytes, data: bytes, signature: bytes) -> None:
    """Refuse what a peer did not sign.

    Raises:
        RecordError: the key is not the peer's, or the signature is not the key's.
    """
    if not verify(peer, public_key, data, signature):
        raise RecordError("signature", f"not made by {peer}")


def signer_key(data: bytes) -> tuple[PeerId, bytes]:
    """Who sealed a record, and that peer's public key; whether the record is valid is not checked.

    Raises:
        RecordError: it is no sealed record.
    """
    public_key = _unsealed(data)[0]
    return peer_id_of(public_key), public_key


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
    try:
        return split_host(address)
    except ValueError as error:
        raise RecordError("address", str(error)) from None


def _age(sealed: Sealed) -> tuple[float, int]:
    return sealed.record.expires_at, sealed.record.sequence


_DIGEST = re.compile(r"[0-9a-f]{64}")
_NUMERIC_CLASS = re.compile(r"[a-z][a-z0-9_]*(-[a-z0-9_.+]+)+")
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]*")
_FIELDS = (
    "version_of_format", "left", "peer", "model", "span", "address", "state", "numeric_class", "version", "name",
    "sweep_ms", "kv_tokens_free", "kv_tokens_total", "sequence", "expires_at",
    "delays_ms", "busy", "uplink_mbit_per_s", "row_bytes",
    "movable", "certificate", "reach",
)  # fmt: skip
_LATER_FIELDS = ("bucketed", "aux_rows", "swarm")
"""What earlier releases of this format do not sign."""
FORMAT: Final = 2
"""Of records. It grows when an older release cannot go on without what is new; until then, fields are only added."""
MODEL_FIELDS: Final = 6
_DELAY_MS: Final = (0.0, 60_000.0)
_UNIX_S: Final = (0.0, 1e11)
_MBIT_PER_S: Final = (0.001, 1e6)


def _encode(record: NodeRecord, left: bool) -> list[Any]:
    model = record.model
    return [
        FORMAT,
        left,
        record.peer,
        write_model(model),
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
        record.reach.value,
        record.bucketed,
        record.aux_rows,
        record.swarm,
    ]


def _decode(values: list[Any], data: bytes) -> Sealed:
    raw = dict(zip(_FIELDS + _LATER_FIELDS, values, strict=False))  # a later release may have more
    if raw["version_of_format"] != FORMAT:
        raise RecordError("data", fields.another_format("a record", raw["version_of_format"], FORMAT))
    left = fields.flag("left", raw["left"])
    model = read_model(raw["model"])
    total = fields.whole("kv_tokens_total", raw["kv_tokens_total"], (0, MAX_KV_TOKENS))
    peer = fields.peer_id(raw["peer"])
    address, reach = _address(raw["address"], peer), _reach(raw["reach"])
    bucketed = fields.flag("bucketed", raw.get("bucketed", False))
    if (parse_relayed(address) is not None) != (reach is Reach.RELAYED):
        raise RecordError("reach", f"{address[:80]!r} is not an address of a machine that is {reach.value}")
    record = NodeRecord(
        peer=peer,
        model=model,
        span=_span(raw["span"], model.num_layers),
        address=address,
        state=_state(raw["state"]),
        numeric_class=fields.formed("numeric_class", raw["numeric_class"], 96, _NUMERIC_CLASS),
        version=fields.formed("version", raw["version"], 32, _VERSION),
        name=None if raw["name"] is None else fields.text("name", raw["name"], MAX_NAME_CHARACTERS),
        sweep_ms=fields.speeds("sweep_ms", raw["sweep_ms"], MAX_SPEEDS, bucketed=bucketed),
        kv_tokens_free=fields.whole("kv_tokens_free", raw["kv_tokens_free"], (0, total)),
        kv_tokens_total=total,
        sequence=fields.whole("sequence", raw["sequence"], (0, MAX_COUNT)),
        expires_at=fields.within("expires_at", raw["expires_at"], _UNIX_S),
        delays_ms=_delays_ms(raw["delays_ms"]),
        busy=fields.within("busy", raw["busy"], (0.0, 1.0)),
        uplink_mbit_per_s=_uplink(raw["uplink_mbit_per_s"]),
        row_bytes=None if raw["row_bytes"] is None else fields.whole("row_bytes", raw["row_bytes"], (1, MAX_ROW_BYTES)),
        movable=fields.flag("movable", raw["movable"]),
        certificate=_certificate(raw["certificate"], peer),
        reach=reach,
        bucketed=bucketed,
        aux_rows=fields.flag("aux_rows", raw.get("aux_rows", False)),
        swarm=read_swarm(raw.get("swarm")),
        sealed=data,
    )
    return Sealed(record, left)


def _layer(field: str, value: object) -> int:
    return fields.whole(field, value, (0, MAX_LAYERS))


def _certificate(value: object, peer: PeerId) -> bytes:
    if not isinstance(value, bytes):
        raise RecordError("certificate", "must be bytes")
    if value:
        try:
            check_certificate(value, peer)
        except ValueError as error:
            raise RecordError("certificate", str(error)) from error
    return value


def _address(value: object, peer: PeerId) -> str:
    address = fields.text("address", value, MAX_ADDRESS)
    relayed = parse_relayed(address)
    if relayed is not None and (relayed.peer != peer or parse_relayed(relayed.relay) is not None):
        raise RecordError("address", f"{address[:80]!r} does not lead to {peer} by one relay")
    split_address(first_stop(address))
    return address


def _reach(value: object) -> Reach:
    try:
        return Reach(value)
    except ValueError as error:
        raise RecordError("reach", unknown_here(fields.quoted(value))) from error


def read_swarm(value: object) -> SwarmId | None:
    """A swarm's id as records and pointers hold it.

    Raises:
        RecordError: it is none.
    """
    swarm = as_swarm_id(value)
    if swarm is None and value is not None:
        raise RecordError("swarm", f"an id has {SWARM_ID_BYTES} bytes")
    return swarm


def write_model(model: ModelIdentity) -> list[Any]:
    """A model's identity as records and pointers hold it."""
    digests = [model.config_digest, model.weights_digest, model.tokenizer_digest]
    return [model.name, model.fingerprint, *digests, model.num_layers]


def read_model(value: object) -> ModelIdentity:
    """What `write_model` wrote, checked.

    Raises:
        RecordError: it breaks its bounds.
    """
    if not isinstance(value, list) or len(value) < MODEL_FIELDS:
        raise RecordError("model", "malformed")
    name, *digests, layers = value[:MODEL_FIELDS]  # a later release may have more
    if not all(isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in digests):
        raise RecordError("model", "digests are 64 lower-case hex digits")
    num_layers = fields.whole("model", layers, (1, MAX_LAYERS))
    if not is_model_name(fields.text("model", name, MAX_MODEL_NAME)):
        raise RecordError("model", f"{name!r} is no name of a model")
    model = ModelIdentity(name, digests[0], digests[1], digests[2], digests[3], num_layers)
    if not model.is_consistent:
        raise RecordError("model", "its fingerprint is not that of its digests and layers")
    return model


def _span(value: object, num_layers: int) -> Span:
    ends = fields.items("span", value, 2, _layer)
    try:
        return Span(*ends).within(num_layers)
    except (LayersError, TypeError) as error:
        raise RecordError("span", f"{ends} is no span of {num_layers} layers") from error


def _state(value: object) -> NodeState:
    try:
        return NodeState(value)
    except ValueError as error:
        raise RecordError("state", unknown_here(fields.quoted(value))) from error


def _delays_ms(value: object) -> tuple[tuple[PeerId, float], ...]:
    pairs = fields.items("delays_ms", value, MAX_DELAYS, fields.pair)
    return tuple(
        (fields.peer_id(peer, "delays_ms"), fields.within("delays_ms", milliseconds, _DELAY_MS))
        for peer, milliseconds in pairs
    )


def _uplink(value: object) -> float | None:
    return None if value is None else fields.within("uplink_mbit_per_s", value, _MBIT_PER_S)
