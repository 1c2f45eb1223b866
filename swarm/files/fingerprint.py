"""Which model exactly: digests of config, weights and tokenizer, and the fingerprint over them (docs/design/index.md).

Each digest is of contents, so equal files are one model wherever they come from, and other files of a folder or of a
hub's repository say nothing. A client has no weights: it computes config and tokenizer digests alone.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from swarm.base.errors import UnknownModel, UnsupportedModel
from swarm.base.ids import ModelIdentity, json_digest, model_name
from swarm.files.hub import Hub
from swarm.files.manifests import WeightFiles, find_manifest, known_weights
from swarm.files.model_config import read_config
from swarm.protocol.manifest import Manifest

CONFIG = "config.json"
VOLATILE = frozenset({"transformers_version", "_name_or_path"})
"""Fields of config.json that say nothing about the model."""

TOKENIZER_FIELDS = ("bos_token", "eos_token", "unk_token", "pad_token", "add_bos_token", "add_eos_token")
TOKENIZER = "tokenizer.json"
OLDER_TOKENIZERS = ("tokenizer.model", "vocab.json", "merges.txt")


def model_identity(folder: Path, name: str | None = None, manifest: Manifest | None = None) -> ModelIdentity:
    """Identify a model whose small files lie in a folder.

    Args:
        name: the hub id; the folder's name when None.
        manifest: of its weights; None reads all of them, which then have to be in the folder.

    Raises:
        UnknownModel: a file is missing or not what it should be.
        UnsupportedModel: there are no weights that can be read.
    """
    name, config_digest, tokenizer_digest = client_identity(folder, name)
    num_layers = _num_layers(folder)
    if manifest is None:
        known = known_weights(WeightFiles.of(folder, None, str(folder)))
        manifest = known.manifest
        if manifest is None:
            raise UnknownModel(f"{folder}: {known.missing[0]} is missing")
    return ModelIdentity.of(name, config_digest, manifest.digest, tokenizer_digest, num_layers)


def known_identity(folder: Path, name: str | None = None, hub: Hub | None = None) -> ModelIdentity | None:
    """The same for a client, which opens no weight file: None where only the weights themselves could tell.

    The hub's listing tells, a cache that is complete, or a node that has read the same files on this machine.

    Args:
        folder: holds config.json, the tokenizer, and maybe weights.
        name: the hub id; the folder's name when None.
        hub: the commit, where the model comes from there.

    Raises:
        UnknownModel: a small file is missing or not what it should be.
    """
    try:
        manifest = find_manifest(WeightFiles.of(folder, hub, str(folder)), reads=False).manifest
    except (UnsupportedModel, UnknownModel):  # no weights are here at all, or they vanish meanwhile
        manifest = None
    return None if manifest is None else model_identity(folder, name, manifest)


def client_identity(folder: Path, name: str | None = None) -> tuple[str, str, str]:
    """The part of an identity that needs no weights.

    Returns:
        Name, config digest and tokenizer digest.

    Raises:
        UnknownModel: a file is missing or not what it should be.
    """
    config = _read_json(folder / CONFIG)
    config_digest = json_digest({key: value for key, value in config.items() if key not in VOLATILE})
    return model_name(name or folder.name), config_digest, _tokenizer_digest(folder)


def _tokenizer_digest(folder: Path) -> str:
    names = [TOKENIZER] if (folder / TOKENIZER).exists() else OLDER_TOKENIZERS
    present = [folder / name for name in names if (folder / name).exists()]
    if not present:
        raise UnknownModel(f"{folder}: no tokenizer.json; a model comes with its tokenizer")
    settings = _read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    special = {field: settings[field] for field in TOKENIZER_FIELDS if settings.get(field) is not None}
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in present}
    return json_digest({"files": files, "special": special})


def _num_layers(folder: Path) -> int:
    try:
        count: int = read_config(folder, str(folder)).get_text_config().num_hidden_layers
    except (UnknownModel, AttributeError, ValueError) as error:
        raise UnknownModel(f"{folder / CONFIG}: does not say how many layers the model has") from error
    return count


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnknownModel(f"{file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UnknownModel(f"{file}: not valid JSON") from error
    if not isinstance(content, dict):
        raise UnknownModel(f"{file}: not a JSON object")
    return content
