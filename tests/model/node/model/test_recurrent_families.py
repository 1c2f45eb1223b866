"""Families whose layers keep a state, in three spans against the whole: prompts, trees, commits and going back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from node.model.checkpoint import open_checkpoint
from node.model.span import SpanModel, dissect, load_span
from node.session.context import NodeContext
from node.session.measure import benchmark, forward_ms
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.fast_path import use_static
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import SessionRows
from swarm.compute.recurrent.plan import MIN_SEQUENCE
from swarm.compute.weights.format import WeightFormat
from swarm.files.families import TESTED
from swarm.protocol.messages import Credits
from tests.devices import DEVICE
from tests.model.recurrent_models import RECURRENT, recurrent_model
from tests.model.tiny_models import SPANS, reference, save_sharded

TOLERANCE = 1e-5
PARENTS = (None, 0, 0, 1, 1, 2, None, 3)
"""A tree, by offset; None is the tip."""
LEAVES = (4, 5, 6, 7)
LONG, SHORT = 2 * MIN_SEQUENCE + 3, 4


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def way(offset: int) -> list[int]:
    path = [offset]
    while (parent := PARENTS[path[0]]) is not None:
        path.insert(0, parent)
    return path


@dataclass
class Text:
    """One session on all machines: its committed tokens, and the nodes of the sweep that is live."""

    kv_caches: list[KvCache]
    tokens: list[int] = field(default_factory=list)
    first: int = 0

    def rows(self, new: list[int], parents: list[int | None]) -> list[SessionRows]:
        """New nodes, for every machine; hidden rows are still missing."""
        nodes = [TreeNodeId(self.first + offset) for offset in range(len(new))]
        above = [None if parent is None else nodes[parent] for parent in parents]
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent is None else depths[parent] + 1)
        positions = [len(self.tokens) + depth for depth in depths]
        return [SessionRows(cache, nodes, above, positions, torch.tensor(new)) for cache in self.kv_caches]

    def commit(self, new: list[int], offsets: list[int], live: int) -> None:
        for cache in self.kv_caches:
            cache.commit([TreeNodeId(self.first + offset) for offset in offsets], [])
            cache.check_integrity()
        self.tokens += [new[offset] for offset in offsets]
        self.first += live

    def truncate(self, length: int) -> None:
        for cache in self.kv_caches:
            cache.truncate(length)
        del self.tokens[length:]


def run(spans: list[SpanModel], works: list[list[SessionRows]]) -> list[torch.Tensor]:
    """Sweeps of all sessions in one forward per machine; logits of each."""
    counts = [len(own[0].node_ids) for own in works]
    rows: torch.Tensor | None = None
    for place, model in enumerate(spans):
        pieces = [None] * len(works) if rows is None else torch.split(rows, counts)
        batch = [
            SessionRows(own[place].kv_cache, own[place].node_ids, own[place].parents, own[place].positions,
                        own[place].token_ids, piece)
            for own, piece in zip(works, pieces, strict=True)
        ]  # fmt: skip
        rows = model.forward(batch)
    assert rows is not None
    return [*torch.split(spans[-1].logits(rows).cpu(), counts)]


@pytest.fixture(params=sorted(RECURRENT), scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    whole = recurrent_model(request.param)
    return whole, save_sharded(whole, tmp_path_factory.mktemp(request.param))


def test_these_families_count_as_tested() -> None:
    assert set(RECURRENT) <= TESTED


def test_trees_of_ragged_sessions_that_go_on_and_back_give_the_whole_models_logits(
    family: tuple[PreTrainedModel, Path],
) -> None:
    whole, folder = family
    spans = [load_span(open_checkpoint(folder), span, torch.float32, DEVICE) for span in SPANS]
    texts = [Text([KvCache(model.layout, 128) for model in spans]) for _ in range(2)]
    prompts = [ids(LONG, 4), ids(SHORT, 5)]
    works = [text.rows(new, [None, *range(len(new) - 1)]) for text, new in zip(texts, prompts, strict=True)]
    for text, new, logits in zip(texts, prompts, run(spans, works), strict=True):
        assert (logits - reference(whole, torch.tensor(new))).abs().max() <= TOLERANCE
        text.commit(new, [*range(len(new))], len(new))
    for turn, tip in enumerate((7, 4, 6)):
        trees = [ids(len(PARENTS), 10 * turn + place) for place in range(2)]
        works = [text.rows(new, list(PARENTS)) for text, new in zip(texts, trees, strict=True)]
        for text, new, logits in zip(texts, trees, run(spans, works), strict=True):
            for leaf in LEAVES:
                path = way(leaf)
                alone = reference(whole, torch.tensor(text.tokens + [new[offset] for offset in path]))
                assert (logits[path] - alone[-len(path) :]).abs().max() <= TOLERANCE
            text.commit(new, way(tip), len(PARENTS))
        if turn == 1:
            texts[0].truncate(MIN_SEQUENCE + 2)
            texts[1].truncate(SHORT - 1)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> SpanModel:
    """States, and attention, in each layer."""
    folder = save_sharded(recurrent_model("falcon_h1"), tmp_path_factory.mktemp("falcon_h1"))
    return load_span(open_checkpoint(folder), Span(2, 4), torch.float32, DEVICE)


def test_a_session_that_uses_some_of_a_machines_layers_keeps_their_states_alone(tmp_path: Path) -> None:
    whole = recurrent_model("falcon_h1")
    model = load_span(open_checkpoint(save_sharded(whole, tmp_path)), Span(0, 6), torch.float32, DEVICE)
    text, entering = ids(LONG, 6), torch.tensor(ids(LONG, 6))
    nodes = [TreeNodeId(node) for node in range(LONG)]
    for sub in SPANS:
        kv_cache = KvCache(model.layout.within(sub), LONG)
        assert {state.index for state in kv_cache.layout.states} == set(range(sub.start, sub.end))
        given = {"token_ids" if sub.start == 0 else "rows": entering}
        work = SessionRows(kv_cache, nodes, [None, *nodes[:-1]], range(LONG), **given)
        entering = model.forward([work], sub)
    assert (model.logits(entering).cpu() - reference(whole, torch.tensor(text))).abs().max() <= TOLERANCE


def test_all_that_a_session_takes_is_counted_in_the_kv_budget(hybrid: SpanModel) -> None:
    credits = Credits(window_tokens=100, sweeps=4, nodes=50)
    counted = NodeContext.kv_tokens(cast("Any", SimpleNamespace(model=hybrid)), credits)
    kv_cache = KvCache(hybrid.layout, 150, 50)
    assert kv_cache.states is not None
    taken = sum(each.nbytes for each in kv_cache._tensors())
    taken += sum(part.nbytes for parts in kv_cache.states._parts.values() for part in parts)
    assert 0 <= counted * hybrid.layout.bytes_per_token - taken < 8 * hybrid.layout.bytes_per_token


def test_what_is_measured_is_a_tree_behind_a_text(hybrid: SpanModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[SessionRows] = []
    forward = hybrid.forward

    def noted(batch: list[SessionRows], sub: Span | None = None) -> torch.Tensor:
        ran.extend(batch)
        return forward(batch, sub)

    monkeypatch.setattr(hybrid, "forward", noted)
    forward_ms(hybrid, 7, time.perf_counter)
    assert [len(work.node_ids) for work in ran] == [1, 7]
    assert ran[1].parents == (None, 1, 1, 2, 3, 3, 4)
    assert ran[1].positions == (1, 2, 2, 3, 3, 3, 4)


def test_how_fast_synthetic_layers_run_is_measured_too(hybrid: SpanModel) -> None:
    speed = benchmark(dissect(hybrid.config), WeightFormat(torch.float32), torch.device("cpu"))
    assert speed.is_measured


def test_states_of_a_kind_that_kernels_do_not_know_leave_the_plain_path(tmp_path: Path) -> None:
    whole = recurrent_model("kimi_linear")
    model = load_span(open_checkpoint(save_sharded(whole, tmp_path)), Span(0, 2), torch.float32, DEVICE)
    work = Text([KvCache(model.layout, 8)]).rows(ids(5, 1), [None, 0, 1, 2, 3])
    rows = model.forward(work)
    use_static(model, 32, forced=DEVICE == "cpu")
    assert (model.path, model.static) == ("plain", None)
    assert "goes on from token to token in a way of its own" in model.path_reason
    again = Text([KvCache(model.layout, 8)]).rows(ids(5, 1), [None, 0, 1, 2, 3])
    assert torch.equal(model.forward(again), rows)
