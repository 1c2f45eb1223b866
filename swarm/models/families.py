"""Which Hugging Face causal LMs Canopy can run, and which it refuses by name. Loads no weights."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, cast

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from swarm.errors import UnsupportedModel
from swarm.models.stored.quantised import quantisation_of, refusal

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TESTED = frozenset(
    {
        "cohere2",
        "deepseek_v3",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "opt",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
    }
)
"""Families (`model_type`) that the tests run in spans; `node.model.family_check` tests any other when it is loaded."""

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types, as configs name them, that keep KV per token."""

GROWING_ROPE = {"dynamic", "longrope"}
"""Rotary embeddings whose frequencies change once positions pass the original window."""


def causal_lm_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The model class of a config, checked.

    Raises:
        UnsupportedModel: Canopy cannot run this model; the message says which part.
    """
    try:
        text = config.get_text_config()
    except ValueError:
        raise UnsupportedModel(f"{config.model_type}: it has several text models; choose another model") from None
    reason = _refusal(config, text)
    if reason is None and type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = "transformers has no causal language model for it"
    if reason is not None:
        raise UnsupportedModel(f"{text.model_type}: {reason}; choose another model")
    model_class = cast("type[PreTrainedModel]", MODEL_FOR_CAUSAL_LM_MAPPING[type(text)])
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModel(f"{text.model_type}: recurrent layers keep no KV per token; choose another model")
    if not model_class._supports_attention_backend:
        raise UnsupportedModel(f"{text.model_type}: {model_class.__name__} does not use AttentionInterface")
    return model_class


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the language model's own config, not quantised; the whole model's decides whether its head is tied."""
    text = copy.deepcopy(config.get_text_config())
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    if hasattr(text, "quantization_config"):
        del text.quantization_config  # its tensors are decoded before the class sees them
    return text


def max_positions(config: PreTrainedConfig) -> int | None:
    """Tokens that a session of this model may have, None when nothing limits it.

    Rotary embeddings that stretch with the longest text of a batch would make a row depend on its neighbours, so they
    end at the original window.
    """
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one for all layers, or one per type
    original = getattr(text, "original_max_position_embeddings", limit)
    windows = [
        kind.get("original_max_position_embeddings") or original
        for kind in kinds
        if kind.get("rope_type") in GROWING_ROPE
    ]
    return min(filter(None, windows), default=limit)


def _refusal(config: PreTrainedConfig, text: PreTrainedConfig) -> str | None:
    others = set(getattr(text, "layer_types", None) or ()) - ATTENTION_LAYERS
    if others:
        return f"its layers are not all attention ({', '.join(sorted(others))})"
    if getattr(text, "num_kv_shared_layers", 0):
        return "its layers share KV, so they cannot lie on different machines"
    if getattr(text, "is_encoder_decoder", False) or getattr(text, "add_cross_attention", False):
        return "it has an encoder"
    both_ways = text.model_type in {"gemma", "gemma3_text"} and text.use_bidirectional_attention  # others ignore it
    is_encoder = not (text.model_type.startswith("gpt_neox") or getattr(text, "is_decoder", True))  # which ignores it
    if both_ways or is_encoder or not getattr(text, "is_causal", True):
        return "its tokens also see those that follow them"
    if getattr(text, "attn_temperature_tuning", False) and not all(text.no_rope_layers):  # 0 where there is no RoPE
        return "its attention cools with a row's place in the forward, not with its position"
    quantisation = quantisation_of(config)
    return None if quantisation is None else refusal(quantisation)
