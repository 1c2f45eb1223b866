"""A whole model in Hugging Face's own class, from a folder or the hub, weights included. Owns no files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from swarm.errors import UnsupportedModel
from swarm.models.families import causal_lm_class, text_config
from swarm.models.hub import find_model
from swarm.models.pretrained import (
    TEXT_PART,
    read_config,
    unreadable_weights,
    weight_files,
    weight_map,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def load_causal_lm(
    model: str | Path,
    dtype: torch.dtype,
    device: torch.device | str,
    prepare: Callable[[PreTrainedConfig], None] = lambda _: None,
) -> PreTrainedModel:
    """Load a model of a family that Canopy runs; of a multimodal model, the language model alone.

    Args:
        model: a folder, or a hub id.
        dtype: of its weights.
        device: where it runs.
        prepare: changes the config before the model is made.

    Raises:
        UnknownModel: there is no such model.
        UnsupportedModel: Canopy cannot run it, or tensors are missing.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    folder, hub = find_model(model)
    config = read_config(folder, str(model))
    model_class, text = causal_lm_class(config), text_config(config)
    prepare(text)
    files = weight_files(folder, hub, str(model))
    if hub is not None:
        hub.fetch(files)
    loaded: Any = model_class.from_pretrained(
        None,  # which files count is decided as for spans
        state_dict=_read(folder, weight_map(folder, hub, str(model)), str(model)),
        config=text,
        dtype=dtype,
        key_mapping={TEXT_PART: ""},
        output_loading_info=True,
    )
    whole, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedModel(f"{model}: {len(missing)} tensors are missing, such as {missing[0]}")
    moved: PreTrainedModel = whole.to(device)
    return moved


def _read(folder: Path, file_of: Mapping[str, str], model: str) -> dict[str, torch.Tensor]:
    """All tensors, each from the file that is said to hold it."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(set(file_of.values())):
        try:
            with safe_open(folder / file, framework="pt") as opened:
                own = [name for name in opened.keys() if file_of.get(name) == file]  # noqa: SIM118 - it is no dict
                tensors |= {name: opened.get_tensor(name) for name in own}
        except (OSError, SafetensorError) as error:
            raise unreadable_weights(model, folder / file, error) from error
    return tensors
