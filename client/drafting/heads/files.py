"""A head on disk: config.json and model.safetensors, and the few tensors that it borrows from the target."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from client.drafting.heads.modules import EMBEDDING, OUTPUT, Head, HeadConfig, make_head
from swarm.errors import UnsupportedModel
from swarm.models.hub import Hub, find_model
from swarm.models.model_config import read_config
from swarm.models.stored.opening import open_source
from swarm.models.stored.source import StoredTensor, WeightSource, decoded
from swarm.models.tensor_files import fetch_tensors

logger = logging.getLogger(__name__)

CONFIG, WEIGHTS = "config.json", "model.safetensors"
MAX_CONFIG_BYTES = 65_536


def read_head_config(model: str | Path) -> HeadConfig | None:
    """The config of a head's folder or hub id; None where it is a model's.

    Raises:
        UnknownModel: there is no such folder or id.
        UnsupportedModel: a head that this version does not know.
    """
    folder, _ = find_model(model)
    try:
        with (folder / CONFIG).open("rb") as file:
            content = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None  # loading it as a model then says what is wrong with it
    if not isinstance(content, dict) or "canopy_head" not in content:
        return None
    return HeadConfig.parse(content, str(model))


def load_head(model: str | Path, config: HeadConfig, target: str | Path, revision: str | None = None) -> Head:
    """Load a head, and the tensors that it borrows from the target's checkpoint.

    Raises:
        UnsupportedModel: weights that do not fit the config, or a target without the tensors that are borrowed.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    folder, hub = find_model(model)
    if hub is not None:
        hub.fetch([WEIGHTS])
    head = make_head(config)
    try:
        weights = {name: tensor.float() for name, tensor in load_file(folder / WEIGHTS).items()}
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{model}: {WEIGHTS} cannot be read ({error}); fetch it again") from error
    borrowed = load_tensors(target, set(config.borrowed.values()), revision)
    matrices = {name: borrowed[tensor] for name, tensor in config.borrowed.items()}
    matrices |= {name: weights.pop(name) for name in (EMBEDDING, OUTPUT) if name in weights and name not in matrices}
    if EMBEDDING in matrices and not config.borrowed:
        matrices.setdefault(OUTPUT, matrices[EMBEDDING])  # one that was learned here is both
    try:
        head.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UnsupportedModel(f"{model}: its weights do not fit its config.json ({reason})") from None
    for name in (EMBEDDING, OUTPUT):
        shape = (config.vocab_size, config.hidden_size)
        if name not in matrices or tuple(matrices[name].shape) != shape:
            raise UnsupportedModel(f"{model}: no {name} matrix of {shape[0]} × {shape[1]}, its own or the target's")
        setattr(head, name, matrices[name])
    return head.eval().requires_grad_(requires_grad=False)


def save_head(head: Head, folder: Path) -> int:
    """Write a head in bfloat16, without the matrices that it borrows. Returns the bytes of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    for name in (EMBEDDING, OUTPUT):
        weights.pop(name, None)
        if name not in head.config.borrowed:
            weights[name] = head.matrix(name).detach().to(torch.bfloat16).clone()
    if head.matrix(OUTPUT) is head.matrix(EMBEDDING) and not head.config.borrowed:
        del weights[OUTPUT]
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(head.config.to_json(), indent=1) + "\n", encoding="utf-8")
    return (folder / WEIGHTS).stat().st_size


def load_tensors(model: str | Path, names: Collection[str], revision: str | None = None) -> dict[str, torch.Tensor]:
    """Some tensors of a checkpoint as float32, as `read_tensors` finds them.

    Raises:
        UnsupportedModel: the checkpoint has no such tensor.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    return {name: one.float() for name, one in read_tensors(model, names, revision, torch.float32).items()}


def stored_names(model: str | Path, revision: str | None = None) -> Collection[str]:
    """The tensors of a checkpoint as the model's class calls them, whatever they are stored in.

    Raises:
        UnsupportedModel: the weights are of no format that is read.
        HubError: the hub refuses, or cannot be reached.
    """
    return _source(model, revision)[0].files.keys()


def read_tensors(
    model: str | Path, names: Collection[str], revision: str | None = None, packed: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Some tensors of a checkpoint; no other is read, and of the hub only what holds them is fetched.

    Args:
        model: folder, GGUF file or hub id.
        names: as the model's class calls them.
        revision: on the hub.
        packed: type to which those are decoded that are stored in fewer bits; all others keep their own.

    Raises:
        UnsupportedModel: the checkpoint has no such tensor.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    if not names:
        return {}
    source, hub = _source(model, revision)
    for name in names:
        if name not in source.files:
            raise UnsupportedModel(f"{model}: its checkpoint has no tensor {name!r}, which the head borrows")
    if hub is not None:
        fetch_tensors(source, hub, names)
    read = source.read(names)
    size = sum(one.matrix.size_bytes if isinstance(one, StoredTensor) else one.nbytes for one in read.values())
    logger.info("%s: %d of its tensors read, %d bytes", model, len(read), size)
    return decoded(read, packed)


def _source(model: str | Path, revision: str | None) -> tuple[WeightSource, Hub | None]:
    folder, hub = find_model(model, revision)
    return open_source(folder, hub, read_config(folder, str(model)), str(model)), hub
