"""The family conformance test: before an untested family is served, a small random model of it runs in three spans."""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from node.model.checkpoint import Checkpoint, open_checkpoint
from swarm.base.errors import UnsupportedModel
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.class_attention import taken_by
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import RaggedModel, SessionRows
from swarm.compute.step_cache import ARGUMENTS, cache_argument
from swarm.files.families import causal_lm_class, span_starts, text_config
from swarm.files.pretrained import first_line
from swarm.files.text_classes import is_composed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Load = Callable[[Checkpoint, Span, torch.dtype], RaggedModel]

TOLERANCE = 1e-5
SESSIONS = 2
"""Trees in one forward, each of a text of its own."""
PARENTS = (*(None if node == 0 else node - 1 for node in range(14)), 9, 14, 11, 15)
"""A text of 14 tokens and four nodes that branch off before its end: longer than the window."""
TIP = 13
"""The last node of the text."""
TEXT = torch.arange(len(PARENTS))[None] * 7 % 120 + 3
"""Ids [1, tokens] of a text for models that also see or hear."""
FOLDED = 2
"""Tokens whose keys are folded into one, where a family folds keys at all: more than it selects are in the text."""
BACK = 6
"""Tokens that stay when a session goes back and on again."""

_SMALL: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_layers_per_stack": 1,
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 128,
    "laurel_rank": 16,
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
    "attention_chunk_size": 5,
    "floor_scale": 4,
    "index_topk": 6,
    "o_lora_rank": 16,
    "index_head_dim": 32,
    "index_n_heads": 16,
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
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_dt_rank": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "state_size": 16,
    "num_heads": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "block_size": 8,
    "lru_width": 64,
    "time_step_rank": 4,
    "shared_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 64,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of the model that takes the test, for those of these names that a config has."""


_AT_MOST = {"num_experts_per_tok", "moe_k"}
"""Names whose values stay where they are smaller: some classes take one expert only."""
_TOWER: dict[str, Any] = {"num_hidden_layers": 1, "num_blocks": 1, "depth": 1}
"""Sizes of the parts for images and sound, which a text never runs."""


def check_conformance(config: PreTrainedConfig, load: Load) -> None:
    """Load a small random model of the same family in three spans and compare its logits with the whole model's.

    Raises:
        UnsupportedModel: it does not run, or the logits differ.
    """
    family = config.get_text_config().model_type
    try:
        check_text_part(config)
        error = conformance_error(shrink(config), load)
    except UnsupportedModel:
        raise
    except Exception as failure:  # an untested class may raise anything, and all of it means no
        reason = f"not a tested family, and does not run in spans ({first_line(failure)}); choose another model"
        raise UnsupportedModel(f"{family}: {reason}") from failure
    if not error <= TOLERANCE:
        reason = f"not a tested family, and its self-test is {error:.1e} off in the logits; choose another model"
        raise UnsupportedModel(f"{family}: {reason}")


def check_text_part(config: PreTrainedConfig) -> None:
    """Compare a text model's head, where it was put on here, with the class of the whole model, on a text alone.

    The parts that see or hear stay on the meta device: a text does not run them.

    Raises:
        UnsupportedModel: the logits differ.
    """
    whole_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if not is_composed(causal_lm_class(config)) or (whole_class is None and config.get_text_config() is config):
        return
    own = random_model(_small_text(config))
    whole = _whole_around(own, config)
    with torch.no_grad():
        logits = cast("Any", own)(TEXT, use_cache=False).logits
        error = float((whole(input_ids=TEXT, use_cache=False).logits - logits).abs().max() / logits.abs().max())
    if not error <= TOLERANCE:
        reason = f"a text's logits are {error:.1e} off those of the whole model's class"
        raise UnsupportedModel(f"{own.config.model_type}: {reason}; choose another model")


def language_error(config: PreTrainedConfig, load: Load) -> tuple[float, bool]:
    """How far a text's logits are off those of a whole model's class, where a checkpoint of it is read in spans.

    The checkpoint has the language part alone, under the names that the class of the whole writes.

    Args:
        config: of a model that also sees or hears.

    Returns:
        The largest difference, as `conformance_error` has it, and whether every token would be the same.

    Raises:
        UnsupportedModel: the language part does not run, or the checkpoint is not read.
    """
    own = random_model(_small_text(config))
    whole = _whole_around(own, config)
    places = {tensor.data_ptr() for tensor in own.state_dict().values()}
    with tempfile.TemporaryDirectory() as folder:
        text = {name: tensor for name, tensor in whole.state_dict().items() if tensor.data_ptr() in places}
        whole.save_pretrained(folder, state_dict=text)
        checkpoint = open_checkpoint(Path(folder))
        models = [load(checkpoint, span, torch.float32) for span in spans_of(own.config)]
    rows: torch.Tensor | None = None
    ids = [TreeNodeId(node) for node in range(TEXT.shape[1])]
    for model in models:
        kept = KvCache(model.layout, len(ids))
        rows = model.forward([SessionRows(kept, ids, [None, *ids[:-1]], list(range(len(ids))), TEXT[0], rows)])
    assert rows is not None
    with torch.no_grad():
        expected = whole(input_ids=TEXT, use_cache=False).logits[0]
    logits = models[-1].logits(rows)
    error = float((logits - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    return error, bool((logits.argmax(-1) == expected.argmax(-1)).all())


def _small_text(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a whole model's language part, at toy size."""
    small = shrink(config)
    small.tie_word_embeddings = text_config(config).tie_word_embeddings
    return small


def _whole_around(own: PreTrainedModel, config: PreTrainedConfig) -> Any:  # noqa: ANN401 - a class of the whole
    """A model of the class of the whole with this language part; what sees or hears has no values: a text runs none."""
    whole_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    text = config.get_text_config()
    both = own.config if text is config else copy.deepcopy(config)
    for name in [name for name, part in vars(config).items() if part is text]:
        setattr(both, name, own.config)
    both._attn_implementation = "eager"
    with torch.device("meta"):
        whole: Any = whole_class(both).eval()
    whole = whole.to_empty(device="cpu")  # which takes addresses and no memory; some classes ask for values
    if type(whole) is type(own):
        return own
    named = {type(part): name for name, part in reversed(list(whole.named_modules()))}
    if not {type(own), type(own.base_model)} & named.keys():
        reason = "the class of the whole has its language part in another form"
        raise UnsupportedModel(f"{own.config.model_type}: {reason}; choose another model")
    if type(own) in named:
        whole.set_submodule(named[type(own)], own)
        return whole
    head = whole.get_output_embeddings()
    name = next(name for name, part in whole.named_modules() if part is head)
    whole.set_submodule(named[type(own.base_model)], own.base_model)
    whole.set_submodule(name, cast("Any", own).get_output_embeddings())
    return whole


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same config at toy size; the layers keep their kinds."""
    own = config.get_text_config().to_dict()
    own.pop("quantization_config", None)
    aliases = type(config.get_text_config()).attribute_map
    values = copy.deepcopy(own) | _small(own, own, aliases)
    layers = _pick_layers(config.get_text_config())
    for name, value in values.items():
        if isinstance(value, list) and len(value) == config.get_text_config().num_hidden_layers:
            values[name] = [value[layer] for layer in layers]
    if values.get("attn_layer_indices"):
        attending = set(values["attn_layer_indices"])
        values["attn_layer_indices"] = [place for place, layer in enumerate(layers) if layer in attending]
    if values.get("per_layer_config"):
        changed = {
            int(layer): changes | _small(changes, own | changes, aliases)
            for layer, changes in values["per_layer_config"].items()
        }
        values["per_layer_config"] = {place: changed[layer] for place, layer in enumerate(layers) if layer in changed}
    if values.get("compress_rates"):
        values["compress_rates"] = {kind: min(rate, FOLDED) for kind, rate in values["compress_rates"].items()}
    for part in (part for name, part in values.items() if name.endswith("_config") and isinstance(part, dict)):
        part.update({name: small for name, small in _TOWER.items() if part.get(name)})
    if values.get("rope_parameters"):
        width, heads = (values[aliases.get(name, name)] for name in ("hidden_size", "num_attention_heads"))
        head = values.get("head_dim") or width // heads
        values["rope_parameters"] = _plain_rope(values["rope_parameters"], head)
    return type(config.get_text_config()).from_dict(values)


def _small(values: dict[str, Any], own: dict[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Toy sizes in place of some values, of which `own` are all; what was alike stays alike."""
    sizes = {aliases.get(name, name): (name, small) for name, small in _SMALL.items()}
    small = {
        name: min(size, values[name]) if plain in _AT_MOST else size
        for name, (plain, size) in sizes.items()
        if values.get(name)
    }
    small |= {name: [size] * len(values[name]) for name, size in small.items() if isinstance(values[name], list)}
    heads, kv_heads = (aliases.get(name, name) for name in ("num_attention_heads", "num_key_value_heads"))
    if own.get(heads) and own.get(heads) == own.get(kv_heads):
        small[kv_heads] = _SMALL["num_attention_heads"]
    parts = [own.get(name) or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if all(parts) and own.get("head_dim") == sum(parts):
        small["head_dim"] = _SMALL["qk_nope_head_dim"] + _SMALL["qk_rope_head_dim"]
    return small


def spans_of(config: PreTrainedConfig) -> list[Span]:
    """The whole small model in three spans, or in as many as its layers can be cut into."""
    starts, count = span_starts(config)[1:], config.num_hidden_layers
    near = {min(starts, key=lambda start: abs(start - wished)) for wished in (2, 4)} if starts else set()
    cuts = [0, *sorted(near), count]
    return [Span(start, end) for start, end in itertools.pairwise(cuts)]


def _pick_layers(text: PreTrainedConfig) -> list[int]:
    """The layers whose kinds the small model has: the first ones, and the first of each kind; few are repeated."""
    kinds = list(getattr(text, "layer_types", None) or ())
    count: int = _SMALL["num_hidden_layers"]
    own = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)
    last = [text.num_hidden_layers - 1] if own < text.num_hidden_layers else []  # which shares keys with one before
    picked = dict.fromkeys([*map(kinds.index, dict.fromkeys(kinds[:own])), *range(own)])
    return (sorted(list(picked)[: count - len(last)]) * count)[: count - len(last)] + last


def _plain_rope(rope: dict[str, Any], head: int) -> dict[str, Any]:
    """Plain rotary embeddings: stretched ones have lists as long as a head is wide, which the test does not need."""
    if all(isinstance(value, dict) for value in rope.values()):
        return {kind: _plain_rope(value, head) for kind, value in rope.items()}
    if not any(isinstance(value, list) for value in rope.values()):
        return rope
    plain = {name: value for name, value in rope.items() if name in {"rope_theta", "partial_rotary_factor"}}
    if sections := rope.get("mrope_section"):  # of a place's axes: as many turns as a head has
        turns = int(head * rope.get("partial_rotary_factor", 1)) // 2
        axes = [turns // len(sections)] * len(sections)
        plain["mrope_section"] = [turns - sum(axes[1:]), *axes[1:]]
    return {"rope_type": "default"} | plain


def conformance_error(config: PreTrainedConfig, load: Load) -> float:
    """The largest difference between the logits of a small model in spans and of the same model whole.

    As a part of the largest logit where that is above 1: float32 rounds by parts of a value.

    Args:
        config: of the small model (`shrink`).

    Raises:
        UnsupportedModel: the class cannot be cut, or does not agree with itself.
    """
    whole = random_model(config)
    with tempfile.TemporaryDirectory() as folder:
        whole.save_pretrained(folder)
        checkpoint = open_checkpoint(Path(folder))
        models = [load(checkpoint, span, torch.float32) for span in spans_of(config)]
    texts = torch.arange(SESSIONS * len(PARENTS)).reshape(SESSIONS, -1) * 7 % 120 + 3
    trees = _Trees(models, texts)
    logits = trees.run(first=0)
    trees.go_back()
    worst, largest = float((trees.run(first=BACK) - logits[:, BACK:]).abs().max()), 1.0
    own = 0.0
    for ids, in_spans in zip(texts, logits, strict=True):
        for node in range(len(PARENTS)):
            with torch.no_grad():
                alone = whole(ids[_path(node)][None], use_cache=False).logits[0, -1]
            worst = max(worst, float((in_spans[node] - alone).abs().max()))
            largest = max(largest, float(alone.abs().max()))
            if node == TIP:
                own = max(own, float((_decoded(whole, ids[_path(TIP)]) - alone).abs().max()))
    if own / largest > TOLERANCE:
        reason = "its class decodes other logits by its cache than it computes of the whole text"
        raise UnsupportedModel(f"{config.model_type}: {reason}; choose another model")
    return worst / largest


def _decoded(whole: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits [vocab_size] after a text as `generate` computes them: the last token attends to the cached rest."""
    name = cache_argument(whole.base_model) or ARGUMENTS[0]
    last = taken_by(whole, {"position_ids": torch.tensor([[len(ids) - 1]])})
    with torch.no_grad():
        kept = getattr(whole(ids[None, :-1], use_cache=True), name)
        logits: torch.Tensor = whole(ids[None, -1:], use_cache=True, **{name: kept}, **last).logits[0, -1]
    return logits


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
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


class _Trees:
    """The trees of several sessions, through spans."""

    def __init__(self, models: Sequence[RaggedModel], texts: torch.Tensor) -> None:
        """Begin sessions without a token.

        Args:
            texts: ids [sessions, nodes]
        """
        self._models = models
        self._texts = texts
        self._kv_caches = [[KvCache(model.layout, len(PARENTS)) for _ in texts] for model in models]
        self._first_id = 0

    def run(self, first: int) -> torch.Tensor:
        """Run all nodes of the trees but the first ones, which are committed, in one forward.

        Returns:
            [sessions, nodes - first, vocab_size]
        """
        ids = [TreeNodeId(self._first_id + node) for node in range(len(PARENTS))]
        above = [None if parent is None or parent < first else ids[parent] for parent in PARENTS[first:]]
        positions = [len(_path(node)) - 1 for node in range(first, len(PARENTS))]
        rows: torch.Tensor | None = None
        for model, kv_caches in zip(self._models, self._kv_caches, strict=True):
            works = [
                SessionRows(
                    kv_cache, ids[first:], above, positions, text[first:], None if rows is None else rows[place]
                )
                for place, (kv_cache, text) in enumerate(zip(kv_caches, self._texts, strict=True))
            ]
            rows = model.forward(works).reshape(len(self._texts), len(positions), -1)
        assert rows is not None
        return self._models[-1].logits(rows.flatten(0, 1)).reshape(*rows.shape[:2], -1)

    def go_back(self) -> None:
        """Commit the text, and take back all but its beginning."""
        for kv_cache in (kv_cache for kv_caches in self._kv_caches for kv_cache in kv_caches):
            kv_cache.commit([TreeNodeId(node) for node in _path(TIP)], [])
            kv_cache.truncate(BACK)
        self._first_id += len(PARENTS)


def _path(node: int) -> list[int]:
    path = [node]
    while (parent := PARENTS[path[0]]) is not None:
        path.insert(0, parent)
    return path
