"""A whole model in Hugging Face's own class, from a folder or the hub, weights included. Owns no files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from swarm.errors import UnsupportedModel
from swarm.models.families import causal_lm_class, text_config
from swarm.models.hub import find_model
from swarm.models.pretrained import TEXT_PART, read_config, unreadable_weights, weight_files

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
    try:
        loaded: Any = model_class.from_pretrained(
            folder,
            config=text,
            dtype=dtype,
            use_safetensors=True,
            key_mapping={TEXT_PART: ""},
            output_loading_info=True,
        )
    except (OSError, SafetensorError) as error:
        raise unreadable_weights(str(model), folder, error) from error
    whole, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedModel(f"{model}: {len(missing)} tensors are missing, such as {missing[0]}")
    moved: PreTrainedModel = whole.to(device)
    return moved
