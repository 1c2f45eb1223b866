"""The config.json that a GGUF file's metadata stand for, in transformers' terms. Reads no weights but rope factors.

Fields are named as llama.cpp's converter writes them; what it leaves to llama.cpp's code (scales by a model's size,
the shape of Llama 3's rope) is put back here.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from swarm.base.errors import UnsupportedModel
from swarm.files.gguf.architectures import BY_SIGMOID, REQUIRED, SIGMOID, architecture_of, field_of, types_of
from swarm.files.gguf.by_type import ROPE_FREQS, SPECIAL, own_windows
from swarm.files.gguf.metadata import FileFacts, OwnFields

if TYPE_CHECKING:
    from swarm.files.gguf.container import GgufHeader, MetadataValue, TensorPlace


LLAMA3_FACTORS: Final = (8.0, 32.0, 16.0, 4.0, 2.0, 64.0)
"""By how much the rope of Llama 3.1 and its kin is stretched; a file has the frequencies that come of it alone."""
LLAMA3_WINDOW: Final = 8192
LLAMA3_BANDS: Final = ((1.0, 4.0), (1.0, 1.0))
"""Between which turns in that window a frequency is stretched in part: those of Llama 3 and of Llama 4."""
YARN: Final = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
}
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def config_of(header: GgufHeader, name: str, vector: Callable[[str], Sequence[float]]) -> dict[str, Any]:
    """The content of config.json.

    Args:
        header: of the model's first file, with the tensors of all of its files.

    Raises:
        UnsupportedModel: the family does not run, a value is missing or of a form that no class has, or one is not
            understood.
    """
    family = architecture_of(header, name)
    made = [_config_as(one, FileFacts.of(header, family, name, vector)) for one in types_of(family)]
    config, unread = min(made, key=lambda one: len(one[1]))
    if unread:
        key = next(iter(unread))
        reason = f"its metadata has {family}.{key} = {str(unread[key])[:60]}, which no class here knows of"
        raise UnsupportedModel(f"{name}: {reason}, and texts might be wrong without it; use the safetensors")
    return config


def _config_as(model_type: str, file: FileFacts) -> tuple[dict[str, Any], Mapping[str, MetadataValue]]:
    """The config as one of a type of transformers', and what of the metadata it does not say."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    kind, given, header = CONFIG_MAPPING[model_type], file.given, file.header
    fields: Mapping[str, Any] = kind.__dataclass_fields__
    for key in REQUIRED:
        if given.whole(key) < 1:
            raise UnsupportedModel(f"{file.name}: its metadata has no {given.family}.{key}; convert it again")
    config: dict[str, Any] = {"model_type": model_type, "architectures": [CLASSES[model_type]], **_named(file, kind)}
    embedding = _embedding(header, file.name)
    if embedding.columns != given.whole("embedding_length") or given.whole("block_count") > len(header.tensors):
        raise UnsupportedModel(f"{file.name}: damaged: its metadata do not fit its {len(header.tensors)} tensors")
    config[f"{field_of('block_count', kind)}"] = file.layers
    config["vocab_size"] = embedding.rows
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["dtype"] = _dtype(header)
    config |= _token_ids(header) | _flags(header, fields)
    if "rope_parameters" in fields and model_type != "gemma4_text":
        config |= _heads(file, config, fields) | (_rope(file) or _plain_rope(kind))
    if "sliding_window" in fields:
        config |= {"sliding_window": config.get("sliding_window") or None} | own_windows(file)
    if "mlp_layer_types" in fields:
        routed = [one == "ffn_gate_inp" for one in file.kinds("ffn_gate_inp", "ffn_up")]
        config["mlp_layer_types"] = ["sparse" if one else "dense" for one in routed]
    if (special := SPECIAL.get(model_type)) is not None:
        config |= special(config, file)
    return config, given.unread() | _unsaid(config, kind, header)


def _named(file: FileFacts, kind: Any) -> dict[str, Any]:  # noqa: ANN401 - any of transformers' config classes
    """Values of the metadata that the class has a name for."""
    given = file.given
    found: dict[str, Any] = {}
    for key in given.values:
        if (title := field_of(key, kind)) is None:
            continue
        value = given.get(key)
        if title and isinstance(value, list):
            said = set(value) - {0}  # of layers that have none
            if len(said) > 1:
                reason = f"{given.family}.{key} differs from layer to layer, which no class here has"
                raise UnsupportedModel(f"{file.name}: {reason}")
            value = max(said, default=0)
        if title and value != 0:
            found.setdefault(title, value)
    if kind.model_type in BY_SIGMOID and given.values.get("expert_gating_func") == SIGMOID:
        given.get("expert_gating_func")
    return found


def _unsaid(config: Mapping[str, Any], kind: Any, header: GgufHeader) -> dict[str, MetadataValue]:  # noqa: ANN401
    """What a class has to know and the file does not say, or has otherwise: how many experts, and biases of routers."""
    counted = field_of("expert_count", kind)
    default = kind.__dataclass_fields__[counted].default if counted in kind.__dataclass_fields__ else None
    if default and counted not in config:
        return {"expert_count": 0}
    has_biases = any("exp_probs_b" in name for name in header.tensors)
    own = {"deepseek_v2": False, "deepseek_v3": True}.get(kind.model_type, has_biases)
    return {} if own is has_biases else {"expert_gating_func": 0}


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


def _heads(file: FileFacts, config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Width of a head and how much of it turns."""
    given, name = file.given, file.name
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
    own = {"head_dim": head} if head * heads != columns or "head_dim" in fields else {}
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


def _flags(header: GgufHeader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a model of the class may have or not, as the file's tensors have it."""
    own = {re.sub(r"^blk\.\d+\.", "", name) for name in header.tensors}
    return {flag: any(re.fullmatch(sign, one) for one in own) for flag, sign in FLAGS.items() if flag in fields}


def _rope(file: FileFacts) -> dict[str, Any]:
    """How positions are stretched: as llama.cpp does it, linearly where a file names a factor alone."""
    given, name, header, vector = file.given, file.name, file.header, file.vector
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


def _plain_rope(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - any of transformers' config classes
    """What a class has to hear where a file stretches nothing: some stretch unless told otherwise."""
    own = kind().rope_parameters or {}
    return {"rope_scaling": {"rope_type": "default"}} if own.get("rope_type", "default") != "default" else {}


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
