"""Spans of GGUF models: every family that is read, every published type, against Hugging Face's own classes."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import modeling_gguf_pytorch_utils as by_transformers

from node.model.checkpoint import open_checkpoint
from node.model.loading import format_of
from node.model.packed_span import load_packed
from node.model.span import SpanModel, dissect
from swarm.base.errors import UnsupportedModel
from swarm.base.layers import Span
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import load_whole
from swarm.files.families import span_starts
from swarm.files.gguf.folder import TensorTable
from swarm.files.stored.gguf_source import GgufSource
from swarm.files.stored.source import StoredTensor
from swarm.files.whole_model import load_causal_lm
from tests.model.gguf_files import PUBLISHED, VOCAB, TinyGguf
from tests.model.tiny_models import WINDOW, chain, reference, run_chain

CPU = torch.device("cpu")
SPANS = (Span(0, 1), Span(1, 2), Span(2, 3))
IDS = torch.arange(12) * 7 % VOCAB
GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 64}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "mixtral": ("llama", "mixtral", {}),
    "qwen2": ("qwen2", "qwen2", {"use_sliding_window": False, "layer_types": ["full_attention"] * 3}),
    "qwen2moe": ("qwen2moe", "qwen2_moe", {"num_experts": 4, "shared_expert_intermediate_size": 256}),
    "qwen3": ("qwen3", "qwen3", {}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": []}),
    "gemma": ("gemma", "gemma", {}),
    "gemma2": ("gemma2", "gemma2", GEMMA),
    "gemma3": ("gemma3", "gemma3_text", GEMMA),
    "phi3": ("phi3", "phi3", {}),
    "starcoder2": ("starcoder2", "starcoder2", {}),
    "gpt2": ("gpt2", "gpt2", {"scale_attn_by_inverse_layer_idx": False}),
    "gpt-oss": ("gpt-oss", "gpt_oss", {}),
    "granite": ("granite", "granite", {}),
    "olmo2": ("olmo2", "olmo2", {}),
    "smollm3": ("smollm3", "smollm3", {}),
    "cohere2": ("cohere2", "cohere2", {}),
}
EXPERTS: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
EXPERTS |= {"first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True}
LATENT: dict[str, Any] = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32}
LATENT |= {"v_head_dim": 24, "num_key_value_heads": 4, "head_dim": 16}
HEADS: dict[str, Any] = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2}
HEADS |= {
    "linear_num_value_heads": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
WRITTEN: dict[str, dict[str, Any]] = {
    "deepseek2": {
        "add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
        "add_head_count_kv": 1,
        "add_kv_lora_rank": 32,
        "add_q_lora_rank": 64,
        "add_key_length": 48,
        "add_value_length": 32,
        "add_key_length_mla": 48,
        "add_value_length_mla": 24,
        "add_rope_dimension_count": 16,
        "add_vocab_size": VOCAB,
    },
    "gemma4": {
        "add_shared_kv_layers": 1,
        "add_embedding_length_per_layer_input": 32,
        "add_sliding_window_pattern": [True, False, False],
        "add_key_length": 128,
        "add_value_length": 128,
        "add_key_length_swa": 64,
        "add_value_length_swa": 64,
        "add_rope_dimension_count": 128,
        "add_rope_dimension_count_swa": 64,
        "add_rope_freq_base": 1_000_000.0,
        "add_head_count_kv": [2, 1, 1],
        "add_feed_forward_length": [256, 256, 512],
    },
    "llama4": {
        "add_interleave_moe_layer_step": 2,
        "add_expert_feed_forward_length": 256,
        "add_feed_forward_length": 512,
        "add_vocab_size": VOCAB,
    },
    "gpt-oss": {
        "add_rope_scaling_type": gguf.RopeScalingType.YARN,
        "add_rope_scaling_factor": 32.0,
        "add_rope_scaling_orig_ctx_len": 4096,
        "add_rope_scaling_yarn_beta_fast": 32.0,
        "add_rope_scaling_yarn_beta_slow": 1.0,
        "add_expert_feed_forward_length": 256,
    },
    "glm4moe": {"add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID, "add_rope_dimension_count": 32},
    "qwen2vl": {"add_rope_dimension_sections": [16, 24, 24, 0]},
    "qwen3next": {"add_ssm_inner_size": 128, "add_full_attention_interval": 2},
    "qwen35": {
        "add_ssm_inner_size": 128,
        "add_full_attention_interval": 2,
        "add_rope_dimension_sections": [11, 11, 10, 0],
    },
    "qwen35moe": {"add_ssm_inner_size": 128, "add_full_attention_interval": 2, "add_nextn_predict_layers": 0},
    "olmo3": {
        "add_sliding_window": WINDOW,
        "add_sliding_window_pattern": [True, False, True],
        "add_rope_freq_base": 500_000.0,
        "add_rope_scaling_type": gguf.RopeScalingType.YARN,
        "add_rope_scaling_factor": 8.0,
        "add_rope_scaling_orig_ctx_len": 64,
        "add_rope_scaling_yarn_attn_factor": 1.25,
    },
    "deepseek-v2": {"add_expert_gating_func": gguf.ExpertGatingFuncType.SOFTMAX},
    "qwen3vl": {"add_rope_dimension_sections": [24, 20, 20, 0], "add_num_deepstack_layers": 3},
}
WRITTEN["deepseek-v2"] = WRITTEN["deepseek2"] | WRITTEN["deepseek-v2"]
"""What llama.cpp's converter writes besides, by the writer's methods."""
GEMMA4: dict[str, Any] = {
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB,
    "use_double_wide_mlp": True,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "final_logit_softcapping": 30.0,
    "sliding_window": WINDOW,
}
LLAMA4: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 512,
    "interleave_moe_layer_step": 2,
    "moe_layers": [1],
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "no_rope_layers": [1, 1, 1],
    "layer_types": ["chunked_attention"] * 3,
}
NEW: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek2": ("deepseek2", "deepseek_v3", {**EXPERTS, **LATENT}),
    "glm4moe": ("glm4moe", "glm4_moe", {**EXPERTS, "use_qk_norm": True, "attention_bias": True}),
    "qwen2vl": ("qwen2vl", "qwen2", {"use_sliding_window": False, "layer_types": ["full_attention"] * 3}),
    "qwen3next": ("qwen3next", "qwen3_next", {**HEADS, "num_experts": 4, "shared_expert_intermediate_size": 256}),
    "qwen3vl": ("qwen3vl", "qwen3", {}),
    "gemma4": ("gemma4", "gemma4_text", GEMMA4),
    "llama4": ("llama4", "llama4_text", LLAMA4),
    "qwen35": ("qwen35", "qwen3_5_text", HEADS),
    "qwen35moe": ("qwen35moe", "qwen3_5_moe_text", {**HEADS, "num_experts": 4, "shared_expert_intermediate_size": 256}),
    "olmo3": (
        "olmo2",
        "olmo3",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500_000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1.25,
                },
            },
        },
    ),
    "deepseek-v2": (
        "deepseek2",
        "deepseek_v2",
        {**EXPERTS, **LATENT, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
    ),
}
FAMILIES |= NEW
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SLIDING |= {"sliding_window": WINDOW}
SPACES: dict[str, Any] = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_groups": 2}
SPACES |= {"mamba_n_heads": 8, "mamba_d_head": 64, "tie_word_embeddings": False}
FEW: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {**EXPERTS, "num_key_value_heads": 2, "n_group": 1}
SCALES: dict[str, Any] = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1}
SCALES |= {"logits_scaling": 2.0}
BY_CLASS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "afmoe": (
        "afmoe",
        "afmoe",
        {
            **FEW,
            "sliding_window": WINDOW,
            "num_dense_layers": 1,
            "num_shared_experts": 2,
            "route_scale": 1.5,
            "mup_enabled": True,
        },
    ),
    "arcee": ("arcee", "arcee", {}),
    "bamba": ("granitehybrid", "bamba", {**SPACES, "attn_layer_indices": [1]}),
    "bloom": ("bloom", "bloom", {}),
    "chatglm": ("chatglm", "glm", {}),
    "command-r": ("command-r", "cohere", {"use_qk_norm": True}),
    "dbrx": (
        "dbrx",
        "dbrx",
        {
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 512, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "dots1": ("dots1", "dots1", ROUTED),
    "ernie4_5": ("ernie4_5", "ernie4_5", {}),
    "ernie4_5-moe": ("ernie4_5-moe", "ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}),
    "exaone4": ("exaone4", "exaone4", SLIDING),
    "exaone-moe": ("exaone-moe", "exaone_moe", {**FEW, **SLIDING, "first_k_dense_replace": 1, "num_shared_experts": 1}),
    "falcon": ("falcon", "falcon", {"num_kv_heads": 1, "ffn_hidden_size": 1024}),
    "falcon-new": ("falcon", "falcon", {"num_kv_heads": 2, "ffn_hidden_size": 1024, "new_decoder_architecture": True}),
    "falcon-h1": (
        "falcon-h1",
        "falcon_h1",
        {**SPACES, "mamba_d_ssm": 512, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "falcon-mamba": ("mamba", "falcon_mamba", {"state_size": 16, "time_step_rank": 16}),
    "glm-dsa": (
        "glm-dsa",
        "glm_moe_dsa",
        {
            **{**EXPERTS, **LATENT, "n_group": 1, "index_topk": 6, "index_head_dim": 32, "index_n_heads": 16},
            "indexer_types": ["full", "shared", "full"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "glm4": ("glm4", "glm4", {}),
    "gptneox": ("gptneox", "gpt_neox", {}),
    "granitehybrid": (
        "granitehybrid",
        "granitemoehybrid",
        {
            **SPACES,
            **SCALES,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 256,
        },
    ),
    "granitemoe": ("granitemoe", "granitemoe", {**SCALES, "num_local_experts": 4}),
    "granitemoe-shared": (
        "granitemoe",
        "granitemoeshared",
        {**SCALES, "num_local_experts": 4, "shared_intermediate_size": 256},
    ),
    "hunyuan-dense": ("hunyuan-dense", "hunyuan_v1_dense", {}),
    "hunyuan-moe": ("hunyuan-moe", "hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2}),
    "jais2": ("jais2", "jais2", {}),
    "jamba": ("jamba", "jamba", {**FEW, "attn_layer_offset": 1, "attn_layer_period": 2, "mamba_dt_rank": 16}),
    "lfm2": ("lfm2", "lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}),
    "lfm2moe": (
        "lfm2moe",
        "lfm2_moe",
        {**FEW, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    ),
    "mamba": ("mamba", "mamba", {"state_size": 16, "time_step_rank": 16}),
    "mamba2": ("mamba2", "mamba2", {"num_heads": 8, "head_dim": 64, "state_size": 16, "n_groups": 2}),
    "minicpm3": ("minicpm3", "minicpm3", {**LATENT, "v_head_dim": 64}),
    "minimax-m2": ("minimax-m2", "minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mistral3": ("mistral3", "ministral3", {}),
    "mistral3-plain": ("mistral3", "mistral", {"sliding_window": None}),
    "mpt": ("mpt", "mpt", {}),
    "nemotron": ("nemotron", "nemotron", {}),
    "nemotron_h": (
        "nemotron_h_moe",
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "n_groups": 2,
            "ssm_state_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_shared_expert_intermediate_size": 256,
        },
    ),
    "nemotron_h-dense": (
        "nemotron_h",
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "n_groups": 2,
            "ssm_state_size": 16,
        },
    ),
    "olmo": ("olmo", "olmo", {"clip_qkv": 0.5}),
    "olmoe": ("olmoe", "olmoe", FEW),
    "phi2": ("phi2", "phi", {}),
    "qwen3vlmoe": ("qwen3vlmoe", "qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": []}),
    "phimoe": ("phimoe", "phimoe", {"num_local_experts": 4}),
    "seed_oss": ("seed_oss", "seed_oss", {}),
    "stablelm": ("stablelm", "stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "starcoder": ("starcoder", "gpt_bigcode", {}),
    "youtu": ("deepseek2", "youtu", LATENT),
}
"""Of what is read of the class: a model each, or several where files of one architecture are of several classes."""
FAMILIES |= BY_CLASS
MIXERS: dict[str, Any] = {"add_ssm_inner_size": 512}
WRITTEN |= {
    "afmoe": {
        "add_vocab_size": VOCAB,
        "add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
        "add_expert_weights_norm": True,
    },
    "bamba": {
        **MIXERS,
        "add_head_count_kv": [0, 2, 0],
        "add_rope_dimension_count": 32,
        "add_rope_scaling_finetuned": True,
    },
    "bloom": {"add_head_count_kv": 4},
    "dbrx": {
        "add_head_count_kv": 2,
        "add_clamp_kqv": 8.0,
        "add_expert_count": 4,
        "add_expert_used_count": 2,
        "add_feed_forward_length": 512,
        "add_layer_norm_eps": 1e-5,
    },
    "exaone4": {"add_sliding_window_pattern": [True, False, True]},
    "exaone-moe": {"add_sliding_window_pattern": [True, False, True], "add_nextn_predict_layers": 0},
    "falcon-h1": MIXERS,
    "gptneox": {"add_rope_dimension_count": 16},
    "phi2": {"add_rope_dimension_count": 32},
    "stablelm": {"add_rope_dimension_count": 16},
    "falcon-mamba": {**MIXERS, "add_ssm_dt_b_c_rms": True},
    "granitehybrid": {**MIXERS, "add_head_count_kv": [0, 2, 0], "add_rope_scaling_finetuned": False},
    "hunyuan-moe": {"add_expert_shared_count": 1, "add_expert_feed_forward_length": 256},
    "jamba": {**MIXERS, "add_head_count_kv": [0, 2, 0]},
    "lfm2": {"add_head_count_kv": [0, 2, 0]},
    "lfm2moe": {"add_head_count_kv": [0, 2, 0], "add_expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID},
    "mamba": {**MIXERS, "add_ssm_dt_b_c_rms": False},
    "mamba2": {**MIXERS, "add_ssm_time_step_rank": 8},
    "minicpm3": {"add_key_length": 48, "add_rope_dimension_count": 16},
    "mistral3": {
        "add_rope_scaling_type": gguf.RopeScalingType.YARN,
        "add_rope_scaling_factor": 16.0,
        "add_rope_scaling_orig_ctx_len": 16384,
        "add_rope_scaling_yarn_beta_fast": 32.0,
        "add_rope_scaling_yarn_beta_slow": 1.0,
        "add_rope_scaling_yarn_log_mul": 1.0,
        "add_attn_temperature_scale": 0.1,
    },
    "mpt": {"add_max_alibi_bias": 8.0},
    "nemotron_h": {**MIXERS, "add_head_count_kv": [0, 2, 0], "add_feed_forward_length": [0, 0, 256]},
    "glm-dsa": WRITTEN["deepseek2"]
    | {
        "add_indexer_head_count": 16,
        "add_indexer_key_length": 32,
        "add_indexer_top_k": 6,
        "add_array": ("glm-dsa.attention.indexer.types", [True, False, True]),
        "add_leading_dense_block_count": 1,
    },
    "nemotron_h-dense": {**MIXERS, "add_head_count_kv": [0, 2, 0], "add_feed_forward_length": [0, 0, 256]},
    "starcoder": {"add_head_count_kv": 1},
    "youtu": {name: value for name, value in WRITTEN["deepseek2"].items() if name != "add_expert_gating_func"}
    | {"add_leading_dense_block_count": 3, "add_value_length_mla": 24},
}
READ_BY_TRANSFORMERS = ("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "starcoder2")


def tiny(name: str) -> TinyGguf:
    architecture, model_type, changes = FAMILIES[name]
    made = TinyGguf.of(architecture, model_type, **changes)
    made.fields = WRITTEN.get(name, {})
    if name == "gemma4":  # of layers without a window, a quarter of each head turns
        made.more = {"rope_freqs.weight": torch.tensor([1.0] * 16 + [1e30] * 48)}
    return made


def spans_of(path: Path) -> list[SpanModel]:
    """As a node loads them: packed weights stay as they are in the file."""
    checkpoint = open_checkpoint(path)
    layout = dissect(checkpoint.config)
    form = format_of(checkpoint, layout, "auto", torch.float32, CPU)
    cuts = itertools.pairwise([*span_starts(layout.config), layout.num_layers])
    return [load_packed(checkpoint, Span(start, end), form, CPU) for start, end in cuts]


def logits_of(spans: list[SpanModel], ids: torch.Tensor = IDS) -> torch.Tensor:
    kv_caches = [[KvCache(span.layout, 64)] for span in spans]
    return spans[-1].logits(run_chain(spans, kv_caches, [chain(kv_caches[0][0], ids)]))


@pytest.mark.crossing(part=(0, 2))
@pytest.mark.parametrize("name", FAMILIES)
def test_three_spans_of_a_family_are_the_whole_model(name: str, tmp_path: Path) -> None:
    made = tiny(name)
    path = made.write(tmp_path / f"{name}.gguf")
    own = reference(made.model, IDS)
    spans = spans_of(path)
    assert (logits_of(spans) - own).abs().max() <= 1e-5 * max(1, float(own.abs().max()))
    assert {span.stored_as for span in spans} == {"gguf"}
    if name in READ_BY_TRANSFORMERS:
        compare_tensors(made, path)


def compare_tensors(made: TinyGguf, path: Path) -> None:
    """What is read of a file is what transformers reads of it."""
    read: Any = by_transformers.load_gguf_checkpoint
    theirs = read(path, return_tensors=True, model_to_load=made.model)["tensors"]
    checkpoint = open_checkpoint(path)
    ours = checkpoint.tensors(checkpoint.weight_map)
    assert ours.keys() == theirs.keys()
    for title, tensor in theirs.items():
        assert torch.equal(ours[title].float(), tensor.float()), title


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3moe", "gpt-oss"])
def test_memory_is_the_files_own(name: str, tmp_path: Path) -> None:
    made = tiny(name)
    made.choose = lambda title, _: Kind.Q6_K if title.startswith(("token", "output.")) else Kind.Q4_K
    path = made.write(tmp_path / f"{name}.gguf")
    checkpoint = open_checkpoint(path)
    layout = dissect(checkpoint.config)
    form = format_of(checkpoint, layout, "auto", torch.float32, CPU)
    assert isinstance(checkpoint.source, GgufSource)
    spans = spans_of(path)
    assert (logits_of(spans) - reference(made.model, IDS)).abs().max() <= 1e-5
    for span, model in zip(SPANS, spans, strict=True):
        held = layout.needed(checkpoint.weight_map, span)
        places = TensorTable.read(checkpoint.folder).places
        in_file = sum(places[part][1].size_bytes for one in held for part in checkpoint.source.stored[one])
        assert in_file < 0.35 * 4 * layout.weights_in(span), "packed"
        assert model.weight_bytes <= 1.05 * in_file
        assert abs(layout.bytes_in(span, form) - model.weight_bytes) <= 0.05 * in_file, "known before it is loaded"


def test_published_types_stay_as_they_are_in_the_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny("llama").write(tmp_path / "mixed.gguf"))
    read = checkpoint.read(checkpoint.weight_map)
    packed = {name: one for name, one in read.items() if isinstance(one, StoredTensor)}
    kinds = {one.matrix.encoding for one in packed.values()}
    assert kinds == {kind.name.lower() for kind in PUBLISHED}
    for name, one in packed.items():
        sizes = checkpoint.source.stored_sizes(name)
        assert [size[:2] for size in sizes] == [(one.matrix.rows * one.matrix.columns, one.matrix.size_bytes)]
    assert checkpoint.source.encoding == "gguf"


def test_a_file_that_is_called_by_its_digest_is_served(tmp_path: Path) -> None:
    made = tiny("llama")
    path = made.write(tmp_path / "named.gguf").rename(tmp_path / f"sha256-{'0a' * 32}")
    own = reference(made.model, IDS)
    assert (logits_of(spans_of(path)) - own).abs().max() <= 1e-5
    assert open_checkpoint(path).files(["model.norm.weight"]) == [f"{path.name}.gguf"]


def test_a_span_needs_only_the_parts_that_hold_it(tmp_path: Path) -> None:
    made = tiny("llama")
    first = made.write(tmp_path / "split.gguf", parts=5)
    assert first.name == "split-00001-of-00005.gguf"
    checkpoint = open_checkpoint(first)
    layout = dissect(checkpoint.config)
    assert checkpoint.name == "split"
    held = [checkpoint.files(layout.needed(checkpoint.weight_map, span)) for span in SPANS]
    assert all(0 < len(files) < 5 for files in held)
    assert set().union(*held) == {path.name for path in tmp_path.glob("*.gguf")}
    own = reference(made.model, IDS)
    assert (logits_of(spans_of(tmp_path)) - own).abs().max() <= 1e-5  # the folder holds this one model


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    first = tiny("llama").write(tmp_path / "split.gguf", parts=3)
    (tmp_path / "split-00002-of-00003.gguf").rename(tmp_path / "elsewhere")
    with pytest.raises(Exception, match=r"1 of its 3 parts are missing, such as split-00002-of-00003\.gguf"):
        open_checkpoint(first)
    shutil.copy(first, tmp_path / "split-00002-of-00003.gguf")
    with pytest.raises(UnsupportedModel, match="part 1 of 3, by its own word, and 2 of 3 by its name"):
        open_checkpoint(first)


def test_a_file_that_changed_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny("llama").write(tmp_path / "llama.gguf"))
    with (tmp_path / "llama.gguf").open("ab") as file:
        file.write(b"more")
    with pytest.raises(UnsupportedModel, match=r"bytes instead of \d+; fetch it again"):
        checkpoint.tensors(checkpoint.weight_map)


def test_a_tensor_that_the_class_lacks_is_named(tmp_path: Path) -> None:
    made = tiny("llama")
    made.more = {"blk.0.strange.weight": torch.zeros(4)}
    with pytest.raises(UnsupportedModel, match=r"tensors that LlamaForCausalLM does not have, such as blk\.0\.strange"):
        open_checkpoint(made.write(tmp_path / "strange.gguf"))


@pytest.mark.parametrize("method", ["add_head_count", "add_head_count_kv"])
def test_metadata_that_no_class_can_have_are_one_line(method: str, tmp_path: Path) -> None:
    made = tiny("llama")
    made.fields = {method: 0}
    path = made.write(tmp_path / "zero.gguf")
    with pytest.raises(UnsupportedModel) as caught:
        logits_of(spans_of(path))
    assert "\n" not in str(caught.value)


def test_a_whole_model_and_its_draft_read_the_same_file(tmp_path: Path) -> None:
    made = tiny("qwen3")
    path = made.write(tmp_path / "draft.gguf")
    own = reference(made.model, IDS)
    whole = load_causal_lm(path, torch.float32, "cpu")
    assert (reference(whole, IDS) - own).abs().max() <= 1e-5
    assert load_whole(path, torch.float32).vocab_size == VOCAB


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_a_file_of_plain_floats_is_no_packed_one(kind: Kind, tmp_path: Path) -> None:
    made = TinyGguf.of("llama", "llama", lambda *_: kind)
    checkpoint = open_checkpoint(made.write(tmp_path / "plain.gguf"))
    assert checkpoint.source.encoding == ""
    assert all(isinstance(one, torch.Tensor) for one in checkpoint.read(checkpoint.weight_map).values())
    assert checkpoint.config.dtype == (torch.float16 if kind == Kind.F16 else torch.bfloat16)


@pytest.mark.parametrize("name", ["qwen3next", "qwen35"])
def test_rows_that_a_file_has_in_another_order_stay_packed(name: str, tmp_path: Path) -> None:
    made = tiny(name)
    made.packs = True
    checkpoint = open_checkpoint(made.write(tmp_path / f"{name}.gguf"))
    own = made.model.state_dict()
    names = [one for one in own if ".linear_attn." in one and one in checkpoint.weight_map]
    read = checkpoint.read(names)
    packed = {one for one in names if isinstance(read[one], StoredTensor)}
    turned = "out_proj" if name == "qwen35" else "none"  # whose columns the file has in another order
    assert packed == {one for one in names if "_proj" in one and turned not in one}
    for one in names:
        assert bool(checkpoint.source.stored_sizes(one)) == (one in packed), one
        tensor = read[one]
        plain = tensor.decode() if isinstance(tensor, StoredTensor) else tensor
        assert torch.allclose(plain.view(own[one].shape).float(), own[one].float(), atol=0.02), one


def test_what_a_text_does_not_run_is_left_aside(tmp_path: Path) -> None:
    """Parts that see lie in one file with the language model, as Ollama has them; and layers that predict further."""
    made = tiny("gemma3")
    made.more = {"v.blk.0.attn_k.weight": torch.zeros(4, 4), "mm.mm_input_projection.weight": torch.zeros(4)}
    path = made.write(tmp_path / "eyes.gguf")
    own = reference(made.model, IDS)
    assert (logits_of(spans_of(path)) - own).abs().max() <= 1e-5
    made = tiny("glm4moe")
    made.fields = {**made.fields, "add_block_count": 4, "add_nextn_predict_layers": 1}
    made.more = {"blk.3.nextn.eh_proj.weight": torch.zeros(4, 8), "blk.3.attn_norm.weight": torch.zeros(4)}
    path = made.write(tmp_path / "further.gguf")
    own = reference(made.model, IDS)
    assert (logits_of(spans_of(path)) - own).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("method", "value", "key"),
    [
        ("add_attn_temperature_scale", 0.1, "attention.temperature_scale = 0.1"),
        ("add_rope_scaling_yarn_log_mul", 0.1, "rope.scaling.yarn_log_multiplier = 0.1"),
        ("add_sliding_window", 9, "attention.sliding_window = 9"),
        ("add_logit_scale", 0.5, "logit_scale = 0.5"),
        ("add_causal_attention", False, "attention.causal = False"),
        ("add_clamp_kqv", 8.0, "attention.clamp_kqv = 8.0"),
    ],
)
def test_a_key_that_nobody_read_refuses_the_file_by_name(method: str, value: object, key: str, tmp_path: Path) -> None:
    made = tiny("llama")
    made.fields = {method: value}
    with pytest.raises(UnsupportedModel) as caught:
        open_checkpoint(made.write(tmp_path / "more.gguf"))
    assert f"its metadata has llama.{key}, which no class here knows of" in str(caught.value)


def test_keys_that_change_no_text_refuse_nothing(tmp_path: Path) -> None:
    made = tiny("llama")
    made.fields = {
        "add_vocab_size": VOCAB,
        "add_causal_attention": True,
        "add_clamp_kqv": 0.0,
        "add_sliding_window": 0,
        "add_layer_norm_eps": 1e-5,
        "add_rope_dimension_sections": [1, 1, 1, 0],
    }
    open_checkpoint(made.write(tmp_path / "same.gguf"))


def test_a_tensor_of_another_shape_than_the_metadata_say_is_named(tmp_path: Path) -> None:
    made = tiny("llama")
    made.fields = {"add_feed_forward_length": 512}
    with pytest.raises(UnsupportedModel) as caught:
        open_checkpoint(made.write(tmp_path / "wide.gguf"))
    assert "ffn_gate.weight has the shape [256, 256], and by the metadata" in str(caught.value)
    assert "\n" not in str(caught.value)
