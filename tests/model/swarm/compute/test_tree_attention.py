"""The attention function against softmax written out by hand; and that each path is taken where it should be."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

import swarm.compute.tree_attention
from swarm.base.errors import UnsupportedModel
from swarm.base.ids import TreeNodeId
from swarm.compute.kv_cache import KvCache, KvLayout, LayerKv
from swarm.compute.tree_attention import (
    MAX_FOLDED_ROWS,
    AttentionReach,
    AttentionStep,
    SessionRange,
    attend,
    use_canopy,
)

HEADS, KV_HEADS, KEY, VALUE = 6, 2, 8, 12
LAYOUT = KvLayout((LayerKv(0, KV_HEADS, KEY, VALUE),), torch.float32, torch.device("cpu"))
MODULE = cast("torch.nn.Module", SimpleNamespace(layer_idx=0))


def append(kv_cache: KvCache, count: int, tree: bool = False, is_prefill: bool = False) -> SessionRange:
    """New nodes of one session: a chain, or a tree in which node i hangs below node i // 2."""
    used = kv_cache.slots.used
    nodes = [TreeNodeId(used + offset) for offset in range(count)]
    parents: list[TreeNodeId | None] = []
    positions: list[int] = []
    for offset in range(count):
        above = (offset - 1) // 2 if tree else offset - 1
        parents.append(None if above < 0 else nodes[above])
        positions.append(used if above < 0 else positions[above] + 1)
    visible = kv_cache.append(nodes, parents, positions)
    return SessionRange(kv_cache, 0, count, visible, torch.from_numpy(kv_cache.slots.positions), is_prefill)


def tensors(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    shapes = [(1, HEADS, rows, KEY), (1, KV_HEADS, rows, KEY), (1, KV_HEADS, rows, VALUE)]
    query, key, value = (torch.randn(shape, generator=noise) for shape in shapes)
    return query, key, value


def by_hand(part: SessionRange, query: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    keys, values = part.kv_cache.view(0, part.used)
    keys, values = (tensor.repeat_interleave(HEADS // KV_HEADS, 0) for tensor in (keys, values))
    scores = query[0] @ keys.transpose(1, 2) * options.get("scaling", KEY**-0.5)
    if options.get("softcap"):
        scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
    seen = part.visible.clone()
    if options.get("sliding_window"):
        seen &= part.positions[-part.rows :, None] - part.positions < options["sliding_window"]
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    rest = torch.zeros(HEADS) if options.get("s_aux") is None else options["s_aux"].exp()
    weights = weights / (weights.sum(-1, keepdim=True) + rest[:, None, None])
    output: torch.Tensor = weights @ values
    return output.transpose(0, 1)


@pytest.fixture
def session() -> KvCache:
    """Twelve committed tokens."""
    kv_cache = KvCache(LAYOUT, 256)
    part = append(kv_cache, 12)
    attend(MODULE, *tensors(12, seed=0), None, canopy=AttentionStep([part]))
    kv_cache.commit([TreeNodeId(node) for node in range(12)], [])
    return kv_cache


OPTIONS = [
    {},
    {"scaling": 0.5},
    {"sliding_window": 5},
    {"softcap": 2.0},
    {"s_aux": torch.linspace(-1, 2, HEADS)},
    {"softcap": 2.0, "s_aux": torch.linspace(-1, 2, HEADS), "sliding_window": 5},
]


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_a_trees_rows_attend_to_their_ancestors_and_the_committed(
    session: KvCache, options: dict[str, Any], rows: int
) -> None:
    part = append(session, rows, tree=True)
    query, key, value = tensors(rows, seed=1)
    output, _ = attend(MODULE, query, key, value, None, canopy=AttentionStep([part]), **options)
    assert output.shape == (1, rows, HEADS, VALUE)
    assert (output[0] - by_hand(part, query, options)).abs().max() <= 1e-5


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of every call of torch's own attention."""
    calls: list[dict[str, Any]] = []
    fused: Callable[..., torch.Tensor] = scaled_dot_product_attention

    def recording(query: torch.Tensor, *args: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append({"query": tuple(query.shape), **options})
        return fused(query, *args, **options)

    monkeypatch.setattr("swarm.compute.tree_attention.scaled_dot_product_attention", recording)
    return calls


@pytest.mark.parametrize(("window", "is_causal"), [(None, True), (40, True), (39, False)])
def test_a_prefill_shorter_than_the_window_needs_no_mask(
    fused_calls: list[dict[str, Any]], window: int | None, is_causal: bool
) -> None:
    part = append(KvCache(LAYOUT, 64), 40, is_prefill=True)
    query, key, value = tensors(40, seed=2)
    output, _ = attend(MODULE, query, key, value, None, canopy=AttentionStep([part]), sliding_window=window)
    assert [call["is_causal"] for call in fused_calls] == [is_causal]
    assert (fused_calls[0]["attn_mask"] is None) == is_causal
    assert (output[0] - by_hand(part, query, {"sliding_window": window})).abs().max() <= 1e-5


def test_few_rows_fold_the_heads_of_a_group_into_one_product(
    session: KvCache, fused_calls: list[dict[str, Any]]
) -> None:
    part = append(session, MAX_FOLDED_ROWS, tree=True)
    attend(MODULE, *tensors(MAX_FOLDED_ROWS, seed=3), None, canopy=AttentionStep([part]))
    assert fused_calls[0]["query"] == (1, KV_HEADS, HEADS // KV_HEADS * MAX_FOLDED_ROWS, KEY)


def test_the_mask_is_made_once_for_all_layers_of_a_step(session: KvCache) -> None:
    part = append(session, 20, tree=True)
    like = torch.zeros(1)
    everything, window, chunk = AttentionReach(), AttentionReach(5), AttentionReach(chunk=5)
    assert part.bias(everything, like) is part.bias(everything, like)
    assert part.bias(window, like) is part.bias(window, like) is not part.bias(everything, like)
    assert part.bias(window, like) is not part.bias(chunk, like)


def test_the_explicit_path_takes_few_rows_at_a_time(session: KvCache, monkeypatch: pytest.MonkeyPatch) -> None:
    part = append(session, 20, tree=True)
    query, key, value = tensors(20, seed=4)
    sizes: list[int] = []
    softmax = torch.Tensor.softmax

    def recording(scores: torch.Tensor, dim: int) -> torch.Tensor:
        sizes.append(scores.shape[2])
        return softmax(scores, dim)

    monkeypatch.setattr(torch.Tensor, "softmax", recording)
    monkeypatch.setattr(swarm.compute.tree_attention, "MAX_SCORES_BYTES", 4 * HEADS * part.used * 8)
    output, _ = attend(MODULE, query, key, value, None, canopy=AttentionStep([part]), softcap=3.0)
    assert sizes == [8, 8, 4]
    assert (output[0] - by_hand(part, query, {"softcap": 3.0})).abs().max() <= 1e-5


@pytest.mark.parametrize("step", [{}, {"canopy": None}])
def test_a_class_that_does_not_pass_the_step_on_is_refused(step: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="does not go through AttentionInterface"):
        attend(MODULE, *tensors(1, seed=5), None, **step)


def test_a_class_that_brings_its_own_mask_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="does not go through AttentionInterface"):
        attend(MODULE, *tensors(1, seed=5), torch.zeros(1, 1, 1, 1), canopy=AttentionStep())


def test_attention_that_is_planned_anew_for_every_shape_is_left_alone() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    use_canopy(LlamaConfig())
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    assert torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    assert torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
