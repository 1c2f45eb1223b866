"""The config.json that a GGUF file's metadata stand for, in transformers' terms. Reads no weights but rope factors.

Fields are named as llama.cpp's converter writes them; what it leaves to llama.cpp's code (scales by a model's size,
the shape of Llama 3's rope) is put back here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy

from swarm.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from swarm.models.gguf.container import GgufHeader, MetadataValue, TensorPlace


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a family is written to GGUF.

    Attributes:
        model_type: of transformers.
        model_class: of transformers, for the config's `architectures`.
        fields: names in the config that are not the common ones, by key of the metadata; "" leaves a key out.
        is_interleaved: whether the rows of queries and keys were put in the order in which llama.cpp turns them.
        norms_plus_one: whether norms are stored with one added.
        is_transposed: whether the class has its linear weights the other way round.
        mixes_experts: whether the class has experts the other way round, with gate and up row by row.
    """

    model_type: str
    model_class: str
    fields: Mapping[str, str] = field(default_factory=dict)
    is_interleaved: bool = False
    norms_plus_one: bool = False
    is_transposed: bool = False
    mixes_experts: bool = False


COMMON: Final = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
REQUIRED: Final = ("context_length", "block_count", "embedding_length", "attention.head_count")

EXPERTS: Final = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
LOCAL_EXPERTS: Final = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
GPT_OSS: Final = LOCAL_EXPERTS | {"expert_feed_forward_length": "intermediate_size"}
COHERE2: Final = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
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
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", COHERE2),
    "gemma": Architecture("gemma", "GemmaForCausalLM", norms_plus_one=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", SOFT_CAPS, norms_plus_one=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", SOFT_CAPS, norms_plus_one=True),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", GPT_OSS, mixes_experts=True),
    "gpt2": Architecture("gpt2", "GPT2LMHeadModel", GPT2, is_transposed=True),
    "granite": Architecture("granite", "GraniteForCausalLM", GRANITE, is_interleaved=True),
    "llama": Architecture("llama", "LlamaForCausalLM", is_interleaved=True),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM"),
    "phi3": Architecture("phi3", "Phi3ForCausalLM"),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", EXPERTS),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", EXPERTS),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", is_interleaved=True),
    "starcoder2": Architecture("starcoder2", "Starcoder2ForCausalLM", {"attention.layer_norm_epsilon": "norm_epsilon"}),
}
"""Families that run, by the name that their files have for them."""
WITH_OR_WITHOUT_BIAS: Final = {"granite", "llama", "qwen3", "qwen3moe", "smollm3"}
MIXTRAL: Final = Architecture("mixtral", "MixtralForCausalLM", LOCAL_EXPERTS, is_interleaved=True)
"""What a `llama` file with experts is."""

LLAMA3_FACTORS: Final = (8.0, 32.0, 16.0, 4.0, 2.0, 64.0)
"""By how much the rope of Llama 3.1 and its kin is stretched; a file has the frequencies that come of it alone."""
LLAMA3_WINDOW: Final = 8192
GEMMA_27B: Final = {("gemma2", 46), ("gemma3", 62)}
"""Architectures and layers of the models that scale attention by their width instead of their heads'."""
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"


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
    if family == "llama" and header.number("llama.expert_count"):
        return MIXTRAL
    if family not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModel(f"{name}: GGUF of architecture {family!r} is not read; read are {known}")
    return ARCHITECTURES[family]


def config_of(header: GgufHeader, name: str, vector: Callable[[str], Sequence[float]]) -> dict[str, Any]:
    """The content of config.json.

    Args:
        header: of the model's first file, with the tensors of all of its files.
        name: of the model, for messages.
        vector: reads a small tensor.

    Raises:
        UnsupportedModel: the family does not run, or a value is missing or of a form that no class has.
    """
    family, architecture = header.text("general.architecture"), architecture_of(header, name)
    given = {key: _short(value) for key, value in _own_fields(header, family).items()}
    for key in REQUIRED:
        value = given.get(key)
        if not isinstance(value, int) or value < 1:
            raise UnsupportedModel(f"{name}: its metadata has no {family}.{key}; convert it again")
    names = COMMON | dict(architecture.fields)
    config: dict[str, Any] = {"model_type": architecture.model_type, "architectures": [architecture.model_class]}
    for key, field_name in names.items():
        if field_name and key in given:
            if isinstance(given[key], list):
                raise UnsupportedModel(f"{name}: {family}.{key} differs from layer to layer, which no class here has")
            config[field_name] = given[key]
    embedding = _embedding(header, name)
    if embedding.columns != given["embedding_length"] or not 0 < int(str(given["block_count"])) <= len(header.tensors):
        raise UnsupportedModel(f"{name}: damaged: its metadata do not fit its {len(header.tensors)} tensors")
    config["vocab_size"] = embedding.rows
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config["dtype"] = _dtype(header)
    config |= _token_ids(header)
    if architecture.model_type != "gpt2":
        config |= _heads(given) | _biases(header, family) | _rope(header, given, family, name, vector)
    if not config.get("sliding_window", 1):
        config["sliding_window"] = None
    return config | _special(family, config, given)


def _own_fields(header: GgufHeader, family: str) -> dict[str, MetadataValue]:
    prefix = f"{family}."
    return {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}


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


def _heads(given: Mapping[str, MetadataValue]) -> dict[str, Any]:
    """Width of a head and how much of it turns."""
    width, heads = given["embedding_length"], given["attention.head_count"]
    assert isinstance(width, int)
    assert isinstance(heads, int)
    turned = given.get("rope.dimension_count")
    head = given.get("attention.key_length") or width // max(1, heads)
    found: dict[str, Any] = {"head_dim": head}
    if isinstance(turned, int) and isinstance(head, int) and 0 < turned < head:
        found["partial_rotary_factor"] = turned / head
    return found


def _biases(header: GgufHeader, family: str) -> dict[str, Any]:
    """Biases that a family has or has not, as its model has them."""
    if family not in WITH_OR_WITHOUT_BIAS:
        return {}
    flags = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return {flag: True for flag, tensor in flags.items() if tensor in header.tensors}


def _rope(
    header: GgufHeader,
    given: Mapping[str, MetadataValue],
    family: str,
    name: str,
    vector: Callable[[str], Sequence[float]],
) -> dict[str, Any]:
    """How positions are stretched."""
    kind, factor = given.get("rope.scaling.type"), given.get("rope.scaling.factor")
    window = given.get("rope.scaling.original_context_length")
    if ROPE_LONG in header.tensors or ROPE_SHORT in header.tensors:
        scaling: dict[str, Any] = {"rope_type": "longrope"}
        scaling |= {"long_factor": list(vector(ROPE_LONG)), "short_factor": list(vector(ROPE_SHORT))}
        if "rope.scaling.attn_factor" in given:
            scaling["attention_factor"] = given["rope.scaling.attn_factor"]
        return {"rope_scaling": scaling, "original_max_position_embeddings": window or given["context_length"]}
    if ROPE_FREQS in header.tensors:
        return {"rope_scaling": _llama3(vector(ROPE_FREQS), given, name)}
    if kind in (None, "none") or (kind == "linear" and factor in (None, 1.0)):
        return {}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind != "yarn" or not isinstance(factor, float) or not isinstance(window, int):
        raise UnsupportedModel(f"{name}: {family}.rope.scaling is {kind!r}, which is not read; convert it again")
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": window}
    betas = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
    yarn |= {field_name: given[key] for field_name, key in betas.items() if key in given}
    return {"rope_scaling": yarn | ({"truncate": False} if family == "gpt-oss" else {})}


def _llama3(factors: Sequence[float], given: Mapping[str, MetadataValue], name: str) -> dict[str, Any]:
    """The few numbers that the divisors of Llama 3's frequencies were made of."""
    base = given.get("rope.freq_base", 10_000.0)
    assert isinstance(base, int | float)
    for factor in LLAMA3_FACTORS:
        made = [_llama3_divisor(base ** (-index / len(factors)), factor) for index in range(len(factors))]
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(made, factors, strict=True)):
            scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            return {"rope_type": "llama3", "original_max_position_embeddings": LLAMA3_WINDOW} | scaling
    if all(math.isclose(one, 1.0) for one in factors):
        return {"rope_type": "default"}
    raise UnsupportedModel(f"{name}: its rope_freqs.weight is of no form that transformers has; use the safetensors")


def _llama3_divisor(frequency: float, factor: float, low: float = 1.0, high: float = 4.0) -> float:
    """By what Llama 3 divides a frequency. Source: transformers, `_compute_llama3_parameters`."""
    turns = LLAMA3_WINDOW * frequency / (2 * math.pi)
    if turns > high:
        return 1.0
    if turns < low:
        return factor
    smooth = (turns - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


def _special(family: str, config: Mapping[str, Any], given: Mapping[str, MetadataValue]) -> dict[str, Any]:
    """What llama.cpp's code knows of a family, and its files do not say."""
    match family:
        case "gemma2" | "gemma3":
            is_wide = (family, config["num_hidden_layers"]) in GEMMA_27B
            width = config["hidden_size"] // config["num_attention_heads"] if is_wide else config["head_dim"]
            return {"query_pre_attn_scalar": width}
        case "qwen3moe":
            return {"norm_topk_prob": True}
        case "starcoder2":
            return {"use_bias": True}
        case "gpt-oss" if "attention.sliding_window" in given:
            return {
                "layer_types": [
                    ("sliding", "full")[index % 2] + "_attention" for index in range(config["num_hidden_layers"])
                ]
            }
    return {}
