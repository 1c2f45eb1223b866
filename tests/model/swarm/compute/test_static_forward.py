"""Forwards through fixed addresses against the plain path and the whole model.

On a CPU the kernels run in Triton's interpreter, and a replay starts them one by one; graphs themselves need a card.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch

from swarm.base.errors import LocalProtocolError
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.fast_path import use_row_invariant_products
from swarm.compute.kernels.batch_plan import BatchPlan
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import RaggedModel, SessionRows
from swarm.compute.static_forward import (
    AddressTable,
    FixedMemory,
    GraphKey,
    StaticForward,
    StaticLimits,
    StaticOutput,
    SweepGraphs,
)
from tests.model.tiny_models import FAMILIES, FEW, chain, reference, tiny_model, whole_model

TOLERANCE = 1e-5
PARENTS = ((None, 0, 1, 2, 3, 4, 2), (None, 0, None))
"""Trees of two sessions that have nothing else: a path longer than the window, roots that share a tip."""
LEAVES = ((5, 6), (1, 2))
THIRDS = (Span(0, 1), Span(1, 2), Span(2, 3))
TEXT = 16
"""Certain tokens in front of a tree."""


def by_kernels(model: RaggedModel, *buckets: int, sessions: int = 8, backend: str | None = None) -> StaticForward:
    """Let a model run through kernels, unproven.

    On a card with our products too, as it is served: the classes' own experts cannot be recorded.
    """
    if model.device.type == "cuda":
        use_row_invariant_products(model)
    model.static = static = StaticForward(model, StaticLimits(96, sessions, buckets or (16,)), backend=backend)
    static.record()
    return static


def tree(kv_cache: KvCache, parents: Sequence[int | None], ids: torch.Tensor) -> SessionRows:
    """Nodes below the tip, parents by offset."""
    start, positions = kv_cache.slots.committed, list[int]()
    for parent in parents:
        positions.append(start if parent is None else positions[parent] + 1)
    nodes = [TreeNodeId(start + offset) for offset in range(len(parents))]
    return SessionRows(kv_cache, nodes, [None if one is None else nodes[one] for one in parents], positions, ids)


def path(parents: Sequence[int | None], leaf: int) -> list[int]:
    found = [leaf]
    while (parent := parents[found[0]]) is not None:
        found.insert(0, parent)
    return found


def random_ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed))


def in_thirds(model: RaggedModel, caches: Sequence[Sequence[KvCache]], works: Sequence[SessionRows]) -> torch.Tensor:
    """Rows of one batch through three spans; caches[i][j] is session j's in span i, and works have those of span 0."""
    rows = model.forward(works, THIRDS[0])
    counts = [len(work.node_ids) for work in works]
    for span, own in zip(THIRDS[1:], caches[1:], strict=True):
        pieces = torch.split(rows, counts)
        again = [
            SessionRows(kv_cache, work.node_ids, work.parents, work.positions, None, piece)
            for kv_cache, work, piece in zip(own, works, pieces, strict=True)
        ]
        rows = model.forward(again, span)
    return rows


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_in_three_spans_gives_the_whole_models_logits(family: str) -> None:
    changes = FEW | ({"num_key_value_heads": 2} if family == "deepseek_v3" else {})  # whose latents have no groups
    whole = tiny_model(family, changes=changes)
    model = whole_model(whole)
    by_kernels(model, sum(map(len, PARENTS)))
    ids = [random_ids(len(parents), seed) for seed, parents in enumerate(PARENTS)]
    caches = [[KvCache(model.layout.within(span), 16) for _ in PARENTS] for span in THIRDS]
    works = [tree(*own) for own in zip(caches[0], PARENTS, ids, strict=True)]
    logits = model.logits(in_thirds(model, caches, works)).cpu()
    for parents, own, leaves, got in zip(PARENTS, ids, LEAVES, torch.split(logits, [*map(len, PARENTS)]), strict=True):
        for leaf in leaves:
            places = path(parents, leaf)
            wanted = reference(whole, own[places])
            assert (got[places] - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


@pytest.fixture(scope="module")
def llama() -> RaggedModel:
    """One layer: rows and sessions meet in each layer alike."""
    model = whole_model(tiny_model("llama", changes=FEW | {"num_hidden_layers": 1}))
    by_kernels(model, 16, 32)
    return model


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return random_ids(TEXT + 4, 3)


def plain_picks(model: RaggedModel, text: torch.Tensor) -> list[int]:
    """What the plain path picks after the last tokens of the text."""
    rows = model.plain_forward([chain(KvCache(model.layout, 32), text)], model.span)
    return likeliest(model, rows[TEXT:])


def likeliest(model: RaggedModel, rows: torch.Tensor) -> list[int]:
    picks: list[int] = model.run_head(rows).argmax(1).tolist()
    return picks


def prompted(model: RaggedModel, text: torch.Tensor, *cuts: int) -> KvCache:
    """A session whose text in front of the tree is committed; it came in pieces."""
    kv_cache = KvCache(model.layout, 96)
    for piece in torch.tensor_split(text[:TEXT], cuts):
        work = chain(kv_cache, piece, kv_cache.slots.used)
        model.forward([work])
        kv_cache.commit(work.node_ids, [])
    return kv_cache


def test_the_same_tokens_in_plain_decoding_trees_chunks_and_company(llama: RaggedModel, text: torch.Tensor) -> None:
    picks = plain_picks(llama, text)
    alone, chunked = prompted(llama, text), prompted(llama, text, 5, 12)
    one_by_one = []
    for offset in range(4):
        work = tree(alone, (None,), text[TEXT + offset :][:1])
        one_by_one.append(llama.forward([work]))
        alone.commit(work.node_ids, [])
    plain = torch.cat(one_by_one)
    assert likeliest(llama, plain) == picks
    # The text goes on by nodes 1, 4, 6 and 11; all others are in the way.
    parents = (None, None, 0, 0, 1, 1, 4, 5, 2, 3, 6, 6, 7, 1, 9, 12)
    ids = random_ids(32, 5)
    ids[[1, 4, 6, 11]] = text[TEXT:]
    small = llama.forward([tree(chunked, parents, ids[:16])])[[1, 4, 6, 11]]
    assert torch.equal(small, plain), "of one bucket, so bit for bit"
    chunked.truncate(TEXT)
    large = llama.forward([tree(chunked, (*parents, *range(16)), ids)])[[1, 4, 6, 11]]
    assert likeliest(llama, large) == picks
    chunked.truncate(TEXT)
    alone.truncate(TEXT)
    many = [alone, chunked, *(KvCache(llama.layout, 4) for _ in range(6))]
    others = [tree(kv_cache, (None, 0), ids[:2]) for kv_cache in many[2:]]
    rows = llama.forward([tree(alone, (None,), text[TEXT:][:1]), tree(chunked, (None, 0, 1), text[TEXT:-1]), *others])
    assert torch.equal(rows[:4], plain[[0, 0, 1, 2]]), "beside seven sessions too"


def test_the_same_tokens_in_three_spans(text: torch.Tensor) -> None:
    model = whole_model(tiny_model("llama", changes=FEW))
    by_kernels(model)
    caches = [[KvCache(model.layout.within(span), 32)] for span in THIRDS]
    for part in (text[:TEXT], text[TEXT:]):
        rows = in_thirds(model, caches, [chain(caches[0][0], part, caches[0][0].slots.used)])
        for (kv_cache,) in caches:
            kv_cache.commit(kv_cache.slots.ids, [])
    assert likeliest(model, rows) == plain_picks(model, text)


@pytest.fixture(scope="module")
def small() -> RaggedModel:
    """One layer: what is cut and forgotten does not depend on how many there are."""
    return whole_model(tiny_model("llama", changes=FEW | {"num_hidden_layers": 1}))


def test_a_batch_larger_than_the_buckets_and_the_table_is_cut(small: RaggedModel) -> None:
    static = by_kernels(small, 2, 4, sessions=2)
    works = [chain(KvCache(small.layout, 8), random_ids(count, count)) for count in (5, 1, 2)]
    rows = static.forward(works, small.span)
    again = [chain(KvCache(small.layout, 8), work.token_ids) for work in works if work.token_ids is not None]
    wanted = small.plain_forward(again, small.span)
    assert (rows - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
    assert [work.kv_cache.slots.used for work in works] == [5, 1, 2]


def test_a_plan_without_room_is_cut_and_a_row_without_room_is_refused(
    small: RaggedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    static = by_kernels(small, 4)
    ran: list[int] = []

    def at_most(rows: int) -> None:
        def fits(_: FixedMemory, plan: BatchPlan) -> bool:
            ran.append(len(plan.positions))
            return len(plan.positions) <= rows

        monkeypatch.setattr(FixedMemory, "fits", fits)

    at_most(2)
    kv_cache = KvCache(small.layout, 8)
    rows = static.forward([chain(kv_cache, random_ids(4))], small.span)
    assert (len(rows), ran, kv_cache.slots.used) == (4, [4, 2, 2], 4)
    at_most(0)
    with pytest.raises(LocalProtocolError, match="exceeds what graphs have room for"):
        static.forward([chain(kv_cache, random_ids(4), 4)], small.span)
    assert kv_cache.slots.used == 4


def test_a_forward_that_fails_leaves_no_node_behind(small: RaggedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    static = by_kernels(small, 2)
    calls: list[int] = []

    def breaks(_: SweepGraphs[StaticOutput], key: GraphKey, __: object) -> StaticOutput:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        return StaticOutput(torch.zeros(key.bucket, small.hidden_size, device=small.device))

    monkeypatch.setattr(SweepGraphs, "run", breaks)
    caches = [KvCache(small.layout, 8) for _ in range(2)]
    with pytest.raises(RuntimeError, match="no memory"):
        static.forward([chain(kv_cache, random_ids(3)) for kv_cache in caches], small.span)
    assert [kv_cache.slots.used for kv_cache in caches] == [0, 0]


def test_rows_of_nobody_touch_no_session(small: RaggedModel) -> None:
    static = by_kernels(small, 8)
    kv_cache = KvCache(small.layout, 8)
    static.forward([chain(kv_cache, random_ids(3))], small.span)
    keys, values = (held.clone() for held in kv_cache.view(0, 3))
    static.replay(3)
    other = KvCache(small.layout, 8)
    static.forward([chain(other, random_ids(1, 1))], small.span)
    assert torch.equal(kv_cache.view(0, 3)[0], keys)
    assert torch.equal(kv_cache.view(0, 3)[1], values)


def test_a_draft_gets_logits_and_the_rows_behind_them(small: RaggedModel) -> None:
    small.static = None
    wanted = small.head_output(chain(KvCache(small.layout, 8), random_ids(5)), 3)
    by_kernels(small, 4, 8)
    got = small.head_output(chain(KvCache(small.layout, 8), random_ids(5)), 3)
    assert got.rows is not None
    assert wanted.rows is not None
    assert (got.logits - wanted.logits).abs().max() <= TOLERANCE * wanted.logits.abs().max()
    assert (got.rows - wanted.rows).abs().max() <= TOLERANCE * wanted.rows.abs().max()


def test_sessions_that_ended_and_many_more_than_lines(small: RaggedModel) -> None:
    static = by_kernels(small, 4, sessions=2)
    caches = [KvCache(small.layout, 8) for _ in range(3)]
    ids = random_ids(4, 9)
    for kv_cache in caches:  # the first one loses its line
        static.forward([chain(kv_cache, ids[:2])], small.span)
        kv_cache.commit(kv_cache.slots.ids, [])
    rows = [static.forward([tree(kv_cache, (None,), ids[2:3])], small.span) for kv_cache in caches]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    caches.clear()
    del kv_cache
    gc.collect()
    assert len(static.table) == 0


def test_no_session_of_a_forward_loses_its_line_to_another(small: RaggedModel) -> None:
    table = AddressTable(small.layout, 2)
    first, second, third = (KvCache(small.layout, 4) for _ in range(3))
    assert (table.line(first, ()), table.line(second, ())) == (0, 1)
    assert table.line(third, (third, first)) == 1, "the other one ran less recently, and runs now"
    assert table.line(second, ()) == 0
    assert torch.equal(table.table[:, 1].cpu(), third.addresses())


@pytest.mark.parametrize(("family", "programs"), [("mixtral", 1), ("gpt2", 2)])
def test_layers_of_our_products_compile_once_for_all_layers_and_buckets(family: str, programs: int) -> None:
    """Up to the compiler's own work: nothing in a layer makes it stop. This GPT-2 has a scale for each layer."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = whole_model(tiny_model(family, changes=FEW | {"num_hidden_layers": 2}))
    ids = random_ids(4, 2)
    plain = model.plain_forward([chain(KvCache(model.layout, 4), ids)], model.span)
    use_row_invariant_products(model)
    static = by_kernels(model, 2, 4, backend="eager")
    for rows in (2, 4):
        made = static.forward([chain(KvCache(model.layout, 4), ids[:rows])], model.span)
        assert (made - plain[:rows]).abs().max() <= TOLERANCE * plain.abs().max()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == programs + 1, "and that of the last norm"
