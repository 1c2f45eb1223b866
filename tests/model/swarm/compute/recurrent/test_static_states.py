"""Mixers by the kernels against the class's own steps: trees of ragged sessions, long texts, going back, and the proof."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest
import torch
from transformers import PreTrainedModel

from swarm.base.ids import TreeNodeId
from swarm.compute.fast_path import GRAPHS, KERNELS, use_static
from swarm.compute.kernels.support import KERNEL_VERSION
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import RaggedModel, SessionRows
from tests.devices import DEVICE
from tests.model.recurrent_models import recurrent_model
from tests.model.tiny_models import reference, whole_model

FORCED: Final = DEVICE == "cpu"
FAST: Final = KERNELS if FORCED else GRAPHS
TOLERANCE: Final = 1e-5
PARENTS: Final = (None, 0, 0, 1, 1, 2, None, 3)
"""A tree, by offset; None is the tip."""
LEAVES: Final = (4, 5, 6, 7)
FAMILIES: Final = ("lfm2", "qwen3_next", "falcon_h1", "nemotron_h")


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def way(offset: int) -> list[int]:
    path = [offset]
    while (parent := PARENTS[path[0]]) is not None:
        path.insert(0, parent)
    return path


class Text:
    """One session."""

    def __init__(self, model: RaggedModel) -> None:
        self.kv_cache = KvCache(model.layout, 128)
        self.tokens: list[int] = []
        self.first = 0

    def rows(self, new: Sequence[int], parents: Sequence[int | None]) -> SessionRows:
        nodes = [TreeNodeId(self.first + offset) for offset in range(len(new))]
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent is None else depths[parent] + 1)
        above = [None if parent is None else nodes[parent] for parent in parents]
        positions = [len(self.tokens) + depth for depth in depths]
        return SessionRows(self.kv_cache, nodes, above, positions, torch.tensor(new))

    def chain(self, new: Sequence[int]) -> SessionRows:
        return self.rows(new, [None, *range(len(new) - 1)])

    def commit(self, new: Sequence[int], offsets: Sequence[int]) -> None:
        self.kv_cache.commit([TreeNodeId(self.first + offset) for offset in offsets], [])
        self.kv_cache.check_integrity()
        self.tokens += [new[offset] for offset in offsets]
        self.first += len(new)

    def truncate(self, length: int) -> None:
        self.kv_cache.truncate(length)
        del self.tokens[length:]


def by_kernels(family: str, *buckets: int) -> tuple[RaggedModel, PreTrainedModel]:
    whole = recurrent_model(family)
    model = whole_model(whole)
    use_static(model, 128, sessions=4, buckets=buckets or (16,), forced=FORCED)
    assert model.path == FAST, model.path_reason
    return model, whole


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_of_ragged_sessions_that_go_on_and_back_give_the_whole_models_logits(family: str) -> None:
    model, whole = by_kernels(family, 16, 32)
    assert model.numeric_class.endswith(f"-float32-k{KERNEL_VERSION}") or not FORCED
    texts = [Text(model), Text(model)]
    prompts = [ids(27, 4), ids(4, 5)]
    rows = model.forward([text.chain(new) for text, new in zip(texts, prompts, strict=True)])
    for text, new, own in zip(texts, prompts, torch.split(model.logits(rows).cpu(), [27, 4]), strict=True):
        assert (own - reference(whole, torch.tensor(new))).abs().max() <= TOLERANCE
        text.commit(new, range(len(new)))
    for turn, tip in enumerate((7, 4, 6)):
        trees = [ids(len(PARENTS), 10 * turn + place) for place in range(2)]
        rows = model.forward([text.rows(new, PARENTS) for text, new in zip(texts, trees, strict=True)])
        for text, new, logits in zip(texts, trees, torch.split(model.logits(rows).cpu(), len(PARENTS)), strict=True):
            for leaf in LEAVES:
                path = way(leaf)
                alone = reference(whole, torch.tensor(text.tokens + [new[offset] for offset in path]))
                assert (logits[path] - alone[-len(path) :]).abs().max() <= TOLERANCE
            text.commit(new, way(tip))
        if turn == 1:
            texts[0].truncate(14)
            texts[1].truncate(3)
