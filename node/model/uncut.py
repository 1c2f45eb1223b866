"""Why a model class cannot be cut into spans: looked for once it failed with layers left out. Names no family."""

from __future__ import annotations

import inspect

from torch import nn
from transformers import PreTrainedModel

from swarm.models.pretrained import first_line

NO_ROWS = "its class takes the ids of tokens alone, so hidden rows from another machine cannot enter"
IN_PARTS = "its class runs each layer as parts of several lists, so no layer can be left out"


def why_uncut(model: PreTrainedModel | None, layers: str, failure: Exception) -> str:
    """What keeps a class from running without some of its layers.

    Args:
        model: of that class, on any device; None where none could be made.
        layers: name of the list that was taken for its layers; empty where it came to none.
        failure: what it raised.
    """
    if model is None or not layers:
        return f"its class fails ({first_line(failure)})"
    if "inputs_embeds" not in inspect.signature(model.base_model.forward).parameters:
        return NO_ROWS
    around, _, name = layers.rpartition(".")
    beside = dict(model.get_submodule(around).named_children())
    own = beside.pop(name)
    assert isinstance(own, nn.ModuleList)
    if any(isinstance(other, nn.ModuleList) and len(other) == len(own) for other in beside.values()):
        return IN_PARTS
    return f"its class fails where layers are left out ({first_line(failure)})"
