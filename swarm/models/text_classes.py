"""The class of a text model: transformers' own, or for a model that also sees or hears its text model with a head.

transformers has no causal language model for many text models of such: their head stands in the class of the whole. It
is put on the text model here as that class does, and `node.model.family_check` compares the two.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedConfig


CAUSAL, TEXT = "ForCausalLM", ("TextModel", "TextDecoder", "Model")
"""How the names of classes end that may be a language model's, or a text model's: the most telling ends first."""


class Headed(GenerationMixin):
    """A text model with a head."""

    config: Any
    model: Any
    lm_head: nn.Linear

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        logits_to_keep: int = 0,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **others: Any,  # noqa: ANN401 - whatever the text model takes
    ) -> CausalLMOutputWithPast:
        """Logits of a text's rows, the last ones or all."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        outputs = self.model(input_ids=input_ids, use_cache=use_cache, past_key_values=past_key_values, **others)
        logits: Any = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
        if scale := getattr(self.config, "logits_scaling", None):
            logits = logits / scale
        if cap := getattr(self.config, "final_logit_softcapping", None):
            logits = (logits / cap).tanh() * cap
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)


def with_head(text: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of a text model with a head, which reads what its whole model's checkpoints have."""
    base: Any = next(one for one in text.__mro__[1:] if issubclass(one, PreTrainedModel))

    class TextCausalLM(Headed, base):  # type: ignore[misc]
        config_class = text.config_class
        base_model_prefix = "model"
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - transformers' own form

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.model = cast("Any", text)(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

    TextCausalLM.__name__ = TextCausalLM.__qualname__ = f"{text.__name__}ForCausalLM"
    TextCausalLM.__module__ = text.__module__
    joins_of: Any = get_checkpoint_conversion_mapping
    if joins_of(cast("Any", text.config_class).model_type) is None:
        of_whole = joins_of(text.__module__.split(".")[-2]) or ()
        joins = [
            one for one in of_whole if isinstance(one, WeightConverter)
        ]  # such as of experts; names have no prefix
        cast("Any", register_checkpoint_conversion_mapping)(TextCausalLM.__name__, joins, overwrite=True)
    return TextCausalLM


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The causal language model's class of a text model's config; None where there is none."""
    listed = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return cast("type[PreTrainedModel] | None", listed) or _made(cast("Any", type(config)))


def is_composed(model_class: type[PreTrainedModel]) -> bool:
    """Whether a class was made here, of a text model and a head."""
    from swarm.models.text_classes import Headed  # here, because it imports what clients do without

    return issubclass(model_class, Headed)


@lru_cache(64)
def _made(config_class: Any) -> type[PreTrainedModel] | None:  # noqa: ANN401 - a class, which mypy holds for unhashable
    """The class of a text model's config that is on no list of transformers'."""
    from transformers import PreTrainedModel  # here, because these import what clients do without

    from swarm.models.text_classes import with_head

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
