"""A node's word that a model is served in the swarm: signed, small, and all that a list of models needs. Pure.

A node's record says the same and five times as much; pointers exist so that a list need not fetch all records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Final

from swarm.base.declared import exactly
from swarm.base.ids import SWARM_ID_BYTES, ModelIdentity, SwarmId
from swarm.directory.identity import Identity
from swarm.directory.node_record import NodeRecord, seal
from swarm.directory.registry import MODELS_LISTED, models_key, record_keys
from swarm.directory.sealing import UNIX_S, AnyPeer, ListedModel, RecordError, Seal

MAX_POINTER_BYTES: Final = 2_048
"""With a key of 2,048 bits it has about 900 bytes, of which 550 are key and signature; with 4,096 bits, 1,420."""


@dataclass(frozen=True, slots=True)
class ModelPointer:
    """One node's word that a model is served, field by field as it is signed.

    Attributes:
        left: whether the node takes it back.
        peer: the node that says so.
        model: what is served.
        expires_at: DHT time (Unix seconds).
        swarm: the open swarm that the node is of, if that has an id; release 0.2 does not sign it.
    """

    left: bool = field(default=False, kw_only=True)
    peer: AnyPeer
    model: ListedModel
    expires_at: Annotated[float, UNIX_S]
    swarm: Annotated[SwarmId, exactly(SWARM_ID_BYTES)] | None = None

    @property
    def subkey(self) -> str:
        """Under which it is filed at `models_key` of its model."""
        return f"{self.model.fingerprint}/{self.peer}"


POINTERS: Final = Seal(ModelPointer, "a pointer", 1, b"canopy-model", limit=MAX_POINTER_BYTES, kept=8_192)
seal_pointer, open_pointer = POINTERS.close, POINTERS.open


@dataclass(frozen=True, slots=True)
class Filing:
    """One thing that a node files in the directory."""

    key: str
    subkey: str
    data: bytes


def seal_announcement(record: NodeRecord, identity: Identity) -> list[Filing]:
    """What a node files to say what it serves: its record under each of its keys, and last a pointer to its model.

    Raises:
        RecordError: the record breaks its own bounds, or names another peer.
    """
    sealed = seal(record, identity)
    pointer = ModelPointer(record.peer, record.model, record.expires_at, record.swarm, left=record.left)
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
