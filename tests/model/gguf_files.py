"""Small GGUF files, written by the format's own library as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import gguf
import numpy
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.model.tiny_models import _BASE as BASE
from tests.model.tiny_models import FAMILIES as NAMED
from tests.model.tiny_models import OTHER_KINDS as OTHERS
from tests.model.tiny_models import tiny_config
from tests.property.tiny_tokenizers import byte_level

VOCAB: Final = 320
SIZES: Final = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "intermediate_size": 256,
    "head_dim": 64,
    "moe_intermediate_size": 256,
}
"""As small as blocks of 256 values allow."""

PUBLISHED: Final = (
    Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K,
    Kind.IQ4_NL, Kind.IQ4_XS, Kind.BF16, Kind.F16,
)  # fmt: skip
SCALES_AT: Final = {
    Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}  # fmt: skip
"""Where a block has its float16 scales, of the types that the library only decodes."""
SMALL: Final = {Kind.Q2_K: 1e-3, Kind.Q3_K: 4e-4, Kind.IQ4_NL: 4e-4, Kind.IQ4_XS: 2e-5}
INTERLEAVED: Final = {"arcee", "granite", "granitehybrid", "granitemoe", "llama", "mistral3", "olmo", "smollm3"}
PLUS_ONE: Final = {"gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe"}
WINDOWED: Final = {
    "afmoe", "cohere2", "exaone4", "exaone-moe", "gemma2", "gemma3", "gemma4", "gpt-oss", "phi3",
}  # fmt: skip
UNWRITTEN: Final = {
    "lfm2moe": {"norm_topk_prob", "routed_scaling_factor"},
    "mamba2": {"time_step_rank", "head_dim"},
    "minimax-m2": {"norm_topk_prob"},
    "nemotron_h": {"n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob"},
    "olmoe": {"norm_topk_prob"},
    "qwen2moe": {"norm_topk_prob"},
    "qwen3moe": {"norm_topk_prob"},
    "qwen35moe": {"norm_topk_prob"},
    "qwen3next": {"norm_topk_prob"},
}
"""What converters leave to llama.cpp's code."""
METHODS: Final = {
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
    "attention_multiplier": "add_attention_scale",
    "embedding_multiplier": "add_embedding_scale",
    "residual_multiplier": "add_residual_scale",
    "logits_scaling": "add_logit_scale",
    "logit_scale": "add_logit_scale",
    "num_experts": "add_expert_count",
    "num_local_experts": "add_expert_count",
    "num_experts_per_tok": "add_expert_used_count",
    "top_k_experts": "add_expert_used_count",
    "moe_intermediate_size": "add_expert_feed_forward_length",
    "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
    "shared_intermediate_size": "add_expert_shared_feed_forward_length",
    "moe_shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
    "n_routed_experts": "add_expert_count",
    "moe_num_experts": "add_expert_count",
    "moe_k": "add_expert_used_count",
    "moe_topk": "add_expert_used_count",
    "n_shared_experts": "add_expert_shared_count",
    "num_shared_experts": "add_expert_shared_count",
    "moe_num_shared_experts": "add_expert_shared_count",
    "first_k_dense_replace": "add_leading_dense_block_count",
    "moe_layer_start_index": "add_leading_dense_block_count",
    "num_dense_layers": "add_leading_dense_block_count",
    "moe_layer_interval": "add_interleave_moe_layer_step",
    "routed_scaling_factor": "add_expert_weights_scale",
    "route_scale": "add_expert_weights_scale",
    "norm_topk_prob": "add_expert_weights_norm",
    "route_norm": "add_expert_weights_norm",
    "n_group": "add_expert_group_count",
    "topk_group": "add_expert_group_used_count",
    "clip_qkv": "add_clamp_kqv",
    "use_parallel_residual": "add_parallel_residual",
    "conv_L_cache": "add_shortconv_l_cache",
    "q_lora_rank": "add_q_lora_rank",
    "kv_lora_rank": "add_kv_lora_rank",
    "linear_conv_kernel_dim": "add_ssm_conv_kernel",
    "linear_key_head_dim": "add_ssm_state_size",
    "linear_num_key_heads": "add_ssm_group_count",
    "linear_num_value_heads": "add_ssm_time_step_rank",
    "conv_kernel": "add_ssm_conv_kernel",
    "mamba_d_conv": "add_ssm_conv_kernel",
    "state_size": "add_ssm_state_size",
    "ssm_state_size": "add_ssm_state_size",
    "mamba_d_state": "add_ssm_state_size",
    "n_groups": "add_ssm_group_count",
    "mamba_n_groups": "add_ssm_group_count",
    "time_step_rank": "add_ssm_time_step_rank",
    "mamba_dt_rank": "add_ssm_time_step_rank",
    "num_heads": "add_ssm_time_step_rank",
    "mamba_n_heads": "add_ssm_time_step_rank",
    "mamba_num_heads": "add_ssm_time_step_rank",
}
"""The writer's method for a value of the config."""

LENGTHS: Final = ("max_position_embeddings", "seq_length", "max_seq_len")
MIXED: Final = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(?:mixer|mamba)\.(A_log|D|dt_bias|norm\.weight)")
"""Values of a state space that the converter computes anew."""

Choose = Callable[[str, int], Kind]
"""Picks the type of the matrix of this name, and with this number among all matrices."""


def mixed(_: str, number: int) -> Kind:
    """Every published type, one after the other."""
    return PUBLISHED[number % len(PUBLISHED)]


@dataclass
class TinyGguf:
    """What a GGUF file was made of.

    Attributes:
        family: the architecture, as the file has it.
        model: whose values are those that the file decodes to, in float32.
        choose: types of matrices.
        fields: more metadata: method of the writer, and its argument, or a tuple of them.
        more: tensors that the class does not have.
        seed: of blocks that are drawn.
        packs: whether tensors that the converter takes apart are rounded to 8 bits.
    """

    family: str
    model: PreTrainedModel
    choose: Choose = mixed
    fields: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, torch.Tensor] = field(default_factory=dict)
    seed: int = 0
    packs: bool = False

    @classmethod
    def of(cls, family: str, model_type: str, choose: Choose = mixed, **changes: Any) -> TinyGguf:  # noqa: ANN401
        """A tiny random model of a family."""
        kind: Any = CONFIG_MAPPING[model_type]
        layered = {"gemma4_text", "llama4_text"}  # whose layers are made of what the config was made with
        if model_type in layered or model_type not in NAMED | OTHERS or model_type in ("falcon", "mpt"):
            own = {**BASE, **SIZES, **changes}
            known = own if model_type in layered else {*kind.__dataclass_fields__, *kind.attribute_map}
            config = kind(**{kind.attribute_map.get(name, name): own[name] for name in own if name in known})
            config.allow_global_per_layer_attribute_access = True
            return cls._of(family, config, choose)
        config = tiny_config(model_type, SIZES)
        for name, value in {**SIZES, **changes}.items():
            if hasattr(config, name):
                setattr(config, name, value)
        return cls._of(family, config, choose)

    @classmethod
    def _of(cls, family: str, config: PreTrainedConfig, choose: Choose) -> TinyGguf:
        torch.manual_seed(0)
        made: Any = cast("Any", AutoModelForCausalLM).from_config(config, attn_implementation="eager")
        model: PreTrainedModel = made.eval().float()
        for weight in model.parameters():
            weight.data += torch.randn(weight.shape) * 0.05
        return cls(family, model, choose)

    def write(self, path: Path, parts: int = 1) -> Path:
        """Write the file; with several parts, the first of them is returned."""
        tensors = self._encoded() | {name: (value.numpy(), Kind.F32) for name, value in self.more.items()}
        names = (
            [path]
            if parts == 1
            else [path.with_name(f"{path.stem}-{part + 1:05}-of-{parts:05}.gguf") for part in range(parts)]
        )
        for part, name in enumerate(names):
            writer = gguf.GGUFWriter(name, self.family)
            if part == 0:
                self._metadata(writer)
                add_tokenizer(writer)
            if parts > 1:
                writer.add_uint16("split.no", part)
                writer.add_uint16("split.count", parts)
                writer.add_int32("split.tensors.count", len(tensors))
            for index, (title, (values, kind)) in enumerate(tensors.items()):
                if index * parts // len(tensors) == part:
                    writer.add_tensor(title, values, raw_dtype=kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        return names[0]

    def _encoded(self) -> dict[str, tuple[NDArray[Any], Kind]]:
        """Tensors as the file has them; the model gets the values that they decode to."""
        found: dict[str, tuple[NDArray[Any], Kind]] = {}
        random = numpy.random.default_rng(self.seed)
        state, number = self.model.state_dict(), 0
        for ours, parts in self._names(state):
            if own := converted(ours, state[ours].float(), self.model.config, self.family):
                found |= {title: self._rounded(values.contiguous().numpy()) for title, values in own.items()}
                continue
            pieces = state[ours].float().numpy()
            split = self._halves(pieces) if len(parts) > 1 else [pieces]
            decoded = []
            for title, piece in zip(parts, split, strict=True):
                stored = self._stored(title, piece)
                kind = Kind.F32
                if stored.ndim > 1 and title.endswith("weight") and not re.search("gate_inp|position", title):
                    kind, number = self.choose(title, number), number + 1
                    if stored.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
                        kind = Kind.F16
                found[title], values = encode(stored, kind, random)
                decoded.append(self._restored(title, values, piece.shape))
            if len(parts) > 1:
                for half, values in zip(self._halves(pieces), decoded, strict=True):
                    half[:] = values  # views of `pieces`
            state[ours].copy_(torch.from_numpy(pieces if len(parts) > 1 else decoded[0]))
        return found

    def _rounded(self, values: NDArray[Any]) -> tuple[NDArray[Any], Kind]:
        """As it is, or in blocks of 8 bits where these are asked for: then the model keeps its own values."""
        if self.packs and values.ndim == 2 and values.shape[1] % 32 == 0:
            return gguf.quants.quantize(values, Kind.Q8_0), Kind.Q8_0
        return values, Kind.F32

    def _halves(self, both: NDArray[Any]) -> list[NDArray[Any]]:
        """Gate and up of all experts, as views."""
        if self.family == "gpt-oss":
            return [both[..., 0::2], both[..., 1::2]]
        if self.family == "llama4":
            return numpy.split(both, 2, axis=2)
        if both.ndim == 2:
            return numpy.split(both, 2, axis=0)
        return numpy.split(both, 2, axis=1)

    def _names(self, state: Mapping[str, torch.Tensor]) -> list[tuple[str, tuple[str, ...]]]:
        number = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == self.family)
        names = gguf.get_tensor_name_map(number, self.model.config.num_hidden_layers)
        found: list[tuple[str, tuple[str, ...]]] = []
        for ours in state:
            if ours == "lm_head.weight" and self.model.config.tie_word_embeddings:
                continue
            if "experts.gate_up_proj" in ours or "shared_mlp.input_linear" in ours:
                layer, kind = ours.split(".")[2], "bias" if ours.endswith("bias") else "weight"
                which = "exps" if "experts" in ours else "shexp"
                found.append((ours, (f"blk.{layer}.ffn_gate_{which}.{kind}", f"blk.{layer}.ffn_up_{which}.{kind}")))
                continue
            stem, kind = re.fullmatch(r"(.*?)(?:[._](weight|bias))?", ours).groups()  # type: ignore[union-attr]
            kind = kind or "weight"
            calls = [one for name in (stem, ours.removesuffix(".weight")) for one in published(name)]
            title = "output" if stem == "lm_head" else next(filter(None, map(names.get_name, calls)), None)
            if title is None and (whole := names.get_name(ours)) is not None:
                found.append((ours, (whole,)))  # as Falcon-H1's norms, which have no more of a name
                continue
            assert title is not None or converted(ours, state[ours], self.model.config, self.family), ours
            found.append((ours, (f"{title}.{kind}",)))
        return found

    def _stored(self, title: str, values: NDArray[Any]) -> NDArray[Any]:
        """A tensor as the converter writes it."""
        config = self.model.config
        if self.family in PLUS_ONE and title.endswith("norm.weight") and "ssm" not in title:
            return values + 1
        if self.family == "gpt2" and title.startswith("blk.") and values.ndim == 2:
            return numpy.ascontiguousarray(values.T)
        if self.family in ("gpt-oss", "llama4") and title.endswith("exps.weight"):
            return numpy.ascontiguousarray(values.swapaxes(1, 2))
        if title.endswith("ffn_gate_inp_shexp.weight"):
            return values.reshape(-1)
        if title.endswith(("ssm_conv1d.weight", "shortconv.conv.weight")):
            return values.squeeze(1)
        if self.family == "dbrx" and title.endswith("exps.weight"):
            experts = values.reshape(4, -1, values.shape[-1])
            return numpy.ascontiguousarray(experts.swapaxes(1, 2)) if "down" in title else experts
        if ".attn_qkv." in title and self.family in ("bloom", "falcon", "gptneox"):
            return by_kind(values, config)
        heads = {
            "attn_q": getattr(config, "num_attention_heads", 0),
            "attn_k": getattr(config, "num_key_value_heads", None),
        }
        count = heads.get(title.split(".")[2]) if self.family in INTERLEAVED and title.startswith("blk.") else None
        if count:
            shape = (count, 2, values.shape[0] // count // 2, *values.shape[1:])
            return numpy.ascontiguousarray(values.reshape(shape).swapaxes(1, 2).reshape(values.shape))
        return values

    def _restored(self, title: str, values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """What `_stored` did, undone by trying it on numbered rows."""
        numbered = self._stored(title, numpy.arange(numpy.prod(shape), dtype=numpy.float64).reshape(shape))
        if self.family in PLUS_ONE and title.endswith("norm.weight") and "ssm" not in title:
            return values - 1
        back = numpy.empty(int(numpy.prod(shape)), dtype=numpy.float32)
        back[numbered.astype(numpy.int64).reshape(-1)] = values.reshape(-1)
        return back.reshape(shape)

    def _metadata(self, writer: gguf.GGUFWriter) -> None:
        config: Any = self.model.config
        fields = {*type(config).__dataclass_fields__, *config.attribute_map}
        rope = getattr(config, "rope_parameters", None) or {}
        self._sizes(writer, fields)
        head = config.head_dim if "head_dim" in fields and not {"kv_lora_rank", "num_heads"} & fields else None
        if head:
            writer.add_key_length(head)
            writer.add_value_length(head)
            writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1)))
        theta = rope.get("rope_theta") or rope.get("full_attention", {}).get("rope_theta")
        if theta:
            writer.add_rope_freq_base(theta)
        if getattr(config, "sliding_window", None) and self.family in WINDOWED:
            writer.add_sliding_window(config.sliding_window)
        for name, method in METHODS.items():
            value = config.to_dict().get(name)
            if value is not None and name not in UNWRITTEN.get(self.family, ()):
                getattr(writer, method)(value)
        for title, value in self.fields.items():
            getattr(writer, title)(*value) if isinstance(value, tuple) else getattr(writer, title)(value)

    def _sizes(self, writer: gguf.GGUFWriter, fields: set[str]) -> None:
        """What each converter writes."""
        config: Any = self.model.config
        writer.add_context_length(next(filter(None, (getattr(config, name, None) for name in LENGTHS)), 1 << 20))
        writer.add_block_count(config.num_hidden_layers)
        writer.add_embedding_length(config.hidden_size)
        if self.family != "qwen35moe":
            wide = config.intermediate_size if "intermediate_size" in fields else 4 * config.hidden_size
            writer.add_feed_forward_length(wide)
        writer.add_head_count(config.num_attention_heads if "num_attention_heads" in fields else 0)
        for name in {"num_key_value_heads", "num_kv_heads"} & fields:
            writer.add_head_count_kv(getattr(config, name))
        for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"):
            if eps := getattr(config, name, None):
                is_rms = name == "rms_norm_eps" or self.family in (
                    "lfm2",
                    "lfm2moe",
                    "mamba",
                    "mamba2",
                    "nemotron_h",
                    "nemotron_h_moe",
                )
                (writer.add_layer_norm_rms_eps if is_rms else writer.add_layer_norm_eps)(eps)


def published(name: str) -> list[str]:
    """What checkpoints call a tensor of a class, where it was renamed since."""
    olds = {
        "transformer.": "",
        "model.layers": "backbone.layers",
        "gate.moe_statics": "moe_statics",
        ".mixer.": ".mlp.",
        ".router": ".router.layer",
        "experts.down_proj": "output_linear",
        "model.embeddings": "backbone.embeddings",
        "model.norm_f": "backbone.norm_f",
    }
    return [name, *(name.replace(new, old) for new, old in olds.items())]


def by_kind(values: NDArray[Any], config: Any) -> NDArray[Any]:  # noqa: ANN401
    """Queries, keys and values of each head of keys as all queries, all keys, all values."""
    width = config.hidden_size // config.num_attention_heads
    heads = values.reshape(-1, width, *values.shape[1:])
    each = len(heads) // getattr(config, "num_kv_heads", config.num_attention_heads)
    grouped = heads.reshape(-1, each, *heads.shape[1:])
    parts = [grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]]
    return numpy.concatenate([one.reshape(-1, *values.shape[1:]) for one in parts])


def converted(ours: str, values: torch.Tensor, config: Any, family: str) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """What llama.cpp's converter makes of a tensor that it takes apart or computes; nothing where it does neither."""
    if mixer := MIXED.fullmatch(ours):
        return _of_mixer(f"blk.{mixer[1]}", mixer[2], values, config, family)
    found = re.fullmatch(r"model\.layers\.(\d+)\.(self_attn|linear_attn|router|experts)\.(.*)", ours)
    own = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}
    own["gate_up_proj"] = "ffn_gate_up_exps.weight"
    if found is not None and family == "gemma4" and found[3] in own:
        return {f"blk.{found[1]}.{own[found[3]]}": values}
    if (
        found is None
        or hasattr(config, "scale_emb")
        or family not in ("deepseek2", "glm-dsa", "qwen3next", "qwen35", "qwen35moe")
    ):
        return {}
    block, part = f"blk.{found[1]}", found[3]
    if part == "kv_b_proj.weight":
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        split: Any = values.view(heads, nope + config.v_head_dim, -1)
        keys, rows = split.split([nope, config.v_head_dim], dim=1)
        return {f"{block}.attn_k_b.weight": keys.transpose(1, 2), f"{block}.attn_v_b.weight": rows}
    if found[2] == "self_attn":
        return {}
    if part == "in_proj_qkvz.weight":
        return _by_kind(block, values, config)
    return _of_delta(block, part, values, config, is_tiled=family != "qwen3next")


def _of_mixer(block: str, part: str, values: Any, config: Any, family: str) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """Values of a state space; of a later one with a dimension more, and norms by groups."""
    is_later = family not in ("jamba", "mamba")
    groups = getattr(config, "n_groups", None) or getattr(config, "mamba_n_groups", 1)
    made: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "A_log": ("ssm_a", lambda one: -torch.exp(one)),
        "D": ("ssm_d", lambda one: one),
        "dt_bias": ("ssm_dt.bias", lambda one: one),
        "norm.weight": ("ssm_norm.weight", lambda one: one.view(groups, -1)),
    }
    title, make = made[part]
    changed = make(values)
    return {f"{block}.{title}": changed[:, None] if is_later and part in ("A_log", "D") else changed}


def _by_kind(block: str, values: Any, config: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401
    heads, groups = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    width = groups * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim, config.linear_key_head_dim, width, width]
    pieces = values.T.reshape(-1, heads, sum(sizes)).split(sizes, dim=-1)
    queries, keys, rows, gates = (one.reshape(config.hidden_size, -1) for one in pieces)
    joint = torch.cat([queries, keys, rows], dim=-1).T
    return {f"{block}.attn_qkv.weight": joint, f"{block}.attn_gate.weight": gates.T}


def _of_delta(block: str, part: str, values: Any, config: Any, *, is_tiled: bool) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """Of Qwen3.5, heads of values lie by their place among those of a key, instead of key by key."""
    heads, groups = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    width, keys = config.linear_value_head_dim, 2 * heads * config.linear_key_head_dim

    def tiled(tensor: Any, dim: int, size: int) -> Any:  # noqa: ANN401
        parts = tensor.unflatten(dim, (heads, groups, size))
        return parts.transpose(dim, dim + 1).flatten(dim, dim + 2) if is_tiled else tensor

    def behind_keys(rows: Any) -> Any:  # noqa: ANN401
        return torch.cat([rows[:keys], tiled(rows[keys:], 0, width)])

    made: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "A_log": ("ssm_a", lambda one: -torch.exp(tiled(one, 0, 1))),
        "dt_bias": ("ssm_dt.bias", lambda one: tiled(one, 0, 1)),
        "conv1d.weight": ("ssm_conv1d.weight", lambda one: behind_keys(one.squeeze())),
        "in_proj_qkv.weight": ("attn_qkv.weight", behind_keys),
        "in_proj_z.weight": ("attn_gate.weight", lambda one: tiled(one, 0, width)),
        "in_proj_a.weight": ("ssm_alpha.weight", lambda one: tiled(one, 0, 1)),
        "in_proj_b.weight": ("ssm_beta.weight", lambda one: tiled(one, 0, 1)),
        "out_proj.weight": ("ssm_out.weight", lambda one: tiled(one, 1, width)),
    }
    title, make = made.get(part, ("", lambda one: one))
    return {f"{block}.{title}": make(values)} if title else {}


def encode(
    values: NDArray[Any], kind: Kind, random: numpy.random.Generator
) -> tuple[tuple[NDArray[Any], Kind], NDArray[Any]]:
    """Values in a type, and what they decode to; blocks are drawn where the library only decodes the type."""
    if kind == Kind.F32:
        return (values.astype(numpy.float32), kind), values.astype(numpy.float32)
    if kind == Kind.F16:
        return (values.astype(numpy.float16), kind), values.astype(numpy.float16).astype(numpy.float32)
    if kind in SCALES_AT:
        stored = drawn_blocks(values.shape, kind, random)
    else:
        stored = gguf.quants.quantize(values.astype(numpy.float32), kind)
    return (stored, kind), gguf.quants.dequantize(stored, kind)


def drawn_blocks(shape: Sequence[int], kind: Kind, random: numpy.random.Generator) -> NDArray[numpy.uint8]:
    """Random blocks whose scales make weights of an ordinary size."""
    size, count = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // size, count), dtype=numpy.uint8)
    for at in SCALES_AT[kind]:
        scale = random.uniform(0.2, 1, blocks.shape[:-1]) * SMALL.get(kind, 5e-5)
        blocks[..., at : at + 2] = scale.astype(numpy.float16)[..., None].view(numpy.uint8)
    return blocks.reshape(*shape[:-1], -1)


def add_tokenizer(writer: gguf.GGUFWriter, split: str = "gpt-2") -> None:
    """A small byte-level vocabulary."""
    trained = json.loads(byte_level().to_str())["model"]
    tokens = sorted(trained["vocab"], key=trained["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "</s>") else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in trained["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
