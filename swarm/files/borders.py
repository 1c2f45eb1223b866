"""Where a model that a swarm serves may be cut, by its config alone: nothing else is fetched."""

from __future__ import annotations

from pathlib import Path

from swarm.base.errors import SwarmError, UnsupportedModel
from swarm.base.ids import ModelIdentity
from swarm.base.layers import SpanBorders
from swarm.files.families import span_starts
from swarm.files.hub import find_config
from swarm.files.model_config import read_config


def known_borders(model: ModelIdentity) -> SpanBorders | None:
    """Its borders, by the config that is in the hub's cache or on the hub; None where there is none, or another one.

    May wait for the hub, ten seconds at most.
    """
    if "/" not in model.name:  # a folder's name: only the machines that serve it have that folder
        return None
    try:
        return borders_in(find_config(model.name), model)
    except SwarmError:
        return None


def borders_in(folder: Path, model: ModelIdentity) -> SpanBorders:
    """The borders of a model whose config is in a folder.

    Raises:
        UnknownModel: there is no config that transformers knows.
        UnsupportedModel: the config is another model's, or makes no sense.
    """
    try:
        text = read_config(folder, model.name).get_text_config()
        borders = SpanBorders(span_starts(text), int(text.num_hidden_layers))
    except (AttributeError, LookupError, TypeError, ValueError) as failure:
        raise UnsupportedModel(f"{model.name}: its config says nothing of its layers") from failure
    if borders.num_layers != model.num_layers:
        raise UnsupportedModel(f"{model.name}: the config has {borders.num_layers} layers, not {model.num_layers}")
    return borders
