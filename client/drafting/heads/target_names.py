"""What a target's class calls the tensors that a head borrows. Reads the config alone and opens no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from swarm.errors import UnsupportedModel
from swarm.inference.ragged_batch import find_layers
from swarm.models.families import text_config
from swarm.models.hub import find_model
from swarm.models.pretrained import read_config


@dataclass(frozen=True, slots=True)
class TargetNames:
    """Names in the target's checkpoint.

    Attributes:
        embedding: [vocab_size, width].
        output: the output matrix; the embedding where they are one.
        norm: weights of the final norm [hidden_size]; None where it has none of its own.
    """

    embedding: str
    output: str
    norm: str | None


def target_names(model: str | Path, revision: str | None = None) -> TargetNames:
    """Learn the names from the class, made on the meta device.

    Raises:
        UnknownModel: there is no such model.
        UnsupportedModel: it is no causal language model, or has no matrix that a head could borrow.
        HubError: the hub refuses, or cannot be reached.
    """
    folder, _ = find_model(model, revision)
    config = read_config(folder, str(model))
    text = text_config(config)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"{text.model_type}: transformers has no causal language model for it")
    with torch.device("meta"):
        empty = cast("Any", MODEL_FOR_CAUSAL_LM_MAPPING[type(text)])(text)
    embedding = _name_of(empty, empty.get_input_embeddings())
    output = embedding if text.tie_word_embeddings else _name_of(empty, empty.get_output_embeddings())
    layers, width = find_layers(empty), text.hidden_size
    norms = [name for name, weight in empty.named_parameters() if weight.shape == (width,) and layers not in name]
    return TargetNames(embedding, output, norms[-1] if norms else None)


def _name_of(model: Any, module: torch.nn.Module | None) -> str:  # noqa: ANN401 - a model of any class
    """The name of a module's matrix in the checkpoint."""
    found = next((name for name, part in model.named_modules() if part is module), None)
    if found is None or module is None:
        raise UnsupportedModel(f"{cast('str', model.config.model_type)}: has no matrix that a head could borrow")
    return f"{found}.weight"
