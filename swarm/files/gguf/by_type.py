"""What llama.cpp's code knows of a type of models, and its files say in a form of their own or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from swarm.base.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from swarm.files.gguf.metadata import FileFacts

LLAMA4_UNNORMED: Final = 128
"""Experts of the one Llama 4 that norms no queries and keys."""
GEMMA_27B: Final = {("gemma2", 46), ("gemma3", 62)}
"""Architectures and layers of the models that scale attention by their width instead of their heads'."""
ROPE_FREQS: Final = "rope_freqs.weight"


def _gemma(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    """By what attention is scaled."""
    is_wide = (file.given.family, file.layers) in GEMMA_27B
    width = config["hidden_size"] // config["num_attention_heads"] if is_wide else config["head_dim"]
    return {"query_pre_attn_scalar": width}


def _gpt_oss(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    """Which layers have a window."""
    return windows(file, 2) if "sliding_window" in config else {}


def windows(file: FileFacts, period: int) -> dict[str, Any]:
    """Which layers attend to a window, where a file says it of each; else all but the last of each period."""
    pattern = file.given.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        is_sliding = [bool(one) for one in pattern[: file.layers]]
    else:
        period = pattern if isinstance(pattern, int) and pattern > 0 else period
        is_sliding = [(layer + 1) % period > 0 for layer in range(file.layers)]
    return {"layer_types": [("sliding" if one else "full") + "_attention" for one in is_sliding]}


def own_windows(file: FileFacts) -> dict[str, Any]:
    """As `windows`, but nothing where a file says nothing: the class has that period itself."""
    return windows(file, 1) if "attention.sliding_window_pattern" in file.given.values else {}


def _olmo3(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    """Which layers have a window, and rotary embeddings of which only those of the others are stretched."""
    given = file.given
    base = config.get("rope_theta", 10_000.0)
    own = given.get("rope.freq_base_swa") or base
    full = {"rope_type": "default", "rope_theta": base} | (config.get("rope_scaling") or {})
    sliding = {"rope_type": "default", "rope_theta": own}
    places = {"full_attention": full, "sliding_attention": sliding}
    return {"rope_scaling": None, "rope_parameters": places} | windows(file, 4)


def _delta(_: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    """Layers of linear attention, and the width of a head of their values."""
    given, layers = file.given, file.layers
    width = given.whole("ssm.inner_size") // max(1, given.whole("ssm.time_step_rank"))
    period = given.whole("full_attention_interval", 4) or 4
    said = given.get("attention.recurrent_layers")
    linear = said if isinstance(said, list) else [(layer + 1) % period > 0 for layer in range(layers)]
    kinds = ["linear_attention" if one else "full_attention" for one in linear[:layers]]
    return {"linear_value_head_dim": width, "layer_types": kinds}


def _latent(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    """Latent attention: what a stretched rope multiplies scores by, and groups where a file has none."""
    given = file.given
    log = given.get("rope.scaling.yarn_log_multiplier")
    found: dict[str, Any] = {"n_group": config.get("n_group", 1), "topk_group": config.get("topk_group", 1)}
    found |= {"q_lora_rank": config.get("q_lora_rank"), "norm_topk_prob": config.get("norm_topk_prob", False)}
    if isinstance(log, float) and config.get("rope_scaling"):
        scale = round(10 * log, 6)  # llama.cpp has a tenth of it, for reasons of its own
        found["rope_scaling"] = config["rope_scaling"] | {"mscale": scale, "mscale_all_dim": scale}
    if config["model_type"] == "deepseek_v2":
        found["topk_method"] = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    return found


def _llama4(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    """Chunks of 8,192 tokens in three of four layers, and queries and keys normed but in the model with 128 experts."""
    if "attention.sliding_window" in file.given.values or not config.get("num_local_experts"):
        raise UnsupportedModel(f"{file.name}: a Llama 4 without experts or chunks is not read; use the safetensors")
    return {"use_qk_norm": config["num_local_experts"] != LLAMA4_UNNORMED, "attention_chunk_size": 8192}


def _gemma4(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    """Layers of two kinds, each with heads and rotary embeddings of its own."""
    given, tensors = file.given, file.header.tensors
    kinds = windows(file, 6)["layer_types"]
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    sliding = [layer for layer in range(file.layers) if layer not in full]
    heads, wide = given.get("attention.head_count_kv"), given.get("feed_forward_length")
    heads = heads if isinstance(heads, list) else [heads or 0] * file.layers
    widths = wide if isinstance(wide, list) else [wide or 0] * file.layers
    shared = config.get("num_kv_shared_layers", 0)
    own = [layer for layer in full if layer < file.layers - shared]
    turned = file.vector(ROPE_FREQS)
    if len(heads) < file.layers or len(widths) < file.layers or not full or not sliding:
        raise UnsupportedModel(f"{file.name}: damaged: its metadata do not fit its {file.layers} layers")
    if given.whole("attention.value_length") != given.whole("attention.key_length"):
        raise UnsupportedModel(f"{file.name}: its heads have other numbers for values than for keys")
    if given.get("attention.value_length_swa") != given.get("attention.key_length_swa"):
        raise UnsupportedModel(f"{file.name}: its heads have other numbers for values than for keys")
    if given.get("rope.dimension_count_swa") != given.get("attention.key_length_swa"):
        raise UnsupportedModel(f"{file.name}: its heads turn in part, which no class here knows of")
    given.get("rope.dimension_count")  # of all of a head: which of it turns, the factors say
    places = {"rope_type": "proportional", "rope_theta": given.get("rope.freq_base") or 10_000.0}
    places["partial_rotary_factor"] = sum(factor == 1 for factor in turned) / len(turned)
    near = {"rope_type": "default", "rope_theta": given.get("rope.freq_base_swa") or 10_000.0}
    per_layer = tensors.get("per_layer_token_embd.weight")
    return {
        "layer_types": kinds,
        "num_key_value_heads": heads[sliding[0]],
        "num_global_key_value_heads": heads[full[0]],
        "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in tensors for layer in own),
        "global_head_dim": given.whole("attention.key_length"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "enable_moe_block": bool(config.get("num_experts")),
        "vocab_size_per_layer_input": config["vocab_size"] if per_layer is None else per_layer.rows,
        "hidden_size_per_layer_input": config.get("hidden_size_per_layer_input", 0),
        "rope_parameters": {"full_attention": places, "sliding_attention": near},
    }


def _mixers(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    """Widths of state spaces."""
    inner, heads = file.given.whole("ssm.inner_size"), file.given.whole("ssm.time_step_rank") or 1
    expand = inner // config["hidden_size"]
    widths = {"mamba_expand": expand, "mamba_d_head": inner // heads, "mamba_d_ssm": inner}
    return widths | {"mamba_head_dim": inner // heads, "expand": expand, "head_dim": inner // heads, "num_heads": heads}


def _of_mixers(config: Mapping[str, Any], file: FileFacts, *names: str) -> dict[str, Any]:
    widths = _mixers(config, file)
    return {name: widths[name] for name in names}


def _falcon_mamba(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    """A Mamba that norms more."""
    file.given.get("ssm.dt_b_c_rms")
    return _of_mixers(config, file, "expand")


def _granite_hybrid(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    kinds = ["mamba" if one == "ssm_in" else "attention" for one in file.kinds("ssm_in", "attn_q")]
    has_rope = file.given.get("rope.scaling.finetuned") is True
    experts = {name: config.get(name, 0) for name in ("num_local_experts", "num_experts_per_tok")}
    return _of_mixers(config, file, "mamba_expand", "mamba_d_head") | experts | {
        "layer_types": kinds, "position_embedding_type": "rope" if has_rope else None,
    }  # fmt: skip


def _bamba(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    kinds = file.kinds("ssm_in", "attn_q")
    if 2 * file.given.whole("rope.dimension_count") != config["hidden_size"] // config["num_attention_heads"]:
        file.given.read.discard("rope.dimension_count")  # the class turns a half, whatever it is told
    return _of_mixers(config, file, "mamba_expand", "mamba_d_head") | {
        "attn_layer_indices": [layer for layer, kind in enumerate(kinds) if kind == "attn_q"]
    }


def _nemotron_h(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    named = {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    file.given.get("rope.dimension_count")  # nothing turns
    head = file.given.whole("attention.key_length")
    if file.given.get("attention.value_length") != head:
        raise UnsupportedModel(f"{file.name}: its heads have other numbers for values than for keys")
    kinds = [named[one] for one in file.kinds(*named)]
    experts = {} if "moe" in kinds else {"n_routed_experts": 0}
    return _of_mixers(config, file, "mamba_head_dim", "expand") | experts | {"layers_block_type": kinds}


def _jamba(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    """Which layers attend and which have experts, by their distance."""
    attending = [layer for layer, kind in enumerate(file.kinds("ssm_in", "attn_q")) if kind == "attn_q"]
    routed = [layer for layer, kind in enumerate(file.kinds("ffn_gate_inp", "ffn_up")) if kind == "ffn_gate_inp"]
    found = _of_mixers(config, file, "mamba_expand")
    for name, layers in (("attn", attending), ("expert", routed)):
        first = layers[0] if layers else file.layers
        period = layers[1] - first if len(layers) > 1 else max(first, file.layers - first) + 1
        if layers != list(range(first, file.layers, period)) and layers:
            raise UnsupportedModel(f"{file.name}: its layers follow no period, and the class has one")
        found |= {f"{name}_layer_offset": first, f"{name}_layer_period": period}
    return found


def _falcon_h1(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    """Weights have the class's multipliers in them."""
    ones = ("lm_head", "embedding", "key", "attention_out", "attention_in", "ssm_in", "ssm_out")
    found = _of_mixers(config, file, "mamba_expand", "mamba_d_head", "mamba_d_ssm")
    found |= {f"{name}_multiplier": 1.0 for name in ones} | {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}
    return found | {"mamba_rms_norm": "blk.0.ssm_norm.weight" in file.header.tensors, "mamba_norm_before_gate": False}


def _lfm2(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    """Which layers are short convolutions."""
    kinds = [
        "conv" if one == "shortconv.in_proj" else "full_attention" for one in file.kinds("shortconv.in_proj", "attn_q")
    ]
    return {"layer_types": kinds} | ({} if "num_experts" in config else {"block_auto_adjust_ff_dim": False})


def _mpt(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    given, bias = file.given, file.given.get("attention.max_alibi_bias")
    if not isinstance(bias, int | float) or not bias:
        raise UnsupportedModel(f"{file.name}: an MPT without biases by distance, which its class does not have")
    attention = {"alibi": True, "alibi_bias_max": int(bias), "clip_qkv": given.get("attention.clamp_kqv")}
    return {"attn_config": attention, "expansion_ratio": given.whole("feed_forward_length") // config["d_model"]}


def _dbrx(_: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    given = file.given
    attention = {"kv_n_heads": given.get("attention.head_count_kv"), "clip_qkv": given.get("attention.clamp_kqv")}
    experts = {"ffn_hidden_size": given.get("feed_forward_length"), "moe_num_experts": given.get("expert_count")}
    theta = given.get("rope.freq_base") or 10_000.0
    return {
        "attn_config": attention | {"rope_theta": theta},
        "ffn_config": experts | {"moe_top_k": given.get("expert_used_count")},
        "rope_theta": theta,
    }


def _indexed(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    """Which layers select by an indexer of their own."""
    own = file.given.get("attention.indexer.types")
    kinds = [bool(one) for one in own[: file.layers]] if isinstance(own, list) else [True] * file.layers
    return _latent(config, file) | {"indexer_types": ["full" if one else "shared" for one in kinds]}


def _afmoe(_: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    """Embeddings are scaled, and weights of experts are normed, as the class always does."""
    if file.given.values.get("expert_weights_norm") is True:
        file.given.get("expert_weights_norm")
    return {"mup_enabled": True}


def _youtu(_: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    """A DeepSeek without experts: all of its layers are dense."""
    if file.given.whole("leading_dense_block_count", file.layers) < file.layers:
        file.given.read.discard("leading_dense_block_count")
    return {}


def _one_key_head(_: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    return {"multi_query": file.given.get("attention.head_count_kv") == 1}


def _bloom(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    if file.given.get("attention.head_count_kv") not in (None, config["n_head"]):
        raise UnsupportedModel(f"{file.name}: damaged: a BLOOM has as many heads for keys as for queries")
    return {}


def _ministral3(config: Mapping[str, Any], file: FileFacts) -> dict[str, Any]:
    """What a stretched rope multiplies scores and queries by."""
    rope = dict(config.get("rope_scaling") or {})
    if (log := file.given.get("rope.scaling.yarn_log_multiplier")) is not None:
        rope |= {"mscale": log, "mscale_all_dim": log}
    if (beta := file.given.get("attention.temperature_scale")) is not None:
        rope["llama_4_scaling_beta"] = beta
    return {"rope_scaling": rope} if rope else {}


SPECIAL: Final[Mapping[str, Callable[[Mapping[str, Any], FileFacts], dict[str, Any]]]] = {
    "afmoe": _afmoe,
    "bamba": _bamba,
    "bloom": _bloom,
    "dbrx": _dbrx,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _falcon_mamba,
    "gpt_bigcode": _one_key_head,
    "granitemoehybrid": _granite_hybrid,
    "jamba": _jamba,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "mamba": lambda config, file: _of_mixers(config, file, "expand"),
    "mamba2": lambda config, file: _of_mixers(config, file, "expand", "head_dim", "num_heads"),
    "ministral3": _ministral3,
    "mpt": _mpt,
    "nemotron_h": _nemotron_h,
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "gemma4_text": _gemma4,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "olmo3": _olmo3,
    "qwen3_5_moe_text": _delta,
    "qwen3_5_text": _delta,
    "qwen3_moe": lambda *_: {"norm_topk_prob": True},
    "qwen3_next": _delta,
    "glm_moe_dsa": _indexed,
    "youtu": _youtu,
    "starcoder2": lambda *_: {"use_bias": True},
}
"""What llama.cpp's code knows of a family, and its files do not say, by the type of model."""
