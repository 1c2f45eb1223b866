"""A head on a text model: what classes of models that see or hear do with a text alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.modeling_outputs import CausalLMOutputWithPast

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedConfig


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


def keep_joins(model_class: type[PreTrainedModel], model_type: str) -> None:
    """Let a text model's class join tensors as the class of the whole does, where it has no way of its own."""
    joins_of: Any = get_checkpoint_conversion_mapping
    whole = model_class.__module__.split(".")[-2]
    if whole == model_type or any(joins_of(name) is not None for name in (model_type, model_class.__name__)):
        return
    if joins := [one for one in joins_of(whole) or () if isinstance(one, WeightConverter)]:  # names have no prefix
        cast("Any", register_checkpoint_conversion_mapping)(model_class.__name__, joins)


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
    keep_joins(TextCausalLM, cast("Any", text.config_class).model_type)
    return TextCausalLM
