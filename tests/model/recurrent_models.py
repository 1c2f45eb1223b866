"""Tiny random models of families whose layers keep a state, in three spans of two layers."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

_BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_MIXED = {"layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16, "mamba_d_ssm": 64}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_MIXED, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 16},
    "falcon_h1": {**_MAMBA},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 2},
    "nemotron_h": {
        "num_hidden_layers": None,
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "kimi_linear": {
        **_MIXED,
        **_LATENT,
        "head_dim": None,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}
"""Delta rules, state spaces, both in a layer with attention, convolutions alone, layers that keep nothing, and KDA."""


def recurrent_config(family: str, own: dict[str, Any] | None = None) -> PreTrainedConfig:
    values = {**_BASE, **(RECURRENT[family] if own is None else own)}
    return CONFIG_MAPPING[family](**{name: value for name, value in values.items() if value is not None})


def recurrent_model(family: str, own: dict[str, Any] | None = None) -> PreTrainedModel:
    """A model whose parameters are all random, so that a wrong one changes the logits."""
    config = recurrent_config(family, own)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model: PreTrainedModel = cast("Any", AutoModelForCausalLM).from_config(config).eval().float()
    noise = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.data += torch.randn(weight.shape, generator=noise) * 0.05
    return model
