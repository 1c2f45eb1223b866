"""Models whose layers use more of each other than hidden rows: where they may be cut, and what travels between."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

import node.model.span
from node.model.checkpoint import open_checkpoint
from node.model.family_check import TOLERANCE, conformance_error, random_model, shrink, spans_of
from node.model.packed_span import load_packed
from node.model.span import dissect, load_tested
from swarm.base.errors import LayersError
from swarm.base.layers import Span, SpanBorders
from swarm.compute.kv_cache import KvCache
from swarm.compute.layers.pass_through import as_hidden, as_rows
from swarm.compute.ragged_batch import SessionRows
from swarm.compute.weights.format import WeightFormat
from swarm.files.families import needs_ids, span_starts
from tests.model.tiny_models import chain, reference

SHARED_INDEX = {"indexer_types": ["full", "shared", "shared"] * 2, "num_hidden_layers": 6}
SHARED_KV = {"num_hidden_layers": 10, "num_kv_shared_layers": 5}


def make_config(family: str, **values: object) -> PreTrainedConfig:
    config: PreTrainedConfig = cast("Any", CONFIG_MAPPING[family])(**values)
    return config


@pytest.mark.parametrize(
    ("family", "changes", "starts"),
    [
        ("llama", {"num_hidden_layers": 4}, (0, 1, 2, 3)),
        ("glm_moe_dsa", SHARED_INDEX, (0, 3)),
        ("gemma3n_text", SHARED_KV, (0, 1, 2, 3)),
        ("gemma4_text", {"num_hidden_layers": 12, "num_kv_shared_layers": 1}, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_a_span_begins_where_layers_need_nothing_but_rows(
    family: str, changes: dict[str, Any], starts: tuple[int, ...]
) -> None:
    assert span_starts(make_config(family, **changes)) == starts


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("glm_moe_dsa", SHARED_INDEX),
        ("hy_v4", {}),
        ("dots3_note_text", {}),
        ("gemma3n_text", {}),
        ("deepseek_v4", {}),
        ("gemma4_text", {"num_kv_shared_layers": 18, "num_hidden_layers": 30}),
    ],
)
def test_models_are_exact_where_they_may_be_cut(family: str, changes: dict[str, Any]) -> None:
    """Selections and keys of earlier layers, streams of rows, folded keys, embeddings of tokens in every layer."""
    small = shrink(make_config(family, **changes))
    assert len(spans_of(small)) > 1
    assert conformance_error(small, load_tested) <= TOLERANCE


def test_a_model_with_embeddings_in_every_layer_has_them_on_every_machine() -> None:
    small = shrink(make_config("gemma3n_text"))
    layout = dissect(small)
    assert needs_ids(small)
    assert set(layout.front) < set(layout.modules(Span(1, 2)))
    assert not needs_ids(make_config("gemma4_text", hidden_size_per_layer_input=0))


BORDERS = SpanBorders((0, 1, 2, 6), 8)


def test_a_cut_within_layers_that_belong_together_names_the_nearest_others() -> None:
    assert BORDERS.check(Span(1, 6)) == Span(1, 6)
    with pytest.raises(LayersError, match=r"layers 0-4: layers 2-6 use .* write 2 or 6 in place of 4"):
        BORDERS.check(Span(0, 4))
    with pytest.raises(LayersError, match=r"layers 7-8: layers 6-8 use .* write 6 or 8 in place of 7"):
        BORDERS.check(Span(7, 8))
    with pytest.raises(LayersError, match=r"layers 0-9: the model has 8 layers"):
        BORDERS.check(Span(0, 9))


@pytest.mark.parametrize(
    ("wished", "nearest"),
    [((0, 2), (0, 2)), ((0, 4), (2, 6)), ((3, 7), (2, 6)), ((5, 8), (6, 8)), ((2, 7), (1, 6)), ((3, 4), (1, 2))],
)
def test_a_node_that_chooses_by_itself_takes_the_nearest_span_that_it_can_hold(
    wished: tuple[int, int], nearest: tuple[int, int]
) -> None:
    assert BORDERS.nearest(Span(*wished)) == Span(*nearest)


def test_a_node_that_is_too_small_for_what_belongs_together_is_told() -> None:
    with pytest.raises(LayersError, match=r"cut into 3 layers at least, and 2 were to be held"):
        SpanBorders((0, 3), 6).nearest(Span(0, 2))


@pytest.mark.parametrize("shape", [(1, 5, 8), (1, 5, 4, 8), (4, 1, 5, 8), (1, 1, 4, 8), (4, 1, 1, 8), (1, 4, 4, 8)])
def test_rows_of_any_form_come_back_as_they_were(shape: tuple[int, ...]) -> None:
    hidden = torch.randn(shape)
    count = hidden.numel() // (8 if len(shape) == 3 else 32)
    rows = as_rows(hidden, 1, count)
    assert rows.shape[:2] == (1, count)
    assert torch.equal(as_hidden(rows, hidden), hidden)
    assert torch.equal(rows[0, 0].sort().values, hidden.movedim(shape.index(count, 1), 0)[0].flatten().sort().values)


@pytest.mark.parametrize("family", ["gemma3n_text", "llama4_text"])
def test_layers_that_need_more_than_rows_are_packed_too(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.model.span, "TESTED", {family})
    whole = random_model(shrink(make_config(family)))
    whole.save_pretrained(tmp_path)
    checkpoint, ids, rows = open_checkpoint(tmp_path), torch.arange(12) * 7 % 100 + 3, None
    form = WeightFormat.of("int8", torch.float32, torch.device("cpu"))
    for span in spans_of(whole.config):
        model = load_packed(checkpoint, span, form, torch.device("cpu"))
        work = chain(KvCache(model.layout, len(ids)), ids)
        rows = model.forward([SessionRows(work.kv_cache, work.node_ids, work.parents, work.positions, ids, rows)])
    assert rows is not None
    both = torch.stack([model.logits(rows).flatten(), reference(whole, ids).flatten()])
    assert float(both.corrcoef()[0, 1]) > 0.97
