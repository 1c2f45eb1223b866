"""A whole model in Hugging Face's own class, from a folder or the hub, weights included. Owns no files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swarm.base.errors import UnsupportedModel
from swarm.files.families import causal_lm_class, text_config
from swarm.files.hub import find_model
from swarm.files.model_config import read_config
from swarm.files.pretrained import SAYS_WHAT_FITS, first_line, misfit
from swarm.files.stored.opening import open_source
from swarm.files.stored.source import decoded

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
    source = open_source(folder, hub, config, str(model))
    if hub is not None:
        hub.fetch(sorted({file for files in source.files.values() for file in files}))
    tensors = decoded(source.read(source.files), dtype)
    try:
        loaded: Any = model_class.from_pretrained(None, config=text, state_dict=tensors, dtype=dtype, **SAYS_WHAT_FITS)
    except Exception as error:  # what joins a checkpoint's tensors may raise anything on those that do not fit
        raise UnsupportedModel(f"{model}: the checkpoint does not fit its class ({first_line(error)})") from error
    whole, info = loaded
    if (what := misfit(info | {"unexpected_keys": ()})) is not None:
        raise UnsupportedModel(f"{model}: the checkpoint does not fit its class: {what}")
    moved: PreTrainedModel = whole.to(device)
    return moved
