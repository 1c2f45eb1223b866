"""A forward in parts: the same bits as in one, and between the parts what transformers calls hidden states."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedModel

from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import RaggedModel
from tests.model.recurrent_models import RECURRENT, recurrent_model
from tests.model.swarm.compute.test_static_forward import by_kernels, random_ids, tree
from tests.model.tiny_models import FEW, chain, clone, tiny_model, whole_model

PARENTS = (None, 0, 1, 1, 0, None)
DENSE = ("llama", "gemma2", "gpt2", "llama4_text", "bloom")
"""Also some whose layers attend in another way, or whose classes attend themselves."""


def model_of(family: str) -> PreTrainedModel:
    return recurrent_model(family) if family in RECURRENT else tiny_model(family)


def parts_of(model: RaggedModel) -> list[Span]:
    starts = [0, *[start for start in model.borders.starts if start][:2], model.num_layers]
    return [Span(*ends) for ends in pairwise(starts)]


@pytest.mark.parametrize("family", [*DENSE, "qwen3_next", "falcon_h1", "lfm2"])
@torch.inference_mode()
def test_parts_are_the_whole_and_rows_between_them_are_hidden_states(family: str) -> None:
    whole = model_of(family)
    model, text = whole_model(clone(whole)), random_ids(9)
    parts = parts_of(model)
    states = whole(text[None], output_hidden_states=True).hidden_states
    one, cut = (KvCache(model.layout, 32) for _ in range(2))
    leaving = model.forward_parts([chain(cut, text)], parts)
    assert torch.equal(leaving[-1], model.forward([chain(one, text)]))
    for part, rows in zip(parts[:-1], leaving, strict=False):
        wanted = states[part.end][0]
        assert (rows - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    for kv_cache in (one, cut):
        kv_cache.commit([TreeNodeId(node) for node in range(9)], ())
    ids = random_ids(len(PARENTS), 1)
    again = model.forward_parts([tree(cut, PARENTS, ids)], parts)
    assert torch.equal(again[-1], model.forward([tree(one, PARENTS, ids)]))


@torch.inference_mode()
def test_kernels_run_parts_too_also_of_a_batch_that_is_cut_to_its_buckets() -> None:
    model = whole_model(tiny_model("llama", changes=FEW))
    parts, ids = [Span(0, 1), Span(1, 2), Span(2, 3)], [random_ids(5, seed) for seed in range(3)]

    def works() -> list[KvCache]:
        return [KvCache(model.layout, 32) for _ in ids]

    plain = model.plain_parts([chain(*own) for own in zip(works(), ids, strict=True)], parts)
    by_kernels(model, 8)
    found = model.forward_parts([chain(*own) for own in zip(works(), ids, strict=True)], parts)
    for rows, wanted in zip(found, plain, strict=True):
        assert rows.shape == wanted.shape == (15, model.hidden_size)
        assert (rows - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@torch.inference_mode()
def test_a_part_that_fails_leaves_no_node_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = whole_model(tiny_model("llama"))
    kv_cache, ran = KvCache(model.layout, 32), model._through

    def failing(sub: Span, *rest: object) -> torch.Tensor:
        if sub.start:
            raise MemoryError
        return ran(sub, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "_through", failing)
    with pytest.raises(MemoryError):
        model.forward_parts([chain(kv_cache, random_ids(4))], [Span(0, 1), Span(1, model.num_layers)])
    assert kv_cache.slots.used == 0
