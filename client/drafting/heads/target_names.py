"""What a target's class calls the tensors that a head borrows. Reads the config alone and opens no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedConfig

from swarm.errors import UnsupportedModel
from swarm.inference.layers.pass_through import find_layers
from swarm.models.families import text_config
from swarm.models.hub import find_model
from swarm.models.model_config import read_config
from swarm.models.text_classes import class_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # its module takes 2 s to import: a client without a head needs none


@dataclass(frozen=True, slots=True)
class TargetNames:
    """Names in the target's checkpoint.

    Attributes:
        config: of the language model.
        embedding: [vocab_size, width].
        output: the output matrix; the embedding where they are one.
        norm: weights of the final norm [hidden_size]; None where it has none of its own.
    """

    config: PreTrainedConfig
    embedding: str
    output: str
    norm: str | None


def target_names(model: str | Path, revision: str | None = None) -> TargetNames:
    """Learn the names from the class.

    Raises:
        UnknownModel: there is no such model.
        UnsupportedModel: it is no causal language model, or has no matrix that a head could borrow.
        HubError: the hub refuses, or cannot be reached.
    """
    folder, _ = find_model(model, revision)
    text = text_config(read_config(folder, str(model)))
    empty: Any = empty_model(text)
    embedding = _name_of(empty, empty.get_input_embeddings())
    output = embedding if text.tie_word_embeddings else _name_of(empty, empty.get_output_embeddings())
    layers, width = find_layers(empty), text.hidden_size
    norms = [name for name, weight in empty.named_parameters() if weight.shape == (width,) and layers not in name]
    return TargetNames(text, embedding, output, norms[-1] if norms else None)


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of a config on the meta device: shapes and names, no weights.

    Raises:
        UnsupportedModel: it is no causal language model.
    """
    model_class: Any = class_of(config)
    if model_class is None:
        raise UnsupportedModel(f"{config.model_type}: transformers has no causal language model for it")
    with torch.device("meta"):
        made: PreTrainedModel = model_class(config)
    return made


def _name_of(model: Any, module: torch.nn.Module | None) -> str:  # noqa: ANN401 - a model of any class
    """The name of a module's matrix in the checkpoint."""
    found = next((name for name, part in model.named_modules() if part is module), None)
    if found is None or module is None:
        raise UnsupportedModel(f"{cast('str', model.config.model_type)}: has no matrix that a head could borrow")
    return f"{found}.weight"
