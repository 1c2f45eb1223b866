"""A whole model, as Hugging Face's own class has it: found in a folder or on the hub, weights and all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from swarm.families import causal_lm_class
from swarm.hub import find_model
from swarm.pretrained import read_config, unreadable_weights, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def load_causal_lm(
    model: str | Path,
    dtype: torch.dtype,
    device: torch.device | str,
    prepare: Callable[[PreTrainedConfig], None] = lambda _: None,
) -> PreTrainedModel:
    """Load a model of a family that Canopy runs.

    prepare: changes its config before the class sees it.

    Raises:
        UnknownModel: there is no such model.
        UnsupportedModel: Canopy cannot run it.
        HubError: the hub refuses, cannot be reached, or what it sent cannot be kept.
    """
    folder, hub = find_model(model)
    config = read_config(folder, str(model))
    causal_lm_class(config)
    prepare(config)
    files = weight_files(folder, hub, str(model))
    if hub is not None:
        hub.fetch(files)
    try:
        whole: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, SafetensorError) as error:
        raise unreadable_weights(str(model), folder, error) from error
    moved: PreTrainedModel = whole.to(device)
    return moved
