"""A node's announcement, signed by its identity: its declaration, and which of several is the newest. Pure.

Every DHT peer runs `open_sealed` on what it stores, every reader runs `live_records` or `unseal`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Final

from swarm.base.declared import RISING_PAIRS, Broken, Printable, Size, Within, Written, below, exactly
from swarm.base.errors import LayersError
from swarm.base.ids import SWARM_ID_BYTES, PeerId, SwarmId
from swarm.base.layers import Span
from swarm.directory.sealing import UNIX_S, AnyPeer, ListedModel, RecordError, Seal
from swarm.link.certificate import MAX_CERTIFICATE_BYTES, check_certificate
from swarm.link.egress.streams import split_host
from swarm.link.endpoint import Endpoint, first_stop, parse_relayed
from swarm.protocol.limits import MAX_COUNT, MAX_RECORD_BYTES, MAX_SWEEP_ROWS, SWEEP_MS
from swarm.protocol.numeric_class import ROUNDING_DIGITS, with_rounding
from swarm.protocol.peer_keys import peer_id_of

MAX_SPEEDS: Final = 8
"""Sizes of a sweep whose time a record may hold."""
MAX_KV_TOKENS: Final = 1 << 40
MAX_DELAYS: Final = 16
"""Delays that a record may hold."""
MAX_REFUTED: Final = 8
"""Machines that a record may say to have found wrong."""
MAX_ROW_BYTES: Final = 2**20
MAX_ADDRESS: Final = 340
"""Characters of an address, at most: a host name of 253, or a relay's behind a peer id."""
MAX_NAME_CHARACTERS: Final = 64
FORMAT: Final = 2
"""Of records; until it grows, fields are only added at the end."""
_NUMERIC_CLASS: Final = re.compile(r"[a-z][a-z0-9_]*(-[a-z0-9_.+]+)+")
_ROUNDING: Final = re.compile(rf"([0-9a-f]{{{ROUNDING_DIGITS}}})?")
_VERSION: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]*")


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
    """One node's announcement, field by field as it is signed.

    Attributes:
        left: whether it is the last one of a node that has left.
        peer: the node's identity.
        model: what it serves.
        span: which layers of it.
        address: `host:port` of its gRPC service, or `PEER.via.HOST:PORT` with its own peer id.
        state: whether it takes sessions.
        numeric_class: as `cpu-float32` (`swarm.protocol.numeric_class`).
        version: of the program.
        name: None unless the owner chose one.
        sweep_ms: (tree nodes, measured ms per sweep): a hint, which nobody can verify.
        kv_tokens_free: KV tokens that no session has reserved.
        kv_tokens_total: KV tokens for all sessions together.
        sequence: grows with every announcement of one run.
        expires_at: DHT time (Unix seconds).
        delays_ms: measured one-way delays to nodes that may follow it in a chain.
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
        ends_only: whether it does without token ids between the ends of a chain, and as a tail hears the client (P17).
        refuted: (peer, when) of machines whose signed work this node computed again, and found wrong within 24 hours.
        rounding: mark of its processor, where its class leaves rounding to that; machines of one mark give equal bits.
        sealed: the signed bytes that the record was read from; empty for a record made here.
    """

    left: bool = field(default=False, kw_only=True)
    peer: AnyPeer
    model: ListedModel
    span: Annotated[Span, Written(as_one=True)]
    address: Annotated[str, Printable(MAX_ADDRESS)]
    state: NodeState
    numeric_class: Annotated[str, Printable(96, form=_NUMERIC_CLASS)]
    version: Annotated[str, Printable(32, form=_VERSION)]
    name: Annotated[str, Printable(MAX_NAME_CHARACTERS)] | None
    sweep_ms: Annotated[
        tuple[tuple[Annotated[int, Within(1, MAX_SWEEP_ROWS)], Annotated[float, Within(*SWEEP_MS)]], ...],
        Size(MAX_SPEEDS),
        RISING_PAIRS,
    ]
    kv_tokens_free: Annotated[int, Within(0, MAX_KV_TOKENS)]
    kv_tokens_total: Annotated[int, Within(0, MAX_KV_TOKENS)]
    sequence: Annotated[int, below(MAX_COUNT + 1)]
    expires_at: Annotated[float, UNIX_S]
    delays_ms: Annotated[tuple[tuple[AnyPeer, Annotated[float, Within(0.0, 60_000.0)]], ...], Size(MAX_DELAYS)] = ()
    busy: Annotated[float, Within(0.0, 1.0)] = 0.0
    uplink_mbit_per_s: Annotated[float, Within(0.001, 1e6)] | None = None
    row_bytes: Annotated[int, Within(1, MAX_ROW_BYTES)] | None = None
    movable: bool = False
    certificate: Annotated[bytes, Size(MAX_CERTIFICATE_BYTES)] = field(default=b"", repr=False)
    reach: Reach = Reach.DIRECT
    bucketed: bool = False
    aux_rows: bool = False
    swarm: Annotated[SwarmId, exactly(SWARM_ID_BYTES)] | None = field(default=None, compare=False)
    ends_only: bool = False
    refuted: Annotated[tuple[tuple[AnyPeer, Annotated[float, UNIX_S]], ...], Size(MAX_REFUTED)] = ()
    rounding: Annotated[str, Printable(ROUNDING_DIGITS, form=_ROUNDING)] = ""
    sealed: Annotated[bytes, Written(not_sent=True)] = field(default=b"", compare=False, repr=False)

    def check(self) -> None:
        """Refuse fields that contradict each other.

        Raises:
            Broken: with the field.
        """
        try:
            self.span.within(self.model.num_layers)
        except LayersError:
            raise Broken("span", f"{self.span} is no span of {self.model.num_layers} layers") from None
        if self.kv_tokens_free > self.kv_tokens_total:
            raise Broken("kv_tokens_free", f"{self.kv_tokens_free} of {self.kv_tokens_total}")
        if self.bucketed and any(before > after for (_, before), (_, after) in pairwise(self.sweep_ms)):
            raise Broken("sweep_ms", "times of buckets must not fall")
        relayed = parse_relayed(self.address)
        if relayed is not None and (relayed.peer != self.peer or parse_relayed(relayed.relay) is not None):
            raise Broken("address", f"{self.address[:80]!r} does not lead to {self.peer} by one relay")
        try:
            split_host(first_stop(self.address))
        except ValueError as error:
            raise Broken("address", str(error)) from None
        if (relayed is not None) != (self.reach is Reach.RELAYED):
            raise Broken("reach", f"{self.address[:80]!r} is not an address of a machine that is {self.reach.value}")
        if self.certificate:
            try:
                check_certificate(self.certificate, self.peer)
            except ValueError as error:
                raise Broken("certificate", str(error)) from None

    @property
    def signed_class(self) -> str:
        """Its numeric class with its processor's mark, as it signs what it computes."""
        return with_rounding(self.numeric_class, self.rounding)

    @property
    def endpoint(self) -> Endpoint:
        """Where it is reached, and what proves that it answers."""
        return Endpoint(self.peer, self.address, self.certificate)


RECORDS: Final = Seal(NodeRecord, "a record", FORMAT, b"canopy-record", limit=MAX_RECORD_BYTES, kept=4_096)
seal, open_sealed, claimed_peer = RECORDS.close, RECORDS.open, RECORDS.claimed_peer


def unseal(data: bytes, now: float) -> NodeRecord:
    """Decode and check a record of a node that is still there.

    Raises:
        RecordError: with `field` among data, signature, peer, model, span, address, expires_at, …
    """
    record = open_sealed(data, now)
    if record.expires_at <= now:
        raise RecordError("expires_at", f"expired {now - record.expires_at:.1f} s ago")
    if record.left:
        raise RecordError("state", "the node has left")
    return record


def signer_key(data: bytes) -> tuple[PeerId, bytes]:
    """Who sealed a record, and that peer's public key; whether the record is valid is not checked.

    Raises:
        RecordError: it is no sealed record.
    """
    public_key = RECORDS.parts(data)[0]
    return peer_id_of(public_key), public_key


def live_records(blobs: Iterable[bytes], now: float) -> list[NodeRecord]:
    """The records of nodes that are present: the newest one per peer, ordered by layers.

    The record that expires last is the newest, as in the DHT itself; of equals, the one with the higher sequence.

    Args:
        blobs: sealed records; invalid ones are skipped.
        now: DHT time in seconds.
    """
    newest: dict[PeerId, NodeRecord] = {}
    for blob in blobs:
        try:
            record = open_sealed(blob, now)
        except RecordError:
            continue
        known = newest.get(record.peer)
        if known is None or (record.expires_at, record.sequence) > (known.expires_at, known.sequence):
            newest[record.peer] = record
    live = [record for record in newest.values() if not record.left and record.expires_at > now]
    return sorted(live, key=lambda record: (record.span, record.peer))


def tombstone(record: NodeRecord) -> NodeRecord:
    """The record that replaces another when its node leaves: 1 ms newer."""
    return replace(record, left=True, sequence=record.sequence + 1, expires_at=record.expires_at + 0.001)


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of `host:port` (IPv6 in brackets).

    Raises:
        RecordError: the address is malformed.
    """
    try:
        return split_host(address)
    except ValueError as error:
        raise RecordError("address", str(error)) from None
