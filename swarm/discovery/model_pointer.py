"""A node's word that a model is served in the swarm: signed, small, and all that a list of models needs. Pure.

A sealed pointer is msgpack of [public key, body, signature]; the body is msgpack of [format, left, peer, model,
expiry, swarm].
A node's record says the same and five times as much; pointers exist so that a list need not fetch all records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import msgpack

from swarm.discovery.identity import Identity
from swarm.discovery.node_record import (
    CLOCK_SLACK_S,
    MAX_TTL_S,
    NodeRecord,
    check_signature,
    read_model,
    read_swarm,
    seal,
    write_model,
)
from swarm.discovery.record_fields import RecordError, another_format, unpack_list
from swarm.discovery.registry import MODELS_LISTED, models_key, record_keys
from swarm.ids import ModelIdentity, PeerId, SwarmId

MAX_POINTER_BYTES: Final = 2_048
"""With a key of 2,048 bits it has about 900 bytes, of which 550 are key and signature; with 4,096 bits, 1,420."""
_FORMAT: Final = 1
_DOMAIN: Final = b"canopy-model"
_FIELDS: Final = 5


@dataclass(frozen=True, slots=True)
class ModelPointer:
    """One node's word that a model is served.

    Attributes:
        peer: the node that says so.
        model: what is served.
        expires_at: DHT time (Unix seconds).
        left: whether the node takes it back.
        swarm: the open swarm that the node is of, if that has an id.
    """

    peer: PeerId
    model: ModelIdentity
    expires_at: float
    left: bool = False
    swarm: SwarmId | None = None

    @property
    def subkey(self) -> str:
        """Under which it is filed at `models_key` of its model."""
        return f"{self.model.fingerprint}/{self.peer}"


def seal_pointer(pointer: ModelPointer, identity: Identity) -> bytes:
    """Encode and sign a pointer.

    Raises:
        RecordError: it breaks its own bounds, or names another peer.
    """
    if pointer.peer != identity.peer_id:
        raise RecordError("peer", "a pointer is signed by the peer that it names")
    body = [_FORMAT, pointer.left, pointer.peer, write_model(pointer.model), float(pointer.expires_at), pointer.swarm]
    packed = msgpack.packb(body)
    sealed: bytes = msgpack.packb([identity.public_key, packed, identity.sign(_DOMAIN + packed)])
    open_pointer(sealed, pointer.expires_at)
    return sealed


def open_pointer(data: bytes, now: float) -> ModelPointer:
    """Decode a pointer and check everything but whether it has expired.

    Args:
        data: the sealed pointer.
        now: DHT time in seconds.

    Raises:
        RecordError: the field at fault and why.
    """
    if len(data) > MAX_POINTER_BYTES:
        raise RecordError("data", f"{len(data)} bytes; a pointer has at most {MAX_POINTER_BYTES}")
    pointer = _open_signed(data)
    if pointer.expires_at > now + MAX_TTL_S + CLOCK_SLACK_S:
        raise RecordError("expires_at", f"more than {MAX_TTL_S:.0f} s ahead")
    return pointer


@lru_cache(maxsize=8_192)
def _open_signed(data: bytes) -> ModelPointer:
    """A signature that holds goes on holding, so each is checked once."""
    public_key, body, signature = unpack_list(data, 3)
    if not (isinstance(public_key, bytes) and isinstance(body, bytes) and isinstance(signature, bytes)):
        raise RecordError("data", "not a sealed pointer")
    pointer = _decode(unpack_list(body, _FIELDS, or_more=True))
    check_signature(pointer.peer, public_key, _DOMAIN + body, signature)
    return pointer


def _decode(values: list[Any]) -> ModelPointer:
    version, left, peer, model, expires_at = values[:_FIELDS]  # a later release may have more
    if version != _FORMAT:
        raise RecordError("data", another_format("a pointer", version, _FORMAT))
    if type(left) is not bool or type(expires_at) is not float:
        raise RecordError("data", "malformed")
    swarm = read_swarm(values[_FIELDS]) if len(values) > _FIELDS else None  # release 0.2 does not sign it
    return ModelPointer(PeerId(str(peer)), read_model(model), expires_at, left, swarm)


@dataclass(frozen=True, slots=True)
class Filing:
    """One thing that a node files in the directory.

    Attributes:
        key: name of the storage key.
        subkey: which item under that key.
        data: the sealed record or pointer.
    """

    key: str
    subkey: str
    data: bytes


def seal_announcement(record: NodeRecord, identity: Identity, *, left: bool = False) -> list[Filing]:
    """What a node files to say what it serves: its record under each of its keys, and last a pointer to its model.

    Args:
        record: the announcement.
        identity: its peer's.
        left: whether the node leaves.

    Raises:
        RecordError: the record breaks its own bounds, or names another peer.
    """
    sealed = seal(record, identity, left=left)
    pointer = ModelPointer(record.peer, record.model, record.expires_at, left, record.swarm)
    place = models_key(record.model.fingerprint)
    filings = [Filing(key, record.peer, sealed) for key in record_keys(record)]
    return [*filings, Filing(place, pointer.subkey, seal_pointer(pointer, identity))]


def listed_models(blobs: Iterable[bytes], now: float) -> list[ModelIdentity]:
    """The models that pointers tell of, in the order in which their first pointers stand.

    Args:
        blobs: sealed pointers; invalid ones are skipped.
        now: DHT time in seconds.

    Returns:
        Each fingerprint once, at most `MODELS_LISTED`, under the name that most of its pointers give; of equals the
        first.
    """
    newest: dict[str, ModelPointer] = {}
    for blob in blobs:
        try:
            pointer = open_pointer(blob, now)
        except RecordError:
            continue
        known = newest.get(pointer.subkey)
        if known is None or pointer.expires_at > known.expires_at:
            newest[pointer.subkey] = pointer  # keeps the place of the first
    named: dict[str, list[ModelIdentity]] = {}
    for pointer in newest.values():
        if not pointer.left and pointer.expires_at > now:
            named.setdefault(pointer.model.fingerprint, []).append(pointer.model)
    chosen = [max(models, key=models.count) for models in named.values()]
    return chosen[:MODELS_LISTED]
