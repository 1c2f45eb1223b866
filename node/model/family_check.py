"""The family conformance test: before an untested family is served, a small random model of it runs in three spans."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from node.model.checkpoint import Checkpoint, open_checkpoint
from swarm.errors import UnsupportedModel
from swarm.ids import TreeNodeId
from swarm.inference.kv_cache import KvCache
from swarm.inference.ragged_batch import RaggedModel, SessionRows
from swarm.layers import Span
from swarm.models.families import causal_lm_class
from swarm.models.pretrained import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Load = Callable[[Checkpoint, Span, torch.dtype], RaggedModel]

TOLERANCE = 1e-5
SPANS = (Span(0, 2), Span(2, 4), Span(4, 6))
SESSIONS = 2
"""Trees in one forward, each of a text of its own."""
PARENTS = (*(None if node == 0 else node - 1 for node in range(14)), 9, 14, 11, 15)
"""A text of 14 tokens and four nodes that branch off before its end: longer than the window."""
TIP = 13
"""The last node of the text."""

_SMALL: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "ffn_dim": 128,
    "n_inner": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "sliding_window": 5,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of the model that takes the test, for those of these names that a config has."""


def check_conformance(config: PreTrainedConfig, load: Load) -> None:
    """Load a small random model of the same family in three spans and compare its logits with the whole model's.

    Raises:
        UnsupportedModel: it does not run, or the logits differ.
    """
    family = config.get_text_config().model_type
    try:
        error = _largest_error(shrink(config), load)
    except Exception as failure:  # an untested class may raise anything, and all of it means no
        reason = f"not a tested family, and does not run in spans ({first_line(failure)}); choose another model"
        raise UnsupportedModel(f"{family}: {reason}") from failure
    if not error <= TOLERANCE:
        raise UnsupportedModel(f"{family}: not a tested family, and its self-test is {error:.1e} off in the logits")


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same config at toy size; the layers keep their kinds."""
    values = copy.deepcopy(config.get_text_config().to_dict())
    values.pop("quantization_config", None)
    aliases = type(config.get_text_config()).attribute_map
    for name, small in _SMALL.items():
        name = aliases.get(name, name)
        if values.get(name) is not None:
            values[name] = small
    if config.get_text_config().num_attention_heads == getattr(config.get_text_config(), "num_key_value_heads", None):
        values[aliases.get("num_key_value_heads", "num_key_value_heads")] = _SMALL["num_attention_heads"]
    layers = _pick_layers(config.get_text_config())
    for name, value in values.items():
        if isinstance(value, list) and len(value) == config.get_text_config().num_hidden_layers:
            values[name] = [value[layer] for layer in layers]
    if values.get("per_layer_config"):
        own = {int(layer): changes for layer, changes in values["per_layer_config"].items()}
        values["per_layer_config"] = {place: own[layer] for place, layer in enumerate(layers) if layer in own}
    if values.get("rope_parameters"):
        values["rope_parameters"] = _plain_rope(values["rope_parameters"])
    return type(config.get_text_config()).from_dict(values)


def _pick_layers(text: PreTrainedConfig) -> list[int]:
    """The layers whose kinds the small model has: the first ones, and the first of each kind; few are repeated."""
    kinds = list(getattr(text, "layer_types", None) or ())
    picked = dict.fromkeys([*map(kinds.index, dict.fromkeys(kinds)), *range(text.num_hidden_layers)])
    count: int = _SMALL["num_hidden_layers"]
    return (sorted(list(picked)[:count]) * count)[:count]


def _plain_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Plain rotary embeddings: stretched ones have lists as long as a head is wide, which the test does not need."""
    if all(isinstance(value, dict) for value in rope.values()):
        return {kind: _plain_rope(value) for kind, value in rope.items()}
    if not any(isinstance(value, list) for value in rope.values()):
        return rope
    plain = {name: value for name, value in rope.items() if name in {"rope_theta", "partial_rotary_factor"}}
    return {"rope_type": "default"} | plain


def _largest_error(config: PreTrainedConfig, load: Load) -> float:
    whole = _random_model(config)
    with tempfile.TemporaryDirectory() as folder:
        whole.save_pretrained(folder)
        checkpoint = open_checkpoint(Path(folder))
        models = [load(checkpoint, span, torch.float32) for span in SPANS]
    texts = torch.arange(SESSIONS * len(PARENTS)).reshape(SESSIONS, -1) * 7 % 120 + 3
    logits = _tree_logits(models, texts)
    worst = 0.0
    for ids, in_spans in zip(texts, logits, strict=True):
        for node in range(len(PARENTS)):
            with torch.no_grad():
                alone = whole(ids[_path(node)][None], use_cache=False).logits[0, -1]
            worst = max(worst, float((in_spans[node] - alone).abs().max()))
        worst = max(worst, float((in_spans[TIP] - _decoded(whole, ids[_path(TIP)])).abs().max()))
    return worst


def _decoded(whole: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits [vocab_size] after a text as `generate` computes them: the last token attends to the cached rest."""
    with torch.no_grad():
        kept = whole(ids[None, :-1], use_cache=True).past_key_values
        logits: torch.Tensor = whole(ids[None, -1:], past_key_values=kept, use_cache=True).logits[0, -1]
    return logits


def _random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model with every weight random, norms too, so that a wrong one changes the logits."""
    config = copy.deepcopy(config)
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = causal_lm_class(config)(config)
        for weight in model.parameters():
            weight.data += torch.randn_like(weight) * 0.05
    whole: PreTrainedModel = model.float().eval()
    return whole


def _tree_logits(models: list[RaggedModel], texts: torch.Tensor) -> torch.Tensor:
    """Trees of several sessions in one forward: ids [sessions, nodes] to logits [sessions, nodes, vocab_size]."""
    nodes = [TreeNodeId(node) for node in range(len(PARENTS))]
    parents = [None if parent is None else TreeNodeId(parent) for parent in PARENTS]
    positions = [len(_path(node)) - 1 for node in nodes]
    rows: torch.Tensor | None = None
    for model in models:
        works = [
            SessionRows(
                KvCache(model.layout, len(nodes)), nodes, parents, positions, ids, None if rows is None else rows[place]
            )
            for place, ids in enumerate(texts)
        ]
        rows = model.forward(works).reshape(*texts.shape, -1)
    assert rows is not None
    return models[-1].logits(rows.flatten(0, 1)).reshape(*texts.shape, -1)


def _path(node: int) -> list[int]:
    path = [node]
    while (parent := PARENTS[path[0]]) is not None:
        path.insert(0, parent)
    return path
