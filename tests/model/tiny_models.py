"""Tiny random models of many families: saved as sharded checkpoints, loaded span by span, run as chains."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from node.model.checkpoint import open_checkpoint
from node.model.span import SpanModel, dissect, load_span
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import RaggedModel, SessionRows
from swarm.compute.tree_attention import use_canopy
from tests.devices import DEVICE

WINDOW = 5
LAYERS = 6
VOCAB = 128
SPANS = (Span(0, 2), Span(2, 4), Span(4, 6))

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_TIED = {"tie_word_embeddings": True}
_WINDOW = {"sliding_window": WINDOW}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {**_TIED, **_WINDOW, "use_sliding_window": True, "max_window_layers": 3},
    "qwen3": {**_TIED},
    "mistral": {**_WINDOW},
    "gemma2": {**_TIED, **_WINDOW, "attn_logit_softcapping": 0.3, "final_logit_softcapping": 1.0},
    "gemma3_text": {**_TIED, **_WINDOW, "query_pre_attn_scalar": 8},
    "mixtral": {**_EXPERTS, "num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 64, "mlp_only_layers": [3]},
    "phi3": {**_WINDOW},
    "olmo2": {},
    "gpt_neox": {"head_dim": None},
    "glm4": {},
    "gpt_oss": {**_EXPERTS, **_WINDOW, "num_local_experts": 4},
    "granite": {**_TIED, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "cohere2": {**_TIED, **_WINDOW},
    "deepseek_v3": {
        **_EXPERTS,
        **_LATENT,
        "head_dim": None,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 64,
    },
    "gpt2": {"head_dim": None, "num_key_value_heads": None, "scale_attn_by_inverse_layer_idx": True, **_TIED},
    "opt": {"head_dim": None, "num_key_value_heads": None, "ffn_dim": 128, "word_embed_proj_dim": 32, **_TIED},
}


_OLD: dict[str, Any] = {"head_dim": None, "num_key_value_heads": None}
_INDEXED = {**FAMILIES["deepseek_v3"], "index_topk": 6, "index_head_dim": 32, "index_n_heads": 16}
OTHER_KINDS: dict[str, dict[str, Any]] = {
    "llama4_text": {
        "attention_chunk_size": WINDOW,
        "floor_scale": 4,
        "intermediate_size_mlp": 128,
        "layer_types": ["chunked_attention", "full_attention"] * 3,
        "no_rope_layers": [1, 0] * 3,
        **_EXPERTS,
        "num_local_experts": 4,
    },
    "deepseek_v32": {**_INDEXED},
    "doge": {"keep_window_size": WINDOW},
    "stablelm": {"head_dim": None},
    "bloom": {**_OLD, **_TIED},
    "falcon": {**_OLD, "alibi": True, "new_decoder_architecture": False},
    "gpt_neo": {**_OLD, "attention_types": [[["global", "local"], 3]], "window_size": WINDOW, **_TIED},
    "gptj": {**_OLD, "rotary_dim": 8},
    "mpt": {**_OLD, **_TIED},
}
"""Families with other kinds of attention, or whose classes attend themselves: no kernels run them."""


FEW: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Changes that leave little to compute, for kernels that are interpreted."""


def tiny_config(family: str, changes: dict[str, Any] | None = None) -> PreTrainedConfig:
    kind = FAMILIES.get(family) or OTHER_KINDS.get(family, {})
    own = {**_BASE, **kind}
    own |= {name: value for name, value in (changes or {}).items() if own.get(name) is not None}
    values = {name: value for name, value in own.items() if value is not None}
    if kind.get("sliding_window", 0) is None:
        values["sliding_window"] = None
    return CONFIG_MAPPING[family](**values)


def tiny_model(family: str, seed: int = 0, changes: dict[str, Any] | None = None) -> PreTrainedModel:
    """A model whose parameters are all random, norms and sinks too: a wrong one changes the logits."""
    config = tiny_config(family, changes)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model: PreTrainedModel = cast("Any", AutoModelForCausalLM).from_config(config).eval().float()
    noise = torch.Generator().manual_seed(seed + 1)
    for weight in model.parameters():
        weight.data += torch.randn(weight.shape, generator=noise) * 0.05
    return model


def save_sharded(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder, max_shard_size="60KB")
    return folder


def load_alone(whole: Path, span: Span, folder: Path, dtype: torch.dtype = torch.float32) -> SpanModel:
    """Load a span from a copy of a checkpoint in which every file that it does not need is gone."""
    checkpoint = open_checkpoint(whole)
    layout = dissect(checkpoint.config)
    needed = checkpoint.files(layout.needed(checkpoint.weight_map, span))
    assert len(needed) < len(set(checkpoint.weight_map.values())), "the span would load every file"
    folder.mkdir()
    for name in ("config.json", "model.safetensors.index.json", *needed):
        shutil.copy(whole / name, folder / name)
    return load_span(open_checkpoint(folder), span, dtype, torch.device(DEVICE))


def reference(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits [n, vocab] of a text by Hugging Face's own attention, without a cache, on the CPU."""
    with torch.no_grad():
        logits: torch.Tensor = model(ids[None].to(model.device), use_cache=False).logits[0]
    return logits.cpu()


def chain(kv_cache: KvCache, ids: torch.Tensor, first: int = 0) -> SessionRows:
    """A text as a chain of nodes `first`, `first + 1`, … below the tip."""
    nodes = [TreeNodeId(first + offset) for offset in range(len(ids))]
    start = kv_cache.slots.used
    return SessionRows(kv_cache, nodes, [None, *nodes[:-1]], range(start, start + len(ids)), ids)


def run_chain(models: list[SpanModel], kv_caches: list[list[KvCache]], works: list[SessionRows]) -> torch.Tensor:
    """Pass works through spans, kv_caches[i][j] being session j's on machine i; returns the last machine's rows."""
    rows = models[0].forward(works)
    counts = [len(work.node_ids) for work in works]
    for model, own in zip(models[1:], kv_caches[1:], strict=True):
        pieces = torch.split(rows, counts)
        works = [
            SessionRows(kv_cache, work.node_ids, work.parents, work.positions, work.token_ids, piece)
            for kv_cache, work, piece in zip(own, works, pieces, strict=True)
        ]
        rows = model.forward(works)
    return rows


def clone(model: PreTrainedModel) -> PreTrainedModel:
    """An independent copy."""
    return copy.deepcopy(model)


def whole_model(model: PreTrainedModel) -> RaggedModel:
    """A copy of the model with Canopy's attention, in one span, on the device that tests compute on."""
    copied: Any = cast("Any", clone(model)).to(DEVICE)
    use_canopy(copied.config)
    copied.set_attn_implementation("canopy")
    return RaggedModel(copied, Span(0, copied.config.num_hidden_layers))
