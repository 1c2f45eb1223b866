"""The names of things, as distinct types: peers, sessions, tree nodes. Owns no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import NewType

PeerId = NewType("PeerId", str)
"""Base58 libp2p peer id: the hash of the machine's public key."""

SessionId = NewType("SessionId", bytes)
"""128 bits: a session's name, the hash of its client's key. Whoever knows it can do nothing with it."""

TreeNodeId = NewType("TreeNodeId", int)
"""Number of a tree node within its session, in the order in which the client appends; never reused."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which model exactly: a chain never mixes fingerprints.

    Attributes:
        name: the hub id, or a folder's name: what others give to serve the same model.
        fingerprint: hex digest over the three digests below.
        config_digest: hex SHA-256 of config.json without its volatile fields.
        weights_digest: hex SHA-256 of the weights' index, or of samples of a single file.
        tokenizer_digest: hex SHA-256 of the tokenizer's files and special tokens.
        num_layers: decoder layers of the whole model.
    """

    name: str
    fingerprint: str
    config_digest: str
    weights_digest: str
    tokenizer_digest: str
    num_layers: int

    def is_called(self, query: str) -> bool:
        """Whether a user means this model.

        Args:
            query: its name, the last part of it, a folder so named, or at least 6 characters of the fingerprint.
        """
        differ = _is_hub_id(query) and _is_hub_id(self.name) and query != self.name
        by_name = not differ and PurePath(query).name == PurePath(self.name).name
        return by_name or (len(query) >= 6 and self.fingerprint.startswith(query))


def _is_hub_id(name: str) -> bool:
    """Whether it has the form OWNER/MODEL."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))
