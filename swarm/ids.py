"""The names of things, as distinct types: peers, sessions, tree nodes. Owns no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import NewType

PeerId = NewType("PeerId", str)
"""Base58 libp2p peer id: the hash of the machine's public key."""

SessionId = NewType("SessionId", bytes)
"""128 random bits, chosen by the client; whoever knows them may speak for the session."""

TreeNodeId = NewType("TreeNodeId", int)
"""Number of a tree node within its session, in the order in which the client appends; never reused."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which model exactly: a chain never mixes fingerprints.

    Digests are hex; `fingerprint` is taken over the other three. name: the hub id, or a folder's name: what others give
    to serve it too.
    """

    name: str
    fingerprint: str
    config_digest: str
    weights_digest: str
    tokenizer_digest: str
    num_layers: int

    def is_called(self, wanted: str) -> bool:
        """Whether a user means this model: by its name, the last part of it, a folder so named, or the fingerprint."""
        differ = _is_hub_id(wanted) and _is_hub_id(self.name) and wanted != self.name
        by_name = not differ and PurePath(wanted).name == PurePath(self.name).name
        return by_name or (len(wanted) >= 6 and self.fingerprint.startswith(wanted))


def _is_hub_id(name: str) -> bool:
    """Whether it names its owner too."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))
