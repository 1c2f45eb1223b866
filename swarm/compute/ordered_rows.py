"""A CPU that multiplies with integers promises texts where a row's bits depend on its own path alone: made so, tried.

    products with integers   the packed product for any number of rows, not whole weights for many
    other products           fours of rows
    attention                along positions (`swarm.compute.position_attention`)
    all other operators      as they are: tests compare the families named here

A layer, the head and each kind of product are compared when a model is loaded; what differs costs the promise alone.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn.functional import linear

from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.kernels.support import CODES_VERSION
from swarm.compute.kv_cache import KvCache
from swarm.compute.position_attention import POSITIONS, in_fours
from swarm.compute.ragged_batch import SessionRows
from swarm.compute.weights.codes_weight import CodesWeight
from swarm.protocol.numeric_class import ORDERED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedConfig

    from swarm.compute.ragged_batch import RaggedModel
    from swarm.compute.weights.codes_weight import CodesForm

FAMILIES: Final = frozenset({"granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"})
"""Families (`model_type`) of which tests compare rows alone and beside others, bit by bit."""
ACTIVATIONS: Final = ("silu", "swish")
"""Functions that give a number the same bits at the end of a tensor as in its middle."""
UNWANTED: Final = "--no-promise or the swarm wants it so"
PROMPT: Final = POSITIONS + 3
"""Certain tokens of the trial, so that its tree begins in the second block."""
PARTS: Final = ((1, 64, PROMPT - 65), (PROMPT,))
"""How many rows at a time they come in."""
PARENTS: Final = (None, 0, 0, 1, 1, 3, 2, 3, 7, None, 8)
"""The trial's tree, by offset; None is the tip."""
PATH: Final = (0, 1, 3, 7, 8, 10)
SOME: Final = 3
"""Rows of products that are compared."""


def codes_version(config: PreTrainedConfig) -> int:
    """The version of a model's class where a CPU multiplies with its integers, if no trial fails."""
    return CODES_VERSION if _unordered(config) else ORDERED


def use_codes(model: RaggedModel, *, ordered: bool = True) -> str:
    """Let a model whose products read integers promise texts, if all of it can.

    Takes seconds; nothing else may use the model meanwhile.

    Args:
        ordered: whether a promise is wanted.

    Returns:
        why it promises none; empty where it does.
    """
    reason = (_unordered(model.config) or _lacks(model)) if ordered else UNWANTED
    if not reason:
        _order(model, ordered=True)
        reason = _trial(model)
    if reason:
        _order(model, ordered=False)
    return reason


@contextmanager
def unordered(model: RaggedModel) -> Iterator[None]:
    """Within, a CPU's model that promises texts adds up in the order that promises none, as another processor may.

    Other models compute as ever. Nothing else may use the model meanwhile.
    """
    is_ordered = model.codes_version == ORDERED
    if is_ordered:
        _order(model, ordered=False)
    try:
        yield
    finally:
        if is_ordered:
            _order(model, ordered=True)


def _unordered(config: PreTrainedConfig) -> str:
    """Why a model of this config is not tried; empty if it is."""
    if config.model_type not in FAMILIES:
        return f"rows of {config.model_type} were not compared alone and beside others"
    activation = getattr(config, "hidden_act", None)
    return "" if activation in ACTIVATIONS else f"{activation} rounds by where a number lies"


def _lacks(model: RaggedModel) -> str:
    """What of a model adds up by the number of rows; empty if nothing does."""
    if not model.reads_codes:
        return "some of its weights are expanded"
    plain = model.layout.layers and not (model.layout.rows or model.layout.states or model.attends_itself)
    return "" if plain else "its layers do more than attend"


def _order(model: RaggedModel, *, ordered: bool) -> None:
    model.codes_version = model.kernel_version = ORDERED if ordered else CODES_VERSION
    model.layout = replace(model.layout, by_positions=ordered)
    for part in _parts(model):
        if isinstance(part, CodesWeight):
            part.is_ordered = ordered
        elif type(part) is nn.Linear and ordered:
            part.forward = partial(_linear, part)  # type: ignore[method-assign]


def _parts(model: RaggedModel) -> Iterator[nn.Module]:
    """All modules, those of layers too that are not in place just now."""
    for root in (model.model, *model.layers):
        yield from root.modules()


def _linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, layer.in_features)
    return linear(in_fours(rows), layer.weight, layer.bias)[: len(rows)].view(*x.shape[:-1], -1)


@torch.inference_mode()
def _trial(model: RaggedModel) -> str:
    """What changes a row's bits in a layer, the head and each kind of product; empty if nothing does."""
    threads = torch.get_num_threads()
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(PROMPT + len(PARENTS), model.hidden_size, generator=draw).to(model.dtype)
    ids = torch.randint(0, model.vocab_size, (len(rows),), generator=draw)
    try:
        beside = [_tree(model, rows, ids), *_products(model, rows)]
        torch.set_num_threads(1)
        alone = [_path(model, rows, ids), *_products(model, rows, at_once=1)]
    finally:
        torch.set_num_threads(threads)
    same = all(torch.equal(one, other) for one, other in zip(beside, alone, strict=True))
    return "" if same else "on this processor a row's bits depend on the rows beside it"


def _tree(model: RaggedModel, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows of the path [len(PATH), hidden_size] in a tree behind a prompt in parts."""
    kv_cache = _prompted(model, rows, ids, PARTS[0])
    return _run(model, kv_cache, rows[PROMPT:], ids[PROMPT:], PARENTS)[list(PATH)]


def _path(model: RaggedModel, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same rows one by one behind a prompt in one part."""
    kv_cache = _prompted(model, rows, ids, PARTS[1])
    places = [PROMPT + offset for offset in PATH]
    return torch.cat([_run(model, kv_cache, rows[at : at + 1], ids[at : at + 1], [None], commit=1) for at in places])


def _prompted(model: RaggedModel, rows: torch.Tensor, ids: torch.Tensor, parts: Sequence[int]) -> KvCache:
    kv_cache = KvCache(model.layout.within(_layer(model)), len(rows))
    for count in parts:
        some = slice(kv_cache.slots.committed, kv_cache.slots.committed + count)
        _run(model, kv_cache, rows[some], ids[some], [None, *range(count - 1)], commit=count)
    return kv_cache


def _run(  # noqa: PLR0913 - a session's rows, one by one
    model: RaggedModel,
    kv_cache: KvCache,
    rows: torch.Tensor,
    ids: torch.Tensor,
    parents: Sequence[int | None],
    *,
    commit: int = 0,
) -> torch.Tensor:
    """New nodes through one layer; the first of them are committed."""
    start = kv_cache.slots.committed
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent is None else depths[parent] + 1)
    nodes = [TreeNodeId(start + place) for place in range(len(parents))]
    above = [None if parent is None else nodes[parent] for parent in parents]
    work = SessionRows(kv_cache, nodes, above, [start + depth for depth in depths], ids, rows)
    made = model.plain_forward([work], _layer(model))
    kv_cache.commit(nodes[:commit], [])
    return made


def _products(model: RaggedModel, rows: torch.Tensor, at_once: int = PROMPT) -> Iterator[torch.Tensor]:
    """Some rows through one product of each kind, and through the head."""
    kinds: dict[CodesForm, CodesWeight] = {}
    for part in _parts(model):
        if isinstance(part, CodesWeight):
            kinds.setdefault(part.form, part)
    for weight in kinds.values():
        x = rows.repeat(1, -(-weight.columns // rows.shape[1]))[:PROMPT, : weight.columns].contiguous()
        yield torch.cat([weight.product(some)[:SOME] for some in torch.split(x, at_once)[:SOME]])[:SOME]
    if model.span.end == model.num_layers:
        yield torch.cat([model.logits(some) for some in torch.split(rows[:SOME], at_once)])


def _layer(model: RaggedModel) -> Span:
    return Span(model.span.start, model.span.start + 1)
