"""The config.json that a GGUF file's metadata stand for, in transformers' terms. Reads no weights but rope factors.

Fields are named as llama.cpp's converter writes them; what it leaves to llama.cpp's code (scales by a model's size,
the shape of Llama 3's rope) is put back here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy

from swarm.base.errors import UnsupportedModel
from swarm.files.gguf.architectures import (
    COMMON,
    LAYER_EPS,
    REQUIRED,
    WITH_OR_WITHOUT_BIAS,
    architecture_of,
)

if TYPE_CHECKING:
    from swarm.files.gguf.container import GgufHeader, MetadataValue, TensorPlace


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


OF_THEIR_OWN: Final = {"gpt2", "gemma4_text"}
"""Types of models without rotary embeddings, or with several."""
MEANINGLESS: Final[Mapping[str, str]] = {
    "audio.": "parts that hear",
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
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
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

    def unread(self) -> list[str]:
        """Keys that nobody read, and whose values change texts."""
        return sorted(
            key
            for key, value in self.values.items()
            if key not in self.read
            and not key.startswith(tuple(MEANINGLESS))
            and not any(value == one for one in NEUTRAL.get(key, ()))
        )


def config_of(header: GgufHeader, name: str, vector: Callable[[str], Sequence[float]]) -> dict[str, Any]:
    """The content of config.json.

    Args:
        header: of the model's first file, with the tensors of all of its files.

    Raises:
        UnsupportedModel: the family does not run, a value is missing or of a form that no class has, or one is not
            understood.
    """
    architecture = architecture_of(header, name)
    family = architecture.family
    given = OwnFields.of(header, family)
    for key in REQUIRED:
        if given.whole(key) < 1:
            raise UnsupportedModel(f"{name}: its metadata has no {family}.{key}; convert it again")
    config: dict[str, Any] = {"model_type": architecture.model_type, "architectures": [architecture.model_class]}
    names = COMMON | dict(architecture.fields)
    for key, field_name in names.items():
        value = given.get(key)
        if field_name and value is not None:
            if isinstance(value, list):
                raise UnsupportedModel(f"{name}: {family}.{key} differs from layer to layer, which no class here has")
            config[field_name] = value
    embedding = _embedding(header, name)
    if embedding.columns != given.whole("embedding_length") or given.whole("block_count") > len(header.tensors):
        raise UnsupportedModel(f"{name}: damaged: its metadata do not fit its {len(header.tensors)} tensors")
    layers = given.whole("block_count") - given.whole("nextn_predict_layers")
    config[names["block_count"]] = layers
    config["vocab_size"] = embedding.rows
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["dtype"] = _dtype(header)
    config |= _token_ids(header)
    if architecture.model_type not in OF_THEIR_OWN:
        config |= _heads(given, config, name) | _biases(header, family) | _rope(header, given, name, vector)
    if not config.get("sliding_window", 1):
        config["sliding_window"] = None
    if (special := SPECIAL.get(architecture.model_type)) is not None:
        config |= special(config, _FileFacts(name, given, layers, header, vector))
    _check_read(given, name)
    return config


def _check_read(given: OwnFields, name: str) -> None:
    """Refuse a file that says more than its class was told."""
    if given.values.keys() & {"attention.layer_norm_rms_epsilon", LAYER_EPS} & given.read:
        given.read.update(("attention.layer_norm_rms_epsilon", LAYER_EPS))  # converters write what a config has of both
    if unread := given.unread():
        value = str(given.values[unread[0]])[:60]
        reason = f"its metadata has {given.family}.{unread[0]} = {value}, which no class here knows of"
        raise UnsupportedModel(f"{name}: {reason}, and texts might be wrong without it; use the safetensors")


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


def _heads(given: OwnFields, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Width of a head and how much of it turns."""
    if "kv_lora_rank" in config:
        turned, whole = given.whole("rope.dimension_count"), given.whole("attention.key_length_mla")
        if not whole:
            raise UnsupportedModel(f"{name}: it was written before latent attention had its form; convert it again")
        given.get("attention.value_length")
        return {"num_key_value_heads": config["num_attention_heads"], "qk_nope_head_dim": whole - turned}
    head = given.whole("attention.key_length") or config["hidden_size"] // config["num_attention_heads"]
    if (values := given.whole("attention.value_length", head)) != head:
        raise UnsupportedModel(f"{name}: its heads have {head} numbers for keys and {values} for values")
    turned = given.whole("rope.dimension_count", head)
    return {"head_dim": head} | ({"partial_rotary_factor": turned / head} if 0 < turned < head else {})


def _biases(header: GgufHeader, family: str) -> dict[str, Any]:
    """Biases that a family has or has not, as its model has them."""
    if family not in WITH_OR_WITHOUT_BIAS:
        return {}
    flags = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return {flag: True for flag, tensor in flags.items() if tensor in header.tensors}


def _rope(header: GgufHeader, given: OwnFields, name: str, vector: Callable[[str], Sequence[float]]) -> dict[str, Any]:
    """How positions are stretched: as llama.cpp does it, linearly where a file names a factor alone."""
    kind, window = given.get("rope.scaling.type"), given.whole("rope.scaling.original_context_length")
    factor = given.get("rope.scaling.factor") or given.get("rope.scale_linear")
    window = window or given.whole("context_length")
    if ROPE_LONG in header.tensors or ROPE_SHORT in header.tensors:
        scaling: dict[str, Any] = {"rope_type": "longrope"}
        scaling |= {"long_factor": list(vector(ROPE_LONG)), "short_factor": list(vector(ROPE_SHORT))}
        if (attention := given.get("rope.scaling.attn_factor")) is not None:
            scaling["attention_factor"] = attention
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


def _gemma(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    """By what attention is scaled, and which layers have a window."""
    is_wide = (file.given.family, file.layers) in GEMMA_27B
    width = config["hidden_size"] // config["num_attention_heads"] if is_wide else config["head_dim"]
    period = 2 if file.given.family == "gemma2" else 6
    return {"query_pre_attn_scalar": width} | _own_windows(file.given, file.layers, period)


def _gpt_oss(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    """Which layers have a window."""
    return _windows(file.given, file.layers, 2) if "sliding_window" in config else {}


def _glm4_moe(_: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    """Whether queries and keys are normed."""
    file.given.get("expert_gating_func")  # the class has no other
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.header.tensors}


def _windows(given: OwnFields, layers: int, period: int) -> dict[str, Any]:
    """Which layers attend to a window, where a file says it of each; else all but the last of each period."""
    pattern = given.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        is_sliding = [bool(one) for one in pattern[:layers]]
    else:
        period = pattern if isinstance(pattern, int) and pattern > 0 else period
        is_sliding = [(layer + 1) % period > 0 for layer in range(layers)]
    return {"layer_types": [("sliding" if one else "full") + "_attention" for one in is_sliding]}


def _own_windows(given: OwnFields, layers: int, period: int) -> dict[str, Any]:
    """As `_windows`, but nothing where a file says nothing: the class has that period itself."""
    return _windows(given, layers, period) if "attention.sliding_window_pattern" in given.values else {}


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
    kinds = ["linear_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]
    return {"linear_value_head_dim": width, "layer_types": kinds}


def _latent(config: Mapping[str, Any], file: _FileFacts) -> dict[str, Any]:
    """Latent attention: what a stretched rope multiplies scores by, and groups where a file has none."""
    given = file.given
    given.get("expert_gating_func")  # by which the class was chosen
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
    file.given.get("expert_gating_func")  # the class has no other
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


SPECIAL: Final[Mapping[str, Callable[[Mapping[str, Any], _FileFacts], dict[str, Any]]]] = {
    "cohere2": lambda _, file: _own_windows(file.given, file.layers, 4),
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "gemma4_text": _gemma4,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "olmo3": _olmo3,
    "qwen3_5_moe_text": _delta,
    "qwen3_5_text": _delta,
    "qwen3_moe": lambda *_: {"norm_topk_prob": True},
    "qwen3_next": _delta,
    "starcoder2": lambda *_: {"use_bias": True},
}
"""What llama.cpp's code knows of a family, and its files do not say, by the type of model."""
