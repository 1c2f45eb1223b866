"""How llama.cpp writes each family: which class its files are read into, and under which names values and tensors lie.

What a class could not be told from its file alone (the order of rows, norms with one added) stands here, and the tests
compare each family with its class. A family that is not here is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from swarm.base.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swarm.files.gguf.container import GgufHeader


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a family is written to GGUF.

    Attributes:
        model_class: of transformers, for the config's `architectures`.
        fields: names in the config that are not the common ones, by key of the metadata; "" leaves a key out.
        is_interleaved: whether the rows of queries and keys were put in the order in which llama.cpp turns them.
        norms_plus_one: whether norms are stored with one added.
        is_transposed: whether the class has its linear weights the other way round.
        turns_experts: whether the class has experts the other way round.
        mixes_experts: whether the class has gate and up of an expert row by row.
        tiles_values: whether heads of values of linear attention lie by their place among those of a key.
    """

    family: str
    model_type: str
    model_class: str
    fields: Mapping[str, str] = field(default_factory=dict)
    is_interleaved: bool = False
    norms_plus_one: bool = False
    is_transposed: bool = False
    turns_experts: bool = False
    mixes_experts: bool = False
    tiles_values: bool = False


COMMON: Final = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
LAYER_EPS: Final = "attention.layer_norm_epsilon"
REQUIRED: Final = ("context_length", "block_count", "embedding_length", "attention.head_count")

EXPERTS: Final = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
WINDOW: Final = {"attention.sliding_window": "sliding_window"}
LOCAL_BASE: Final = {
    "rope.freq_base_swa": "rope_local_base_freq",
    "rope.local.freq_base": "rope_local_base_freq",
    "rope.global.freq_base": "rope_theta",
}
"""By llama.cpp's names, and by Ollama's."""
ROUTED: Final = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
}
LATENT: Final = ROUTED | {
    "attention.head_count_kv": "",
    "attention.key_length": "",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
}
GEMMA4: Final = {
    "final_logit_softcapping": "final_logit_softcapping",
    "feed_forward_length": "",
    "attention.head_count_kv": "",
    "attention.key_length": "",
    "attention.key_length_swa": "head_dim",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.sliding_window": "sliding_window",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "rope.freq_base": "",
}
LLAMA4: Final = {
    "feed_forward_length": "intermediate_size_mlp",
    "expert_feed_forward_length": "intermediate_size",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
}
DELTA: Final = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
LOCAL_EXPERTS: Final = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
GPT_OSS: Final = LOCAL_EXPERTS | {"expert_feed_forward_length": "intermediate_size"}
COHERE2: Final = {LAYER_EPS: "layer_norm_eps", "logit_scale": "logit_scale"}
SOFT_CAPS: Final = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GRANITE: Final = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GPT2: Final = {
    "context_length": "n_positions",
    "block_count": "n_layer",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.head_count_kv": "",
    LAYER_EPS: "layer_norm_epsilon",
}

_VARIANTS: Final = (
    Architecture("cohere2", "cohere2", "Cohere2ForCausalLM", COHERE2 | WINDOW),
    Architecture("deepseek2", "deepseek_v2", "DeepseekV2ForCausalLM", LATENT),
    Architecture("deepseek2", "deepseek_v3", "DeepseekV3ForCausalLM", LATENT),
    Architecture("gemma", "gemma", "GemmaForCausalLM", norms_plus_one=True),
    Architecture("gemma2", "gemma2", "Gemma2ForCausalLM", SOFT_CAPS | WINDOW, norms_plus_one=True),
    Architecture("gemma3", "gemma3_text", "Gemma3ForCausalLM", SOFT_CAPS | WINDOW | LOCAL_BASE, norms_plus_one=True),
    Architecture("gemma4", "gemma4_text", "Gemma4ForCausalLM", GEMMA4),
    Architecture("glm4moe", "glm4_moe", "Glm4MoeForCausalLM", ROUTED),
    Architecture("gpt-oss", "gpt_oss", "GptOssForCausalLM", GPT_OSS | WINDOW, turns_experts=True, mixes_experts=True),
    Architecture("gpt2", "gpt2", "GPT2LMHeadModel", GPT2, is_transposed=True),
    Architecture("granite", "granite", "GraniteForCausalLM", GRANITE, is_interleaved=True),
    Architecture("llama", "llama", "LlamaForCausalLM", is_interleaved=True),
    Architecture("llama", "mixtral", "MixtralForCausalLM", LOCAL_EXPERTS, is_interleaved=True),
    Architecture("llama4", "llama4_text", "Llama4ForCausalLM", LLAMA4, turns_experts=True),
    Architecture("olmo2", "olmo2", "Olmo2ForCausalLM"),
    Architecture("olmo2", "olmo3", "Olmo3ForCausalLM", WINDOW),
    Architecture("phi3", "phi3", "Phi3ForCausalLM", WINDOW),
    Architecture("qwen2", "qwen2", "Qwen2ForCausalLM"),
    Architecture("qwen2moe", "qwen2_moe", "Qwen2MoeForCausalLM", EXPERTS),
    Architecture("qwen2vl", "qwen2", "Qwen2ForCausalLM"),
    Architecture("qwen3", "qwen3", "Qwen3ForCausalLM"),
    Architecture("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", EXPERTS),
    Architecture("qwen3next", "qwen3_next", "Qwen3NextForCausalLM", EXPERTS | DELTA, norms_plus_one=True),
    Architecture("qwen35", "qwen3_5_text", "Qwen3_5ForCausalLM", DELTA, norms_plus_one=True, tiles_values=True),
    Architecture(
        "qwen35moe",
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        EXPERTS | DELTA,
        norms_plus_one=True,
        tiles_values=True,
    ),
    Architecture("qwen3vl", "qwen3", "Qwen3ForCausalLM"),
    Architecture("qwen3vlmoe", "qwen3_moe", "Qwen3MoeForCausalLM", EXPERTS),
    Architecture("smollm3", "smollm3", "SmolLM3ForCausalLM", is_interleaved=True),
    Architecture("starcoder2", "starcoder2", "Starcoder2ForCausalLM", {LAYER_EPS: "norm_epsilon"}),
)
ARCHITECTURES: Final[Mapping[str, tuple[Architecture, ...]]] = {
    family: tuple(one for one in _VARIANTS if one.family == family)
    for family in sorted({one.family for one in _VARIANTS})
}
"""Families that run, by the name that their files have for them; of several the first one is usual."""
SIGMOID: Final = 2
"""How routers choose experts, as `expert_gating_func` has it."""
WITH_OR_WITHOUT_BIAS: Final = {"glm4moe", "granite", "llama", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "smollm3"}


def architecture_of(header: GgufHeader, name: str) -> Architecture:
    """The family of a file.

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
    if family not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{name}: GGUF of architecture {family!r} is not read; read are {', '.join(ARCHITECTURES)}"
        )
    is_other = {
        "deepseek2": header.number("deepseek2.expert_gating_func") == SIGMOID,
        "llama": bool(header.number("llama.expert_count")),
        "olmo2": bool(header.number("olmo2.attention.sliding_window")),
    }
    return ARCHITECTURES[family][1 if is_other.get(family) else 0]


def written_as(family: str, model_type: str) -> Architecture:
    """How a model of this family was written that is of this type of transformers'."""
    return next(one for one in ARCHITECTURES[family] if one.model_type == model_type)
