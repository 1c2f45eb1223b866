"""The names of things, as distinct types: peers, sessions, models, tree nodes. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final, NewType, Self

MAX_MODEL_NAME: Final = 96
"""Characters of a model's name, at most."""
_MODEL_NAME: Final = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9_./-]*(?::[A-Za-z0-9_.-]+)?")
_FILE_ENDING: Final = re.compile(r"(?:-\d{5}-of-\d{5})?\.gguf", re.IGNORECASE)

PeerId = NewType("PeerId", str)
"""Base58 libp2p peer id: the hash of the machine's public key."""

SwarmId = NewType("SwarmId", bytes)
"""128 bits: which open swarm. No secret, and no right: it keeps apart what must not mix."""

SWARM_ID_BYTES: Final = 16

SessionId = NewType("SessionId", bytes)
"""128 bits: a session's name, the hash of its client's key. Whoever knows it can do nothing with it."""

TreeNodeId = NewType("TreeNodeId", int)
"""Number of a tree node within its session, in the order in which the client appends; never reused."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which model exactly: a chain never mixes fingerprints.

    Attributes:
        name: the hub id, or a folder's name: what others give to serve the same model.
        fingerprint: hex digest over the three digests and the number of layers below (`fingerprint_of`).
        config_digest: hex SHA-256 of config.json without its volatile fields.
        weights_digest: hex SHA-256 over sizes and contents of all weight files (`swarm.protocol.manifest`).
        tokenizer_digest: hex SHA-256 of the tokenizer's files and special tokens.
        num_layers: decoder layers of the whole model.
    """

    name: str
    fingerprint: str
    config_digest: str
    weights_digest: str
    tokenizer_digest: str
    num_layers: int

    @classmethod
    def of(cls, name: str, config_digest: str, weights_digest: str, tokenizer_digest: str, num_layers: int) -> Self:
        """The identity of a model with these parts."""
        parts = (config_digest, weights_digest, tokenizer_digest)
        return cls(name, fingerprint_of(*parts, num_layers), *parts, num_layers)

    @property
    def is_consistent(self) -> bool:
        """Whether its fingerprint is that of its parts: a fingerprint stands for one config and one depth only."""
        parts = (self.config_digest, self.weights_digest, self.tokenizer_digest)
        return self.fingerprint == fingerprint_of(*parts, self.num_layers)

    def unlike(self, other: ModelIdentity) -> str:
        """In what two models differ: `weights`, or `config and tokenizer`; empty where in nothing."""
        parts = ("config", "weights", "tokenizer")
        differ = [part for part in parts if getattr(self, f"{part}_digest") != getattr(other, f"{part}_digest")]
        return " and ".join([*filter(None, [", ".join(differ[:-1])]), *differ[-1:]])

    def is_called(self, query: str) -> bool:
        """Whether a user means this model.

        Args:
            query: its name, the last part of it, a folder or file so named, or 6 or more characters of the fingerprint.
        """
        differ = _is_hub_id(query) and _is_hub_id(self.name) and query != self.name
        by_name = not differ and model_name(without_ending(PurePath(query).name)) == PurePath(self.name).name
        return by_name or (len(query) >= 6 and self.fingerprint.startswith(query))


def as_swarm_id(value: object) -> SwarmId | None:
    """A swarm's id as it came from somewhere; None where it is none."""
    return SwarmId(value) if isinstance(value, bytes) and len(value) == SWARM_ID_BYTES else None


def shown_swarm(swarm: SwarmId | None) -> str:
    """A swarm as people are told of it: the first 32 bits of its id."""
    return "a swarm without an id" if swarm is None else f"swarm {swarm.hex()[:8]}"


def fingerprint_of(config_digest: str, weights_digest: str, tokenizer_digest: str, num_layers: int) -> str:
    """The fingerprint of a model with these parts: a hex SHA-256.

    Whoever knows the parts can check it, so a machine cannot list a fingerprint with parts that are not its own.
    """
    parts = {"config": config_digest, "layers": num_layers, "tokenizer": tokenizer_digest, "weights": weights_digest}
    return json_digest(parts)


def json_digest(content: Mapping[str, object]) -> str:
    """Hex SHA-256 over canonical JSON: sorted keys, no spaces."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def is_model_name(name: str) -> bool:
    """Whether a model may be called so: letters, digits, `_`, `.`, `/`, `-`; it begins with a letter or a digit.

    One `:` may stand between a hub id and which of its files is meant. Such a name is one word of a command line, and
    no option of it; with `..` it could be a path to somewhere else.
    """
    return len(name) <= MAX_MODEL_NAME and _MODEL_NAME.fullmatch(name) is not None


def model_name(name: str) -> str:
    """The name of a model from a folder's: what no name may have becomes a `-`."""
    if is_model_name(name):
        return name
    legal = re.sub(r"\.\.+|[^A-Za-z0-9_./-]", "-", name)[:MAX_MODEL_NAME]
    return legal if is_model_name(legal) else f"model{legal}"[:MAX_MODEL_NAME]


def without_ending(file: str) -> str:
    """What a model in a file is called: without `.gguf`, and without the number of a part."""
    for match in _FILE_ENDING.finditer(file):
        if match.end() == len(file):
            return file[: match.start()]
    return file


def _is_hub_id(name: str) -> bool:
    """Whether it has the form OWNER/MODEL."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))
