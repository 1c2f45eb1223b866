"""Which of transformers' types of models a GGUF architecture is read into, and what its metadata are called there.

Facts of llama.cpp's code stand here, which no file says: the types that an architecture's name does not tell, and which
numbers of a head turn together. All else is read off the class (`swarm/files/stored/gguf_layout.py`) and the file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from swarm.base.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swarm.files.gguf.container import GgufHeader


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


NEIGHBOURS: Final = _names(
    "arcee chatglm cohere2 command-r deepseek2 ernie4_5 ernie4_5-moe glm-dsa glm4 granite granitehybrid granitemoe "
    "llama llama4 mistral3 olmo smollm3"
)
"""Architectures that turn neighbouring numbers of a head together. Source: llama.cpp, `llama_model_rope_type`."""
HALVES: Final = _names(
    "afmoe dbrx dots1 exaone-moe exaone4 falcon falcon-h1 gemma gemma2 gemma3 gemma4 glm4moe gpt-oss gptneox "
    "hunyuan-dense hunyuan-moe jais2 lfm2 lfm2moe minicpm3 minimax-m2 nemotron olmo2 olmoe phi2 phi3 phimoe qwen2 "
    "qwen2moe qwen2vl qwen3 qwen35 qwen35moe qwen3moe qwen3next qwen3vl qwen3vlmoe seed_oss stablelm starcoder2"
)
"""Architectures that turn a number of a head's first half with one of its second."""
UNTURNED: Final = _names("bloom gpt2 jamba mamba mamba2 mpt nemotron_h nemotron_h_moe starcoder")
"""Architectures without rotary embeddings."""
READ: Final = NEIGHBOURS | HALVES | UNTURNED
TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "chatglm": ("glm",),
    "command-r": ("cohere",),
    "deepseek2": ("deepseek_v3", "deepseek_v2", "youtu"),
    "glm-dsa": ("glm_moe_dsa",),
    "granitehybrid": ("bamba", "granitemoehybrid"),
    "granitemoe": ("granitemoeshared",),
    "hunyuan-dense": ("hunyuan_v1_dense",),
    "hunyuan-moe": ("hunyuan_v1_moe",),
    "llama": ("llama", "mixtral"),
    "mamba": ("mamba", "falcon_mamba"),
    "mistral3": ("mistral", "ministral3"),
    "nemotron_h_moe": ("nemotron_h",),
    "olmo2": ("olmo2", "olmo3"),
    "phi2": ("phi",),
    "qwen2vl": ("qwen2",),
    "qwen3vl": ("qwen3",),
    "qwen3vlmoe": ("qwen3_moe",),
    "starcoder": ("gpt_bigcode",),
}
"""Types of models of architectures that transformers calls otherwise; of several the one that knows the file's keys."""

NO_CLASS: Final = "transformers has no class for it"
_REASONS: Final = {
    "it embeds texts, and writes none": "bert eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed "
    "modern-bert neo-bert nomic-bert nomic-bert-moe t5encoder",
    "it has an encoder": "t5",
    "it writes sound": "wavtokenizer-dec",
    "its tokens also see those that follow them": "dream llada llada-moe rnd1",
    "its class forbids tokens, which its text model does not": "chameleon",
    "numbers of its activations lie in the metadata, and are weights of its class": "apertus",
    "its products round what enters them, which its class does not": "bitnet",
    "some of its weights lie stacked in one": "gemma3n",
    "positions of its tokens have axes that no class here has": "hunyuan_vl",
    "its text model has no class that stands alone": "mistral4 paddleocr step35",
    "llama.cpp writes no such files": "gptj",
    "its files were not compared with its class": "kimi-linear mimo2",
}
REFUSED: Final[Mapping[str, str]] = {name: reason for reason, names in _REASONS.items() for name in _names(names)}
"""Architectures that were looked into and are not read, and why; of the others transformers has no class."""

EPS: Final = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layernorm_epsilon")
KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.indexer.head_count": ("index_n_heads",),
    "attention.indexer.key_length": ("index_head_dim",),
    "attention.indexer.top_k": ("index_topk",),
    "attention.key_length": ("head_dim",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.layer_norm_epsilon": (*EPS[2:], *EPS[:2]),
    "attention.layer_norm_rms_epsilon": EPS,
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.scale": ("attention_multiplier",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "attention.sliding_window": ("sliding_window",),
    "attention.value_length_mla": ("v_head_dim",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "block_count": ("num_hidden_layers",),
    "context_length": ("max_position_embeddings", "seq_length", "max_seq_len"),
    "embedding_length": ("hidden_size",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "embedding_scale": ("embedding_multiplier",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk"),
    "expert_weights_norm": ("norm_topk_prob", "route_norm"),
    "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "interleave_moe_layer_step": ("interleave_moe_layer_step", "moe_layer_interval"),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "residual_scale": ("residual_multiplier",),
    "rope.freq_base": ("rope_theta",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv"),
    "ssm.group_count": ("linear_num_key_heads", "n_groups", "mamba_n_groups"),
    "ssm.state_size": ("linear_key_head_dim", "state_size", "ssm_state_size", "mamba_d_state"),
    "ssm.time_step_rank": ("linear_num_value_heads", "time_step_rank", "mamba_dt_rank"),
    "use_parallel_residual": ("use_parallel_residual",),
}
"""What configs call a value of the metadata: of several names the first one that the class has."""
_HEADS_OF_SPACES: Final = {"ssm.time_step_rank": "mamba_n_heads"}
_WITHOUT_HEADS: Final = {"attention.head_count": "", "feed_forward_length": ""}
OWN_KEYS: Final[Mapping[str, Mapping[str, str]]] = {
    "bamba": _HEADS_OF_SPACES,
    "bloom": {"attention.head_count_kv": "", "feed_forward_length": ""},
    "dbrx": {
        "attention.clamp_kqv": "",
        "attention.head_count_kv": "",
        "attention.layer_norm_epsilon": "",
        "expert_count": "",
        "expert_used_count": "",
        "feed_forward_length": "",
        "rope.freq_base": "",
    },
    "falcon_h1": _HEADS_OF_SPACES,
    "falcon_mamba": _WITHOUT_HEADS,
    "gemma3_text": {
        "rope.freq_base_swa": "rope_local_base_freq",
        "rope.global.freq_base": "rope_theta",
        "rope.local.freq_base": "rope_local_base_freq",
    },
    "gemma4_text": {
        "attention.head_count_kv": "",
        "attention.key_length": "",
        "attention.key_length_swa": "head_dim",
        "feed_forward_length": "",
        "rope.freq_base": "",
    },
    "gpt2": {"attention.head_count_kv": ""},
    "gpt_bigcode": {"attention.head_count_kv": ""},
    "granitemoehybrid": _HEADS_OF_SPACES,
    "llama4_text": {"expert_feed_forward_length": "intermediate_size", "feed_forward_length": "intermediate_size_mlp"},
    "mamba": _WITHOUT_HEADS,
    "mamba2": _WITHOUT_HEADS | {"ssm.time_step_rank": ""},
    "nemotron_h": {
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "ssm.time_step_rank": "mamba_num_heads",
    },
}
"""Where a type calls a value otherwise, or has it in a form of its own: then "" leaves it to `by_type.py`."""
REQUIRED: Final = ("context_length", "block_count", "embedding_length")
SIGMOID: Final = 2
"""How routers choose experts, as `expert_gating_func` has it."""
BY_SIGMOID: Final = _names(
    "afmoe deepseek_v3 dots1 exaone_moe glm4_moe glm_moe_dsa lfm2_moe llama4_text minimax_m2 nemotron_h youtu"
)
"""Types whose routers choose by a sigmoid and in no other way."""


def architecture_of(header: GgufHeader, name: str) -> str:
    """The architecture of a file.

    Raises:
        UnsupportedModel: it is none that runs, or the file is not a model's.
    """
    family = header.text("general.architecture")
    kind = header.text("general.type") or "model"
    if family == "clip" or kind == "mmproj":
        raise UnsupportedModel(f"{name}: the eyes of a model (mmproj), not the model; give the model's own file")
    if kind == "adapter":
        raise UnsupportedModel(f"{name}: a LoRA adapter, not a model; give the file of a model that it is merged into")
    if kind != "model":
        raise UnsupportedModel(f"{name}: its kind is {kind!r}, not a model; give the model's own file")
    if not header.tensors:
        raise UnsupportedModel(f"{name}: a tokenizer without weights; give the model's own file")
    if family not in READ:
        reason = f"{REFUSED.get(family, NO_CLASS)}; read are {', '.join(sorted(READ))}"
        raise UnsupportedModel(f"{name}: GGUF of architecture {family!r} is not read: {reason}")
    return family


def types_of(family: str) -> tuple[str, ...]:
    """Types of transformers' causal language models that a file of this architecture may be of."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if family in TYPES:
        return TYPES[family]
    names = {_plain(one): one for one in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
    found = names.get(f"{_plain(family)}text") or names.get(_plain(family))
    return (names[_plain(family)],) if found is None else (found,)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]", "", name)


def field_of(key: str, config_class: Any) -> str | None:  # noqa: ANN401 - any of transformers' config classes
    """What the config of a class calls a value of the metadata.

    Returns:
        "" where the value has a form of its own, None where the class has no such.
    """
    own = OWN_KEYS.get(config_class.model_type, {})
    if key in own:
        return own[key]
    fields = {*config_class.__dataclass_fields__, *config_class.attribute_map}
    if "rope_parameters" in fields:
        fields.add("rope_theta")
    found = next((one for one in KEYS.get(key, ()) if one in fields), None)
    aliases: Mapping[str | None, str] = config_class.attribute_map
    return aliases.get(found, found)
