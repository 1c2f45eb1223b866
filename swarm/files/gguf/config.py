"""The config.json that a GGUF file's metadata stand for, in transformers' terms. Reads no weights but rope factors.

Fields are named as llama.cpp's converter writes them; what it leaves to llama.cpp's code (scales by a model's size,
the shape of Llama 3's rope) is put back here.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy

from swarm.base.errors import UnsupportedModel
from swarm.files.gguf.architectures import BY_SIGMOID, REQUIRED, SIGMOID, architecture_of, field_of, types_of

if TYPE_CHECKING:
    from swarm.files.gguf.container import GgufHeader, MetadataValue, TensorPlace


EPSILONS: Final = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
LLAMA3_FACTORS: Final = (8.0, 32.0, 16.0, 4.0, 2.0, 64.0)
"""By how much the rope of Llama 3.1 and its kin is stretched; a file has the frequencies that come of it alone."""
LLAMA3_WINDOW: Final = 8192
LLAMA3_BANDS: Final = ((1.0, 4.0), (1.0, 1.0))
"""Between which turns in that window a frequency is stretched in part: those of Llama 3 and of Llama 4."""
LLAMA4_UNNORMED: Final = 128
"""Experts of the one Llama 4 that norms no queries and keys."""
GEMMA_27B: Final = {("gemma2", 46), ("gemma3", 62)}
"""Architectures and layers of the models that scale attention by their width instead of their heads'."""
YARN: Final = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
}
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"


MEANINGLESS: Final[Mapping[str, str]] = {
    "audio.": "parts that hear",
    "expert_shared_count": "said by the shape of their weights too",
    "expert_shared_feed_forward_length": "said by the shape of their weights too",
    "mm.": "parts that see",
    "n_deepstack_layers": "layers that rows of images enter",
    "pooling_type": "how rows become one, of models that embed texts",
    "rope.dimension_sections": "axes of places in images: a text has one",
    "rope.scaling.finetuned": "whether the model was trained with its stretched positions",
    "tensor_data_layout": "how weights lay in files of before this format",
    "vision.": "parts that see",
    "vocab_size": "said by the embedding's rows too",
}
"""Keys, or how they begin, that change no text, and why."""
NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "attention.causal": (True,),
    "attention.layer_norm_epsilon": (1e-5,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "ssm.dt_b_c_rms": (False,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
}
"""Values by which a key says nothing: what classes do that have no name for it."""


@dataclass(frozen=True, slots=True)
class OwnFields:
    """A family's own metadata, with note of what was read: what nobody reads might change the text.

    Attributes:
        values: by key, without the family.
    """

    family: str
    values: Mapping[str, MetadataValue]
    read: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, header: GgufHeader, family: str) -> OwnFields:
        begins = f"{family}."
        own = {key.removeprefix(begins): one for key, one in header.metadata.items() if key.startswith(begins)}
        return cls(family, {key: _short(value) for key, value in own.items()})

    def get(self, key: str) -> MetadataValue | None:
        """The value of a key; None where there is none."""
        self.read.add(key)
        return self.values.get(key)

    def whole(self, key: str, default: int = 0) -> int:
        value = self.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def unread(self) -> dict[str, MetadataValue]:
        """What nobody read, of the values that change texts; of the two epsilons converters write one may be read."""
        read = self.read | (set(EPSILONS) if self.read & self.values.keys() & set(EPSILONS) else set())
        return {
            key: self.values[key]
            for key in sorted(self.values.keys() - read)
            if not key.startswith(tuple(MEANINGLESS))
            and not any(self.values[key] == one for one in NEUTRAL.get(key, ()))
        }


def config_of(header: GgufHeader, name: str, vector: Callable[[str], Sequence[float]]) -> dict[str, Any]:
    """The content of config.json.

    Args:
        header: of the model's first file, with the tensors of all of its files.

    Raises:
        UnsupportedModel: the family does not run, a value is missing or of a form that no class has, or one is not
            understood.
    """
    family = architecture_of(header, name)
    made = [_config_as(model_type, OwnFields.of(header, family), header, name, vector) for model_type in types_of(family)]
    config, unread = min(made, key=lambda one: len(one[1]))
    if unread:
        key = next(iter(unread))
        reason = f"its metadata has {family}.{key} = {str(unread[key])[:60]}, which no class here knows of"
        raise UnsupportedModel(f"{name}: {reason}, and texts might be wrong without it; use the safetensors")
    return config


def _config_as(
    model_type: str, given: OwnFields, header: GgufHeader, name: str, vector: Callable[[str], Sequence[float]]
) -> tuple[dict[str, Any], Mapping[str, MetadataValue]]:
    """The config as one of a type of transformers', and what of the metadata it does not say."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind: Any = CONFIG_MAPPING[model_type]
    for key in REQUIRED:
        if given.whole(key) < 1:
            raise UnsupportedModel(f"{name}: its metadata has no {given.family}.{key}; convert it again")
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
    }
    for key in given.values:
        if (title := field_of(key, kind)) is not None:
            value = given.get(key)
            if title and isinstance(value, list):
                said = set(value) - {0}  # of layers that have none
                if len(said) > 1:
                    reason = f"{given.family}.{key} differs from layer to layer, which no class here has"
                    raise UnsupportedModel(f"{name}: {reason}")
                value = max(said, default=0)
            if title and value != 0:
                config.setdefault(title, value)
    if model_type in BY_SIGMOID and given.values.get("expert_gating_func") == SIGMOID:
        given.get("expert_gating_func")
    embedding = _embedding(header, name)
    layers = given.whole("block_count") - given.whole("nextn_predict_layers")
    if embedding.columns != given.whole("embedding_length") or given.whole("block_count") > len(header.tensors):
        raise UnsupportedModel(f"{name}: damaged: its metadata do not fit its {len(header.tensors)} tensors")
    config[f"{field_of('block_count', kind)}"] = layers
    config["vocab_size"] = embedding.rows
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["dtype"] = _dtype(header)
    config |= _token_ids(header) | _flags(header, kind)
    if "rope_parameters" in kind.__dataclass_fields__ and model_type != "gemma4_text":
        config |= _heads(given, config, kind, name) | _rope(header, given, name, vector)
    if "sliding_window" in kind.__dataclass_fields__:
        config |= {"sliding_window": config.get("sliding_window") or None} | _own_windows(given, layers)
    facts = _FileFacts(name, given, layers, header, vector)
    if "mlp_layer_types" in kind.__dataclass_fields__:
        routed = [one == "ffn_gate_inp" for one in facts.kinds("ffn_gate_inp", "ffn_up")]
        config["mlp_layer_types"] = ["sparse" if one else "dense" for one in routed]
    if (special := SPECIAL.get(model_type)) is not None:
        config |= special(config, facts)
    return config, given.unread() | _unsaid(config, kind, header)


def _unsaid(config: Mapping[str, Any], kind: Any, header: GgufHeader) -> dict[str, MetadataValue]:  # noqa: ANN401
    """What a class has to know and the file does not say, or has otherwise: how many experts, and biases of routers."""
    counted = field_of("expert_count", kind)
    default = kind.__dataclass_fields__[counted].default if counted in kind.__dataclass_fields__ else None
    if default and counted not in config:
        return {"expert_count": 0}
    has_biases = any("exp_probs_b" in name for name in header.tensors)
    own = {"deepseek_v2": False, "deepseek_v3": True}.get(kind.model_type, has_biases)
    return {} if own is has_biases else {"expert_gating_func": 0}


def _short(value: MetadataValue) -> MetadataValue:
    """A float32 as its shortest decimal: what the converter read, and the same in float32."""
    return float(str(numpy.float32(value))) if isinstance(value, float) else value


def _embedding(header: GgufHeader, name: str) -> TensorPlace:
    found = header.tensors.get("token_embd.weight")
    if found is None or len(found.shape) != 2:
        raise UnsupportedModel(f"{name}: it has no token_embd.weight; give the model's own file, or all of its parts")
    return found


def _dtype(header: GgufHeader) -> str:
    """In which type a card computes."""
    matrices = {place.encoding.name for place in header.tensors.values() if len(place.shape) > 1}
    return "float16" if matrices <= {"f16", "f32"} and "f16" in matrices else "bfloat16"


def _token_ids(header: GgufHeader) -> dict[str, Any]:
    named = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {field_name: header.number(f"tokenizer.ggml.{key}_token_id") for field_name, key in named.items()}


def _heads(given: OwnFields, config: Mapping[str, Any], kind: Any, name: str) -> dict[str, Any]:  # noqa: ANN401
    """Width of a head and how much of it turns."""
    if "kv_lora_rank" in config:
        turned, whole = given.whole("rope.dimension_count"), given.whole("attention.key_length_mla")
        if given.family == "minicpm3":  # whose form never changed
            whole = given.whole("attention.key_length")
            config = {**config, "v_head_dim": given.whole("embedding_length") // given.whole("attention.head_count")}
        if not whole:
            raise UnsupportedModel(f"{name}: it was written before latent attention had its form; convert it again")
        for key in ("attention.key_length", "attention.value_length", "attention.head_count_kv"):
            given.get(key)  # of the form with one head for all
        widths = {"head_dim": turned, "qk_rope_head_dim": turned, "qk_nope_head_dim": whole - turned}
        heads = config["num_attention_heads"]
        return {"num_key_value_heads": heads, "v_head_dim": config["v_head_dim"]} | widths
    columns, heads = given.whole("embedding_length"), given.whole("attention.head_count")
    head = given.whole("attention.key_length") or columns // heads
    if (values := given.whole("attention.value_length", head)) != head:
        raise UnsupportedModel(f"{name}: its heads have {head} numbers for keys and {values} for values")
    turned = given.whole("rope.dimension_count", head)
    own = {"head_dim": head} if head * heads != columns or "head_dim" in kind.__dataclass_fields__ else {}
    return own | {"partial_rotary_factor": turned / head if 0 < turned < head else 1.0}


FLAGS: Final[Mapping[str, str]] = {
    "attention_bias": "attn_(?:q|qkv).bias",
    "attention_out_bias": "attn_output.bias",
    "bias": "(?:attn_qkv|ffn_up).bias",
    "lm_head_bias": "output.bias",
    "mlp_bias": "ffn_up.bias",
    "new_decoder_architecture": "attn_norm_2.weight",
    "no_bias": "(?!.*bias).*",
    "qk_layernorm": "attn_q_norm.weight",
    "qkv_bias": "attn_(?:q|qkv).bias",
    "use_bias": "ffn_up.bias",
    "use_qk_norm": "attn_q_norm.weight",
    "use_qkv_bias": "attn_(?:q|qkv).bias",
    "conv_bias": "(?:shortconv.conv|ssm_conv1d).bias",
    "mamba_conv_bias": "ssm_conv1d.bias",
    "use_conv_bias": "ssm_conv1d.bias",
}
"""Of what a model may have or not: the tensor that says it."""


def _flags(header: GgufHeader, kind: Any) -> dict[str, Any]:  # noqa: ANN401
    """What a model of the class may have or not, as the file's tensors have it."""
    own = {re.sub(r"^blk\.\d+\.", "", name) for name in header.tensors}
    fields = kind.__dataclass_fields__
    return {flag: any(re.fullmatch(sign, one) for one in own) for flag, sign in FLAGS.items() if flag in fields}


def _rope(header: GgufHeader, given: OwnFields, name: str, vector: Callable[[str], Sequence[float]]) -> dict[str, Any]:
    """How positions are stretched: as llama.cpp does it, linearly where a file names a factor alone."""
    kind, window = given.get("rope.scaling.type"), given.whole("rope.scaling.original_context_length")
    factor = given.get("rope.scaling.factor") or given.get("rope.scale_linear")
    window = window or given.whole("context_length")
    if ROPE_LONG in header.tensors or ROPE_SHORT in header.tensors:
        scaling: dict[str, Any] = {"rope_type": "longrope"}
        scaling |= {"long_factor": list(vector(ROPE_LONG)), "short_factor": list(vector(ROPE_SHORT))}
        if (attention := given.get("rope.scaling.attn_factor")) is not None:
            scaling |= dict.fromkeys(("attention_factor", "short_mscale", "long_mscale"), attention)
        return {"rope_scaling": scaling, "original_max_position_embeddings": window}
    if ROPE_FREQS in header.tensors:
        return {"rope_scaling": _llama3(vector(ROPE_FREQS), given, name)}
    if kind == "none" or (kind in (None, "linear") and factor in (None, 0.0, 1.0)):
        return {}
    if kind in (None, "linear"):
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind != "yarn" or not isinstance(factor, float):
        family = given.family
        raise UnsupportedModel(f"{name}: {family}.rope.scaling is {kind!r}, which is not read; convert it again")
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": window}
    for field_name, key in YARN.items():
        if (value := given.get(f"rope.scaling.{key}")) is not None:
            yarn[field_name] = value
    return {"rope_scaling": yarn | ({"truncate": False} if given.family == "gpt-oss" else {})}


def _llama3(factors: Sequence[float], given: OwnFields, name: str) -> dict[str, Any]:
    """The few numbers that the divisors of Llama 3's frequencies were made of."""
    base = given.get("rope.freq_base") or 10_000.0
    assert isinstance(base, int | float)
    for factor, (low, high) in itertools.product(LLAMA3_FACTORS, LLAMA3_BANDS):
        made = [_llama3_divisor(base ** (-index / len(factors)), factor, low, high) for index in range(len(factors))]
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(made, factors, strict=True)):
            scaling = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
            return {"rope_type": "llama3", "original_max_position_embeddings": LLAMA3_WINDOW} | scaling
    if all(math.isclose(one, 1.0) for one in factors):
        return {"rope_type": "default"}
    raise UnsupportedModel(f"{name}: its rope_freqs.weight is of no form that transformers has; use the safetensors")


def _llama3_divisor(frequency: float, factor: float, low: float, high: float) -> float:
    """By what Llama 3 divides a frequency. Source: transformers, `_compute_llama3_parameters`."""
    turns = LLAMA3_WINDOW * frequency / (2 * math.pi)
    if turns > high:
        return 1.0
    if turns < low:
        return factor
    smooth = (turns - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


@dataclass(frozen=True, slots=True)
class _FileFacts:
    """What a file says, beside what every family's says.

    Attributes:
        layers: how many there are, without those that predict further tokens.
    """

    name: str
    given: OwnFields
    layers: int
    header: GgufHeader
    vector: Callable[[str], Sequence[float]]

    def kinds(self, *signs: str) -> list[str]:
        """Of each layer the first of some names that one of its tensors has."""
        return [
            next((sign for sign in signs if f"blk.{layer}.{sign}.weight" in self.header.tensors), signs[-1])
            for layer in range(self.layers)
        ]


def _gemma(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    """By what attention is scaled."""
    is_wide = (file.given.family, file.layers) in GEMMA_27B
    width = config["hidden_size"] // config["num_attention_heads"] if is_wide else config["head_dim"]
    return {"query_pre_attn_scalar": width}


def _gpt_oss(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    """Which layers have a window."""
    return _windows(file.given, file.layers, 2) if "sliding_window" in config else {}


def _windows(given: OwnFields, layers: int, period: int) -> dict[str, Any]:
    """Which layers attend to a window, where a file says it of each; else all but the last of each period."""
    pattern = given.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        is_sliding = [bool(one) for one in pattern[:layers]]
    else:
        period = pattern if isinstance(pattern, int) and pattern > 0 else period
        is_sliding = [(layer + 1) % period > 0 for layer in range(layers)]
    return {"layer_types": [("sliding" if one else "full") + "_attention" for one in is_sliding]}


def _own_windows(given: OwnFields, layers: int) -> dict[str, Any]:
    """As `_windows`, but nothing where a file says nothing: the class has that period itself."""
    return _windows(given, layers, 1) if "attention.sliding_window_pattern" in given.values else {}


def _olmo3(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    """Which layers have a window, and rotary embeddings of which only those of the others are stretched."""
    given = file.given
    base = config.get("rope_theta", 10_000.0)
    own = given.get("rope.freq_base_swa") or base
    full = {"rope_type": "default", "rope_theta": base} | (config.get("rope_scaling") or {})
    sliding = {"rope_type": "default", "rope_theta": own}
    places = {"full_attention": full, "sliding_attention": sliding}
    return {"rope_scaling": None, "rope_parameters": places} | _windows(given, file.layers, 4)


def _delta(_: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    """Layers of linear attention, and the width of a head of their values."""
    given, layers = file.given, file.layers
    width = given.whole("ssm.inner_size") // max(1, given.whole("ssm.time_step_rank"))
    period = given.whole("full_attention_interval", 4) or 4
    said = given.get("attention.recurrent_layers")
    linear = said if isinstance(said, list) else [(layer + 1) % period > 0 for layer in range(layers)]
    kinds = ["linear_attention" if one else "full_attention" for one in linear[:layers]]
    return {"linear_value_head_dim": width, "layer_types": kinds}


def _latent(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
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


def _llama4(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    """Chunks of 8,192 tokens in three of four layers, and queries and keys normed but in the model with 128 experts."""
    if "attention.sliding_window" in file.given.values or not config.get("num_local_experts"):
        raise UnsupportedModel(f"{file.name}: a Llama 4 without experts or chunks is not read; use the safetensors")
    return {"use_qk_norm": config["num_local_experts"] != LLAMA4_UNNORMED, "attention_chunk_size": 8192}


def _gemma4(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    """Layers of two kinds, each with heads and rotary embeddings of its own."""
    given, tensors = file.given, file.header.tensors
    kinds = _windows(given, file.layers, 6)["layer_types"]
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


def _mixers(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    """Widths of state spaces."""
    inner, heads = file.given.whole("ssm.inner_size"), file.given.whole("ssm.time_step_rank") or 1
    expand = inner // config["hidden_size"]
    widths = {"mamba_expand": expand, "mamba_d_head": inner // heads, "mamba_d_ssm": inner}
    return widths | {"mamba_head_dim": inner // heads, "expand": expand, "head_dim": inner // heads, "num_heads": heads}


def _of_mixers(config: Mapping[str, Any], file: _FileFacts, *names: str) -> dict[str, Any]:
    widths = _mixers(config, file)
    return {name: widths[name] for name in names}


def _falcon_mamba(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    """A Mamba that norms more."""
    file.given.get("ssm.dt_b_c_rms")
    return _of_mixers(config, file, "expand")


def _granite_hybrid(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    kinds = ["mamba" if one == "ssm_in" else "attention" for one in file.kinds("ssm_in", "attn_q")]
    has_rope = file.given.get("rope.scaling.finetuned") is True
    experts = {name: config.get(name, 0) for name in ("num_local_experts", "num_experts_per_tok")}
    return _of_mixers(config, file, "mamba_expand", "mamba_d_head") | experts | {
        "layer_types": kinds, "position_embedding_type": "rope" if has_rope else None,
    }  # fmt: skip


def _bamba(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    kinds = file.kinds("ssm_in", "attn_q")
    return _of_mixers(config, file, "mamba_expand", "mamba_d_head") | {
        "attn_layer_indices": [layer for layer, kind in enumerate(kinds) if kind == "attn_q"]
    }


def _nemotron_h(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    named = {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    file.given.get("rope.dimension_count")  # nothing turns
    head = file.given.whole("attention.key_length")
    if file.given.get("attention.value_length") != head:
        raise UnsupportedModel(f"{file.name}: its heads have other numbers for values than for keys")
    kinds = [named[one] for one in file.kinds(*named)]
    return _of_mixers(config, file, "mamba_head_dim", "expand") | {"layers_block_type": kinds}


def _jamba(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
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


def _falcon_h1(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    """Weights have the class's multipliers in them."""
    ones = ("lm_head", "embedding", "key", "attention_out", "attention_in", "ssm_in", "ssm_out")
    found = _of_mixers(config, file, "mamba_expand", "mamba_d_head", "mamba_d_ssm")
    found |= {f"{name}_multiplier": 1.0 for name in ones} | {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}
    return found | {"mamba_rms_norm": "blk.0.ssm_norm.weight" in file.header.tensors}


def _lfm2(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    """Which layers are short convolutions."""
    kinds = ["conv" if one == "shortconv.in_proj" else "full_attention" for one in file.kinds("shortconv.in_proj", "attn_q")]
    return {"layer_types": kinds} | ({} if "num_experts" in config else {"block_auto_adjust_ff_dim": False})


def _mpt(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    given, bias = file.given, file.given.get("attention.max_alibi_bias")
    attention = {"alibi": bool(bias), "alibi_bias_max": int(bias or 8), "clip_qkv": given.get("attention.clamp_kqv")}
    return {"attn_config": attention, "expansion_ratio": given.whole("feed_forward_length") // config["d_model"]}


def _dbrx(_: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    given = file.given
    attention = {"kv_n_heads": given.get("attention.head_count_kv"), "clip_qkv": given.get("attention.clamp_kqv")}
    experts = {"ffn_hidden_size": given.get("feed_forward_length"), "moe_num_experts": given.get("expert_count")}
    theta = given.get("rope.freq_base") or 10_000.0
    return {
        "attn_config": attention | {"rope_theta": theta},
        "ffn_config": experts | {"moe_top_k": given.get("expert_used_count")},
        "rope_theta": theta,
    }


def _indexed(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    """Which layers select by an indexer of their own."""
    own = file.given.get("attention.indexer.types")
    kinds = [bool(one) for one in own[: file.layers]] if isinstance(own, list) else [True] * file.layers
    return _latent(config, file) | {"indexer_types": ["full" if one else "shared" for one in kinds]}


def _youtu(_: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    """A DeepSeek without experts: all of its layers are dense."""
    if file.given.whole("leading_dense_block_count", file.layers) < file.layers:
        file.given.read.discard("leading_dense_block_count")
    return {}


def _one_key_head(_: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    return {"multi_query": file.given.get("attention.head_count_kv") == 1}


def _bloom(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    if file.given.get("attention.head_count_kv") not in (None, config["n_head"]):
        raise UnsupportedModel(f"{file.name}: damaged: a BLOOM has as many heads for keys as for queries")
    return {}


def _ministral3(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    """What a stretched rope multiplies scores and queries by."""
    rope = dict(config.get("rope_scaling") or {})
    if (log := file.given.get("rope.scaling.yarn_log_multiplier")) is not None:
        rope |= {"mscale": log, "mscale_all_dim": log}
    if (beta := file.given.get("attention.temperature_scale")) is not None:
        rope["llama_4_scaling_beta"] = beta
    return {"rope_scaling": rope} if rope else {}


SPECIAL: Final[Mapping[str, Callable[[Mapping[str, Any], _FileFacts], dict[str, Any]]]] = {
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
