"""A span that moves: what stays is the same modules, what comes is read, and the result is a span loaded afresh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from node.model.checkpoint import Checkpoint, open_checkpoint
from node.model.loading import AUTO_SHARE, KV_RESERVE_TOKENS, fitting_layers
from node.model.span import dissect, load_span, shared_parts
from swarm.base.errors import NotEnoughSpace
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import RaggedModel, SessionRows
from swarm.compute.weights.format import WeightFormat
from swarm.demo import TARGET
from swarm.files.stored.source import StoredTensor
from tests.model.tiny_models import save_sharded, tiny_model

ROWS = 5


def run(model: RaggedModel) -> torch.Tensor:
    ids = tuple(TreeNodeId(number) for number in range(ROWS))
    rows = torch.randn(ROWS, model.hidden_size, generator=torch.Generator().manual_seed(1))
    is_first = model.span.start == 0
    work = SessionRows(
        KvCache(model.layout, ROWS),
        ids,
        (None, *ids[:-1]),
        range(ROWS),
        torch.arange(ROWS) if is_first else None,
        None if is_first else rows,
    )
    hidden = model.forward([work])
    return model.logits(hidden) if model.span.end == model.num_layers else hidden


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])  # gpt2 and gemma2 are tied
@pytest.mark.parametrize(
    ("old", "new"), [((0, 4), (2, 6)), ((2, 6), (0, 4)), ((0, 4), (1, 5)), ((0, 3), (3, 6)), ((0, 4), (0, 6))]
)
def test_only_what_is_missing_is_read(
    family: str, old: tuple[int, int], new: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(save_sharded(tiny_model(family), tmp_path / "whole"))
    layout = dissect(checkpoint.config)
    before, after = Span(*old), Span(*new)
    assert layout.num_layers == 6
    model = load_span(checkpoint, before, torch.float32)
    fresh = run(load_span(checkpoint, after, torch.float32))
    kept = {index: id(model._owned[index]) for index in range(max(old[0], new[0]), min(old[1], new[1]))}
    held = shared_parts(model, layout, after)
    read: list[str] = []
    tensors = Checkpoint.read

    def noted(self: Checkpoint, names: Any) -> dict[str, torch.Tensor | StoredTensor]:  # noqa: ANN401
        found = tensors(self, names)
        read.extend(found)
        return found

    monkeypatch.setattr(Checkpoint, "read", noted)
    moved = load_span(checkpoint, after, torch.float32, held=held)
    wanted = {index for index in range(*new) if index not in kept}
    assert {index for index in range(6) if layout.needed(layers(read), Span(index, index + 1))} == wanted
    assert {index: id(moved._owned[index]) for index in kept} == kept
    assert torch.equal(run(moved), fresh)
    assert all(weight.device.type == "meta" for weight in model.model.parameters()), "the rest is freed"


def layers(tensors: list[str]) -> list[str]:
    return [name for name in tensors if any(part.isdigit() for part in name.split("."))]


def test_as_many_layers_as_fit_anywhere_in_the_model() -> None:
    layout = dissect(open_checkpoint(TARGET).config)
    ends, layer, kv = 786_432 + 192, 393_600, 2 * 2 * 32
    for count in (1, 5, 12):
        needs = 4 * (ends + count * (layer + kv * KV_RESERVE_TOKENS))
        assert fitting_layers(layout, WeightFormat(torch.float32), int(needs / AUTO_SHARE) + 2) == count
        assert fitting_layers(layout, WeightFormat(torch.bfloat16), int(needs / AUTO_SHARE / 2) + 2) == count
    assert fitting_layers(layout, WeightFormat(torch.float32), 2**40) == 12
    assert (
        fitting_layers(layout, WeightFormat(torch.float32), int(4 * (ends + layer * 3) / AUTO_SHARE), kv_tokens=1) == 2
    )
    with pytest.raises(NotEnoughSpace, match=r"not one layer fits\. .*--num-layers 1"):
        fitting_layers(layout, WeightFormat(torch.float32), 1_000)
