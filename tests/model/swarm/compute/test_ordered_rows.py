"""A CPU that multiplies with integers: a row's bits are those of its own path alone, whatever is beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from node.model.checkpoint import open_checkpoint
from node.model.loading import format_of, held_as_stored
from node.model.packed_span import load_packed
from node.model.span import SpanModel, dissect
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute import ordered_rows, position_attention
from swarm.compute.kv_cache import KvCache
from swarm.compute.position_attention import POSITIONS
from swarm.compute.ragged_batch import SessionRows
from swarm.compute.weights.codes_weight import CodesWeight
from swarm.compute.weights.format import computes_bfloat16
from tests.model.gguf_files import TinyGguf
from tests.model.quantised_models import awq, gptq, save_quantised
from tests.model.tiny_models import VOCAB, tiny_model

CPU = torch.device("cpu")
__test__ = computes_bfloat16(CPU)  # elsewhere such files are multiplied in float32, and nothing here is collected
TOKENS = 300
IDS = torch.randint(0, VOCAB, (TOKENS + 64,), generator=torch.Generator().manual_seed(0))
ROOM: dict[str, Any] = {"max_position_embeddings": 1_024}
FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "granite": "granite",
    "olmo2": "olmo2",
}
KINDS = (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K, Kind.Q8_0)
Tree = tuple[Sequence[int | None], Sequence[int]]


def tiny(family: str, path: Path, kind: Kind = Kind.Q4_K) -> Path:
    """A file of one type of matrices."""
    return TinyGguf.of(family, FAMILIES.get(family, family), lambda *_: kind, **ROOM).write(path / "tiny.gguf")


def spans(path: Path, *cuts: Span) -> list[SpanModel]:
    checkpoint = open_checkpoint(path)
    layout = dissect(checkpoint.config)
    form = format_of(checkpoint, layout, "auto", torch.bfloat16, CPU)
    return [load_packed(checkpoint, cut, form, CPU) for cut in cuts or (Span(0, layout.num_layers),)]


class Session:
    """A session through all spans of a model."""

    def __init__(self, models: Sequence[SpanModel]) -> None:
        self.models = models
        self.caches = [KvCache(model.layout, TOKENS + 100) for model in models]

    def work(self, parents: Sequence[int | None], ids: torch.Tensor) -> SessionRows:
        """New nodes below the tip, for the first of the models."""
        start = self.caches[0].slots.committed
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent is None else depths[parent] + 1)
        nodes = [TreeNodeId(start + place) for place in range(len(parents))]
        above = [None if parent is None else nodes[parent] for parent in parents]
        return SessionRows(self.caches[0], nodes, above, [start + depth for depth in depths], ids)

    def sweep(self, parents: Sequence[int | None], ids: torch.Tensor, keep: Sequence[int] = ()) -> torch.Tensor:
        """The logits of new nodes; those of `keep` are committed."""
        work = self.work(parents, ids)
        rows: torch.Tensor | None = None
        for model, kv_cache in zip(self.models, self.caches, strict=True):
            rows = model.forward([SessionRows(kv_cache, work.node_ids, work.parents, work.positions, ids, rows)])
            kv_cache.commit([work.node_ids[place] for place in keep], [])
        assert rows is not None
        return self.models[-1].logits(rows)

    def prompt(self, count: int, part: int) -> torch.Tensor:
        """The logits of a prompt that comes in parts."""
        made = []
        for start in range(0, count, part):
            ids = IDS[start : min(start + part, count)]
            made.append(self.sweep([None, *range(len(ids) - 1)], ids, range(len(ids))))
        return torch.cat(made)


def tree(nodes: int, seed: int = 0) -> Tree:
    """Parents of a random tree, and its longest path."""
    draw = torch.Generator().manual_seed(seed)
    parents: list[int | None] = [None]
    depths = [0]
    for node in range(1, nodes):
        parents.append(int(torch.randint(max(0, node - 5), node, (1,), generator=draw)))
        depths.append(depths[parents[-1] or 0] + 1)
    path: list[int] = []
    at: int | None = max(range(nodes), key=depths.__getitem__)
    while at is not None:
        path.insert(0, at)
        at = parents[at]
    return parents, path


def check(models: Sequence[SpanModel], prompts: Sequence[int] = (100, POSITIONS - 3)) -> None:
    """Trees give what a path gives that is decoded token by token, before and after a commit."""
    for prompt, nodes in zip(prompts, (16, 64), strict=True):
        parents, path = tree(nodes)
        ids = IDS[TOKENS : TOKENS + nodes]
        one, other = Session(models), Session(models)
        assert torch.equal(one.prompt(prompt, 64), other.prompt(prompt, prompt))
        beside = one.sweep(parents, ids, path)[list(path)]
        alone = torch.cat([other.sweep([None], ids[at : at + 1], (0,)) for at in path])
        assert torch.equal(beside, alone)
        assert torch.equal(one.sweep([None, 0, 0], IDS[:3])[0], other.sweep([None], IDS[:1])[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_leaves_the_bits_of_every_family_as_they_are(family: str, tmp_path: Path) -> None:
    models = spans(tiny(family, tmp_path))
    assert (models[0].numeric_class, models[0].varies) == ("cpu-bfloat16-k2+gguf", "")
    check(models)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_so_does_every_type_whatever_the_parts_of_a_prompt_and_the_threads(kind: Kind, tmp_path: Path) -> None:
    models = spans(tiny("llama", tmp_path, kind))
    before = torch.get_num_threads()
    made = []
    try:
        for threads, part in ((1, 1), (1, 7), (1, 64), (2, 64), (2, 128), (2, 300)):
            torch.set_num_threads(threads)
            made.append(Session(models).prompt(TOKENS, part))
        check(models)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, made[0]) for one in made)


def test_splits_and_other_sessions_change_nothing(tmp_path: Path) -> None:
    path = tiny("llama", tmp_path)
    whole, parts = spans(path), spans(path, Span(0, 1), Span(1, 3))
    check(parts)
    assert torch.equal(Session(whole).prompt(90, 64), Session(parts).prompt(90, 31))
    sessions = [Session(whole) for _ in range(3)]
    for session, count in zip(sessions, (40, 129, 7), strict=True):
        session.prompt(count, count)
    works = [
        session.work(tree(nodes, nodes)[0], IDS[:nodes]) for session, nodes in zip(sessions, (16, 1, 9), strict=True)
    ]
    together = whole[0].forward(works)
    for session, work, rows in zip(sessions, works, torch.split(together, [16, 1, 9]), strict=True):
        session.caches[0].withdraw(len(rows))
        assert torch.equal(whole[0].forward([work]), rows)


@pytest.mark.parametrize("form", [gptq(), awq()], ids=["gptq", "awq"])
def test_a_head_that_is_not_packed_takes_fours_of_rows(form: Any, tmp_path: Path) -> None:  # noqa: ANN401
    made = tiny_model("mistral", changes={"max_position_embeddings": 1_024})
    models = spans(save_quantised(made, form, tmp_path / "model").folder)
    assert models[0].numeric_class.startswith("cpu-bfloat16-k2+")
    check(models)


def test_what_is_not_compared_promises_nothing_and_is_named(tmp_path: Path) -> None:
    path = TinyGguf.of("gemma2", "gemma2", lambda *_: Kind.Q4_K, query_pre_attn_scalar=64).write(tmp_path / "tiny.gguf")
    (model,) = spans(path)
    assert model.numeric_class == "cpu-bfloat16-k1+gguf"
    assert not model.layout.by_positions
    assert "gemma2" in held_as_stored(model)


@pytest.mark.parametrize("broken", ["product", "attention"])
def test_a_processor_that_adds_up_by_rows_costs_the_promise(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = CodesWeight.product

    def varying(self: CodesWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return product(self, x, bias) + (1 if x.numel() == self.columns else 0)

    if broken == "product":
        monkeypatch.setattr(CodesWeight, "product", varying)
    else:
        monkeypatch.setattr(position_attention, "_bias", lambda seen: torch.zeros_like(seen, dtype=torch.bfloat16))
    (model,) = spans(tiny("llama", tmp_path))
    assert model.numeric_class == "cpu-bfloat16-k1+gguf"
    assert "on this processor" in model.varies
    assert not model.layout.by_positions
    assert not any(part.is_ordered for part in ordered_rows._parts(model) if isinstance(part, CodesWeight))
