"""Every family, in three spans loaded from a sharded folder without the other spans' files, against the whole model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import swarm.compute.class_attention
from node.model.checkpoint import open_checkpoint
from node.model.span import ModelLayout, SpanModel, dissect
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.class_attention import MAX_CALL_BYTES
from swarm.compute.fast_path import use_static
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import PLAIN_PATH, SessionRows
from swarm.compute.tree_attention import MAX_FOLDED_ROWS
from swarm.files.families import TESTED
from tests.model.recurrent_models import RECURRENT
from tests.model.tiny_models import (
    FAMILIES,
    LAYERS,
    OTHER_KINDS,
    SPANS,
    WINDOW,
    chain,
    load_alone,
    reference,
    run_chain,
    save_sharded,
    whole_model,
)
from tests.model.tiny_models import tiny_model as make_tiny

TOLERANCE = 1e-5
PARENTS = (None, 0, 0, 1, 1, 2, None)
"""A tree of seven nodes, by offset; None is the tip."""


def random_ids(count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed))


def new_kv_caches(spans: list[SpanModel], sessions: int) -> list[list[KvCache]]:
    return [[KvCache(model.layout, 64) for _ in range(sessions)] for model in spans]


def tree(kv_cache: KvCache, ids: torch.Tensor, first: int) -> SessionRows:
    """PARENTS below the tip of a chain whose last node is `first - 1`."""
    positions: list[int] = []
    for parent in PARENTS:
        positions.append(first if parent is None else positions[parent] + 1)
    parents = [TreeNodeId(first - 1 if parent is None else first + parent) for parent in PARENTS]
    return SessionRows(
        kv_cache, [TreeNodeId(first + offset) for offset in range(len(PARENTS))], parents, positions, ids
    )


def path_to(offset: int) -> list[int]:
    path = [offset]
    while (parent := PARENTS[path[0]]) is not None:
        path.insert(0, parent)
    return path


def test_the_list_of_tested_families_is_what_is_tested_here() -> None:
    assert set(FAMILIES) | set(OTHER_KINDS) | set(RECURRENT) == TESTED


@pytest.mark.parametrize("name", sorted(FAMILIES | OTHER_KINDS))
def test_three_spans_of_a_family_are_the_whole_model(name: str, tmp_path: Path) -> None:
    whole = make_tiny(name)
    save_sharded(whole, tmp_path / "whole")
    spans = [load_alone(tmp_path / "whole", span, tmp_path / str(span)) for span in SPANS]
    compare_weights(whole, spans, dissect(open_checkpoint(tmp_path / "whole").config))
    compare_texts(whole, spans)
    compare_trees(whole, spans)


def compare_weights(whole: PreTrainedModel, spans: list[SpanModel], layout: ModelLayout) -> None:
    """A span has its own weights and no others."""
    for model, span in zip(spans, SPANS, strict=True):
        assert model.weight_bytes == 4 * layout.weights_in(span)
    shared = 4 * layout.weights[layout.front[0]] if layout.is_tied else 0  # the tail has a copy of the embedding
    total = sum(4 * weight.numel() for weight in whole.parameters())
    assert sum(model.weight_bytes for model in spans) == total + shared
    assert layout.weights_in(Span(0, LAYERS)) * 4 == total


def compare_texts(whole: PreTrainedModel, spans: list[SpanModel]) -> None:
    """Logits of a text that is longer than a window."""
    ids = random_ids(20, seed=3)
    assert len(ids) > max(WINDOW, MAX_FOLDED_ROWS)
    kv_caches = new_kv_caches(spans, sessions=1)
    rows = run_chain(spans, kv_caches, [chain(kv_caches[0][0], ids)])
    assert (spans[-1].logits(rows).cpu() - reference(whole, ids)).abs().max() <= TOLERANCE


def compare_trees(whole: PreTrainedModel, spans: list[SpanModel]) -> None:
    """Trees of two ragged sessions in one forward give what each path gives alone."""
    prompts = [random_ids(11, seed=4), random_ids(4, seed=5)]
    trees = [random_ids(len(PARENTS), seed=6), random_ids(len(PARENTS), seed=7)]
    kv_caches = new_kv_caches(spans, sessions=2)
    run_chain(spans, kv_caches, [chain(kv_cache, ids) for kv_cache, ids in zip(kv_caches[0], prompts, strict=True)])
    works = [
        tree(kv_cache, ids, len(prompt)) for kv_cache, ids, prompt in zip(kv_caches[0], trees, prompts, strict=True)
    ]
    logits = spans[-1].logits(run_chain(spans, kv_caches, works)).cpu()
    for ids, prompt, got in zip(trees, prompts, torch.split(logits, len(PARENTS)), strict=True):
        for offset in range(len(PARENTS)):
            alone = reference(whole, torch.cat([prompt, ids[path_to(offset)]]))[-1]
            assert (got[offset] - alone).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["bloom", "deepseek_v32"])
def test_rows_are_cut_where_keys_and_scores_would_take_too_much(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, counts = whole_model(make_tiny(name)), []
    rows = []
    for limit in (MAX_CALL_BYTES, 1_000):
        monkeypatch.setattr(swarm.compute.class_attention, "MAX_CALL_BYTES", limit)
        forwards: list[int] = []
        caches = [KvCache(model.layout, 32) for _ in range(2)]
        hook = model.layers[0].register_forward_hook(lambda *_, ran=forwards: ran.append(1))
        prompts = [random_ids(11, seed=4), random_ids(4, seed=5)]
        model.forward([chain(cache, ids) for cache, ids in zip(caches, prompts, strict=True)])
        trees = [tree(cache, random_ids(len(PARENTS), 6), len(ids)) for cache, ids in zip(caches, prompts, strict=True)]
        rows.append(model.forward(trees))
        hook.remove()
        counts.append(len(forwards))
    assert counts[0] < counts[1]
    assert (rows[0] - rows[1]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["llama4_text", "doge", "deepseek_v32"])
def test_kernels_decline_other_kinds_of_attention_and_say_why(name: str) -> None:
    model = whole_model(make_tiny(name))
    use_static(model, 64, forced=True)
    assert model.path == PLAIN_PATH
    assert re.search("attention|computes", model.path_reason)
