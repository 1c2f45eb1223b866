"""A head on disk: config.json and model.safetensors, and the few tensors that it borrows from the target."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from client.drafting.heads.modules import EMBEDDING, OUTPUT, Head, HeadConfig, make_head
from swarm.errors import UnsupportedModel
from swarm.models.hub import find_model
from swarm.models.pretrained import TEXT_PART, unreadable_weights, weight_map

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
    return {name: tensor.float() for name, tensor in read_tensors(model, names, revision).items()}


def stored_names(model: str | Path, revision: str | None = None) -> dict[str, str]:
    """The tensors of a checkpoint: from their names, as the model's class calls them, to those that are stored.

    A multimodal checkpoint's prefix of its language model is left out.

    Raises:
        UnsupportedModel: the weights are no safetensors, or cannot be read.
        HubError: the hub refuses, or cannot be reached.
    """
    folder, hub = find_model(model, revision)
    return {re.sub(TEXT_PART, "", name): name for name in weight_map(folder, hub, str(model))}


def read_tensors(model: str | Path, names: Collection[str], revision: str | None = None) -> dict[str, torch.Tensor]:
    """Some tensors of a checkpoint as they are stored; no other is read, and on the hub only the files that hold them.

    Args:
        model: folder or hub id.
        names: as the model's class calls them.
        revision: on the hub.

    Raises:
        UnsupportedModel: the checkpoint has no such tensor.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    if not names:
        return {}
    folder, hub = find_model(model, revision)
    file_of, stored = weight_map(folder, hub, str(model)), stored_names(model, revision)
    wanted = {name: stored[name] for name in names if name in stored}
    found: dict[str, torch.Tensor] = {}
    for file in sorted({file_of[there] for there in wanted.values()}):
        if hub is not None:
            hub.fetch([file])
        try:
            with safe_open(folder / file, framework="pt") as opened:
                for name in (name for name, there in wanted.items() if file_of[there] == file):
                    found[name] = opened.get_tensor(wanted[name])
        except (OSError, SafetensorError) as error:
            raise unreadable_weights(str(model), folder / file, error) from error
    for name in names:
        if name not in found:
            raise UnsupportedModel(f"{model}: its checkpoint has no tensor {name!r}, which the head borrows")
    size = sum(tensor.numel() * tensor.itemsize for tensor in found.values())
    logger.info("%s: %d of its tensors read, %d bytes", model, len(found), size)
    return found
