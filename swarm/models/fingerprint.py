"""Which model exactly: digests of config, weights and tokenizer, and the fingerprint over them (docs/design/index.md).

A client has no weights: it computes config and tokenizer digests alone and opens no weight file.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from swarm.errors import UnknownModel
from swarm.ids import ModelIdentity, json_digest, model_name
from swarm.models.gguf.folder import POINTER
from swarm.models.pretrained import INDEX, SINGLE, read_config

CONFIG = "config.json"
VOLATILE = frozenset({"transformers_version", "_name_or_path"})
"""Fields of config.json that say nothing about the model."""

TOKENIZER_FIELDS = ("bos_token", "eos_token", "unk_token", "pad_token", "add_bos_token", "add_eos_token")
TOKENIZER = "tokenizer.json"
OLDER_TOKENIZERS = ("tokenizer.model", "vocab.json", "merges.txt")

SAMPLED_BLOCKS = 64
"""Blocks of a single weight file that its digest reads, evenly spread, because hashing a whole file takes too long."""
BLOCK_BYTES = 4096
HEADER_LIMIT_BYTES = 100 << 20
"""The largest header that the safetensors format allows."""


def model_identity(folder: Path, name: str | None = None, commit: str | None = None) -> ModelIdentity:
    """Identify a model whose small files, and weights unless they have an index, lie in `folder`.

    Args:
        folder: holds config.json, the tokenizer, and the weights' index or single file.
        name: the hub id; the folder's name when None.
        commit: the hub's commit, where the model comes from there.

    Raises:
        UnknownModel: a file is missing or not what it should be.
    """
    name, config_digest, tokenizer_digest = client_identity(folder, name)
    weights_digest = json_digest({"weights": _weights(folder, commit), "commit": commit})
    return ModelIdentity.of(name, config_digest, weights_digest, tokenizer_digest, _num_layers(folder))


def known_identity(folder: Path, name: str | None = None, commit: str | None = None) -> ModelIdentity | None:
    """The same for a client, which opens no weight file: None where only the weights themselves could tell.

    Args:
        folder: holds config.json, the tokenizer, and maybe the weights' index.
        name: the hub id; the folder's name when None.
        commit: the hub's commit, where the model comes from there.

    Raises:
        UnknownModel: a file is missing or not what it should be.
    """
    is_told = commit is not None or (folder / INDEX).exists()
    return model_identity(folder, name, commit) if is_told else None


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


def _weights(folder: Path, commit: str | None) -> object:
    """What the digest of the weights covers: the index's map, or nothing where a commit fixes them, or samples."""
    if (folder / POINTER).exists():
        files = sorted(_read_json(folder / POINTER)["files"])
        return {name: None if commit else _samples(folder / name, (folder / name).stat().st_size) for name in files}
    if (folder / INDEX).exists():
        return _read_json(folder / INDEX).get("weight_map")
    if commit is not None:
        return None
    single = folder / SINGLE
    if not single.exists():
        raise UnknownModel(f"{folder}: neither {INDEX} nor {SINGLE}")
    size = single.stat().st_size
    return {"header": _header(single), "size": size, "samples": _samples(single, size)}


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        prefix = opened.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else HEADER_LIMIT_BYTES + 1
        if length > HEADER_LIMIT_BYTES:
            raise UnknownModel(f"{file}: not a safetensors file")
        try:
            header: dict[str, Any] = json.loads(opened.read(length))
        except (ValueError, RecursionError) as error:
            raise UnknownModel(f"{file}: not a safetensors file") from error
    return header


def _samples(file: Path, size: int) -> str:
    """Hash of evenly spread blocks of a file, its last block included."""
    digest = hashlib.sha256()
    last = max(0, size - BLOCK_BYTES)
    with file.open("rb") as opened:
        for block in range(SAMPLED_BLOCKS):
            opened.seek(last * block // (SAMPLED_BLOCKS - 1))
            digest.update(opened.read(BLOCK_BYTES))
    return digest.hexdigest()


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
