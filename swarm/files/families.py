"""Which Hugging Face causal LMs Canopy can run, and which it refuses by name. Loads no weights."""

from __future__ import annotations

import copy
import inspect
import sys
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, cast

from swarm.base.errors import UnsupportedModel
from swarm.files.stored.quantised import quantisation_of, refusal
from swarm.files.text_classes import class_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig, PreTrainedModel

TESTED = frozenset(
    {
        "bloom",
        "cohere2",
        "deepseek_v3",
        "deepseek_v32",
        "doge",
        "falcon",
        "falcon_h1",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt2",
        "gpt_neo",
        "gpt_neox",
        "gpt_oss",
        "gptj",
        "granite",
        "kimi_linear",
        "lfm2",
        "llama",
        "llama4_text",
        "mamba2",
        "mistral",
        "mixtral",
        "mpt",
        "nemotron_h",
        "olmo2",
        "opt",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "stablelm",
    }
)
"""Families (`model_type`) that the tests run in spans; `node.model.family_check` tests any other when it is loaded."""

INDEXED = "indexed_attention"
"""The type of layers in which an indexer selects what each row attends to."""

CHUNKED = "chunked_attention"
"""The type of layers in which a row attends to its own chunk of positions."""

COMPRESSED = {"compressed_sparse_attention", "heavily_compressed_attention"}
"""Types of layers that fold neighbouring tokens' keys into one, beside a window of keys of their own."""

ATTENTION_LAYERS = {"attention", "full_attention", "sliding_attention", CHUNKED, INDEXED, *COMPRESSED}
"""Layer types, as configs name them, that keep KV per token."""
STATE_LAYERS = {"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding", "recurrent"}
"""Layer types that keep a state of the text before a token; some of them attend too."""
PLAIN_LAYERS = {"mlp", "moe"}
"""Layer types that keep nothing."""

OWN_STATES = "it keeps states by a way of its own, not in transformers' cache"
SHARED_WEIGHTS = "its attention layers share weights and read the embedding again, so they cannot lie apart"
REFUSED = {
    "blt": "it works on patches of bytes, not on tokens",
    "git": "its class knows no attention but kinds of its own",
    "openai-gpt": "its class keeps no keys and values",
    "qwen4_exp_text": "some of its layers read n-grams of the text, beside hidden rows",
    "xlnet": "its class keeps hidden rows of the text before, not keys and values",
    "recurrent_gemma": OWN_STATES,
    "rwkv": OWN_STATES,
    "xlstm": OWN_STATES,
    "zamba": SHARED_WEIGHTS,
    "zamba2": SHARED_WEIGHTS,
    "zaya": "its routers hand rows on from layer to layer, beside hidden rows",
}
"""Families that were looked into and cannot run, and why; others are found out by running them."""

GROWING_ROPE = {"dynamic", "longrope"}
"""Rotary embeddings whose frequencies change once positions pass the original window."""


class AttentionBy(Enum):
    """Who computes a model's attention, and how it is told what each row sees."""

    INTERFACE = auto()
    """Our attention function, to which the class hands keys and values."""
    MASKED = auto()
    """The class, with a mask [rows, slots]: it selects among what a row sees."""
    ROWS = auto()
    """The class, each row a sequence of its own in a batch: no mask reaches what it adds by distance."""


def attention_by(config: PreTrainedConfig) -> AttentionBy:
    """Who computes the attention of a text model with a causal language model's class."""
    model_class = cast("type[PreTrainedModel]", class_of(config))
    if not (
        model_class._supports_attention_backend
        or keeps_states(config)
        or hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS")
    ):
        return AttentionBy.ROWS
    if compression_rates(config):
        return AttentionBy.ROWS
    return AttentionBy.MASKED if INDEXED in (getattr(config, "layer_types", None) or ()) else AttentionBy.INTERFACE


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
    model_class = class_of(text) if reason is None else None
    if model_class is None:
        reason = reason or "transformers has no causal language model for it"
        raise UnsupportedModel(f"{text.model_type}: {reason}; choose another model")
    return model_class


def embeds_in_layers(config: PreTrainedConfig) -> bool:
    """Whether every layer of a text model takes an embedding of the tokens, so that all machines must have them."""
    return bool(getattr(config, "hidden_size_per_layer_input", 0))


def needs_ids(config: PreTrainedConfig) -> bool:
    """Whether layers of a text model depend on the tokens' ids, so that these must reach all machines."""
    return embeds_in_layers(config) or "hash_moe" in (getattr(config, "mlp_layer_types", None) or ())


def compression_rates(config: PreTrainedConfig) -> dict[int, int]:
    """Of the layers of a text model that fold neighbouring tokens' keys into one: how many tokens."""
    rates = getattr(config, "compress_rates", None) or {}
    kinds = getattr(config, "layer_types", None) or ()
    return {layer: rates[kind] for layer, kind in enumerate(kinds) if kind in COMPRESSED}


def span_starts(config: PreTrainedConfig) -> tuple[int, ...]:
    """Layers at which a span of a text model may begin: those that use nothing of layers before but hidden rows."""
    count: int = config.num_hidden_layers
    bound = {layer for layer, kind in enumerate(getattr(config, "indexer_types", None) or ()) if kind == "shared"}
    first_sharing = count - (getattr(config, "num_kv_shared_layers", 0) or 0)
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * count)
    for kind in set(kinds[first_sharing:]):
        own = [layer for layer in range(first_sharing) if kinds[layer] == kind]
        last = max(layer for layer in range(count) if kinds[layer] == kind)
        bound |= set(range(max(own, default=0) + 1, last + 1))
    return tuple(layer for layer in range(count) if layer not in bound)


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the language model's own config, not quantised; the whole model's decides whether its head is tied."""
    text = copy.deepcopy(config.get_text_config())
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))
    if hasattr(text, "quantization_config"):
        del text.quantization_config  # its tensors are decoded before the class sees them
    return text


def keeps_states(config: PreTrainedConfig) -> bool:
    """Whether layers of this model keep a state of the text before a token (it may be found to do more, or less)."""
    text = config.get_text_config()
    model_class = class_of(text)
    kinds = set(getattr(text, "layer_types", None) or ())
    return bool(kinds & STATE_LAYERS) or bool(getattr(model_class, "_is_stateful", False))


def max_positions(config: PreTrainedConfig) -> int | None:
    """Tokens that a session of this model may have, None when nothing limits it.

    Rotary embeddings that stretch with the longest text of a batch would make a row depend on its neighbours, so they
    end at the original window.
    """
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    original = getattr(text, "original_max_position_embeddings", limit)
    windows = [kind.get("original_max_position_embeddings") or original for kind in _growing_ropes(text)]
    return min(filter(None, windows), default=limit)


def why_shorter(config: PreTrainedConfig) -> str | None:
    """Why texts end before the positions that the config names; None where they do not."""
    limit, named = max_positions(config), getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is None or named is None or limit >= named:
        return None
    kind = next(rope["rope_type"] for rope in _growing_ropes(config.get_text_config()))
    reason = f"its rotary embedding ({kind}) computes every row anew behind them, which texts in progress cannot"
    return f"texts end at {limit:,} tokens, not at the {named:,} that its config names: {reason}"


def _growing_ropes(text: PreTrainedConfig) -> list[Mapping[str, Any]]:
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # one for all layers, or one per type
    return [kind for kind in kinds if kind.get("rope_type") in GROWING_ROPE]


def _drafts_for_another(config: PreTrainedConfig) -> bool:
    """Whether a model is handed another one's keys and values, as drafts that were trained with their target are."""
    model_class = class_of(config)
    return model_class is not None and "shared_kv_states" in inspect.signature(model_class.forward).parameters


def _refusal(config: PreTrainedConfig, text: PreTrainedConfig) -> str | None:
    if _drafts_for_another(config):
        return "it drafts for a larger model, whose keys and values it reads, and does not run without that one"
    others = set(getattr(text, "layer_types", None) or ()) - ATTENTION_LAYERS - STATE_LAYERS - PLAIN_LAYERS
    if text.model_type in REFUSED:
        return REFUSED[text.model_type]
    if others:
        return f"its layers are not all attention ({', '.join(sorted(others))})"
    if getattr(text, "is_encoder_decoder", False) or getattr(text, "add_cross_attention", False):
        return "it has an encoder"
    both_ways = text.model_type in {"gemma", "gemma3_text"} and text.use_bidirectional_attention  # others ignore it
    is_encoder = not (text.model_type.startswith("gpt_neox") or getattr(text, "is_decoder", True))  # which ignores it
    if both_ways or is_encoder or not getattr(text, "is_causal", True):
        return "its tokens also see those that follow them"
    quantisation = quantisation_of(config)
    return None if quantisation is None else refusal(quantisation)
