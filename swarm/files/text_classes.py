"""The class of a text model: transformers' own, or for a model that also sees or hears its text model with a head.

transformers has no causal language model for many text models of such: their head stands in the class of the whole. It
is put on the text model here as that class does, and `node.model.family_check` compares the two.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

CAUSAL, TEXT = "ForCausalLM", ("TextModel", "TextDecoder", "Model")
"""How the names of classes end that may be a language model's, or a text model's: the most telling ends first."""


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The causal language model's class of a text model's config; None where there is none."""
    return _made(cast("Any", type(config)))


def is_composed(model_class: type[PreTrainedModel]) -> bool:
    """Whether a class was made here, of a text model and a head."""
    from swarm.files.text_head import Headed  # here, because it imports what clients do without

    return issubclass(model_class, Headed)


@lru_cache(64)
def _made(config_class: Any) -> type[PreTrainedModel] | None:  # noqa: ANN401 - a class, which mypy holds for unhashable
    """The class of a text model's config: on transformers' list, or in the module that has the config's models."""
    from transformers import PreTrainedModel  # here, because these import what clients do without

    from swarm.files.text_head import keep_joins, with_head

    listed = MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
    if listed is not None:
        keep_joins(cast("Any", listed), config_class.model_type)
        return cast("type[PreTrainedModel]", listed)
    place = config_class.__module__.replace(".configuration_", ".modeling_")
    try:
        found = vars(importlib.import_module(place)).values()
    except ImportError:
        return None
    own = [one for one in found if isinstance(one, type) and issubclass(one, PreTrainedModel)]
    own = [one for one in own if one.__module__ == place and getattr(one, "config_class", None) is config_class]
    for one in own:
        if one.__name__.endswith(CAUSAL):
            return one
    for end in TEXT:
        for one in own:
            if one.__name__.endswith(end) and not one.__name__.endswith("PreTrainedModel"):
                return with_head(one)
    return None
