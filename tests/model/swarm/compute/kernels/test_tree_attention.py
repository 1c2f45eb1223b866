"""The attention kernels against the plain path, and that a row's bits depend on its own path alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarm.base.ids import TreeNodeId
from swarm.compute.kernels import batch_plan
from swarm.compute.kv_cache import KvCache
from tests.devices import DEVICE
from tests.kernels.sessions import Heads, Rows, append, by_kernels, by_oracle, random_parents

pytest.importorskip("triton")

EXACT = 1e-5
MIXED = ((300, 5, 9), (0, 0, 4), (530, 0, 1))
"""Sessions of one batch: committed tokens, live nodes of an earlier sweep, new rows."""
LONG = ((4300, 5, 9), (2500, 0, 12))
HALF = torch.bfloat16


def batch_of(heads: Heads, sessions: tuple[tuple[int, int, int], ...]) -> list[Rows]:
    """New rows of random trees."""
    batch = []
    for seed, (committed, earlier, new) in enumerate(sessions):
        kv_cache = heads.session(committed, earlier + new + 3, seed)
        parents = random_parents(earlier + new, seed)
        append(kv_cache, parents[:earlier], 0)
        batch.append(Rows(kv_cache, append(kv_cache, parents, earlier), heads.rows(new, seed)))
    return batch


def chain_of(heads: Heads, kv_cache: KvCache, count: int, seed: int) -> Rows:
    """New rows, each below the one before."""
    parents = [None, *range(count - 1)]
    return Rows(kv_cache, append(kv_cache, parents, 0), heads.rows(count, seed))


def sinks(heads: int) -> torch.Tensor:
    return torch.linspace(-1, 2, heads, device=DEVICE)


CASES: list[Any] = [
    pytest.param(Heads(4, 2), MIXED, 16, {}, id="llama"),
    pytest.param(Heads(4, 2), MIXED, 32, {"scaling": 0.5}, id="llama, larger bucket"),
    pytest.param(Heads(), MIXED, 16, {"sliding_window": 40}, id="window"),
    pytest.param(Heads(), MIXED, 32, {"sliding_window": 40}, id="window, larger bucket"),
    pytest.param(Heads(), LONG, 32, {"sliding_window": 700}, id="window in a long context"),
    pytest.param(Heads(3, 1, 24, 20), MIXED, 16, {"softcap": 2.0}, id="cap, group of 3, odd widths"),
    pytest.param(Heads(2, 2, 80, 96), MIXED, 32, {"s_aux": True, "sliding_window": 90}, id="sinks, no groups"),
    pytest.param(Heads(1, 1, 192, 128), MIXED, 32, {"softcap": 2.0, "s_aux": True}, id="MLA widths"),
    pytest.param(Heads(20, 1, 8, 8), ((70, 0, 3),), 16, {}, id="more heads than lanes"),
    pytest.param(Heads(dtype=torch.float16), MIXED, 32, {}, id="float16"),
    pytest.param(Heads(dtype=HALF), MIXED, 16, {"softcap": 2.0}, id="bfloat16"),
]


@pytest.mark.parametrize(("heads", "sessions", "bucket", "options"), CASES)
def test_rows_are_those_of_the_plain_path(
    heads: Heads, sessions: tuple[tuple[int, int, int], ...], bucket: int, options: dict[str, Any]
) -> None:
    if options.get("s_aux"):
        options = options | {"s_aux": sinks(heads.heads)}
    batch = batch_of(heads, sessions)
    got = by_kernels(heads, batch, bucket, options).float()
    stored = [[each.clone() for each in rows.kv_cache.view(0, rows.part.used)] for rows in batch]
    want = by_oracle(batch, options).float()
    bound = EXACT if heads.dtype == torch.float32 else 2e-2
    assert (got - want).abs().max() <= bound * want.abs().max()
    for rows, (keys, values) in zip(batch, stored, strict=True):
        kept = rows.kv_cache.view(0, rows.part.used)
        assert torch.equal(keys, kept[0])
        assert torch.equal(values, kept[1])


def test_rows_of_nobody_write_nothing() -> None:
    heads = Heads()
    kv_cache = heads.session(20, 4)
    before = [each.clone() for each in kv_cache.view(0, 24)]
    by_kernels(heads, [chain_of(heads, kv_cache, 1, 0)], 16, {})
    for was, now in zip(before, kv_cache.view(0, 24), strict=True):
        assert not torch.equal(was[:, 20], now[:, 20])
        assert torch.equal(was[:, 21:], now[:, 21:])
        assert torch.equal(was[:, :20], now[:, :20])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_prompt_in_chunks_is_the_prompt_at_once(dtype: torch.dtype) -> None:
    heads, committed = Heads(1, 1, dtype=dtype), 61  # the last piece begins behind a whole block
    rows = heads.rows(20)
    kv_cache = heads.session(committed, 20)
    whole = by_kernels(heads, [Rows(kv_cache, append(kv_cache, [None, *range(19)], 0), rows)], 32, {})
    kv_cache, pieces = heads.session(committed, 20), []
    for start, end in ((0, 2), (2, 3), (3, 20)):
        part = tuple(each[:, start:end] for each in rows)
        visible = append(kv_cache, [None, *range(end - start - 1)], 0)
        bucket = 16 if end - start <= 16 else 32
        pieces.append(by_kernels(heads, [Rows(kv_cache, visible, part)], bucket, {}))  # type: ignore[arg-type]
        kv_cache.commit([TreeNodeId(node) for node in range(end - start)], [])
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (HALF, {"sliding_window": 100, "softcap": 3.0})],
    ids=["float32", "bfloat16 with window and cap"],
)
def test_a_row_does_not_depend_on_its_bucket_or_companions(dtype: torch.dtype, options: dict[str, Any]) -> None:
    heads = Heads(dtype=dtype)
    alone = batch_of(heads, MIXED[:1])
    want = by_kernels(heads, alone, 16, options)
    assert torch.equal(by_kernels(heads, alone, 32, options), want)
    others = [chain_of(heads, heads.session(seed, 20, seed), 3, seed) for seed in (410, 61)]
    for bucket in (16, 32):
        batch = [others[0], *alone, others[1]]
        assert torch.equal(by_kernels(heads, batch, bucket, options)[3:12], want)


@pytest.mark.parametrize(("dtype", "bucket"), [(torch.float32, 16), (HALF, 16), (HALF, 32)])
def test_a_tree_gives_what_plain_decoding_gives(dtype: torch.dtype, bucket: int) -> None:
    """Across the end of a block and of a split, and with survivors whose slots are not their positions."""
    heads, committed = Heads(dtype=dtype), batch_plan.SPLIT - 4
    #     0 ── 2 ── 3 ── 5 ── 6 ── 8 ── 9     1, 4, 7: other branches
    parents = [None, None, 0, 2, 1, 3, 5, 4, 6, 8]
    path = [0, 2, 3, 5, 6, 8, 9]
    rows = heads.rows(10)
    plain, want = heads.session(committed, 12), []
    for node in path:
        part = tuple(each[:, node : node + 1] for each in rows)
        want.append(by_kernels(heads, [Rows(plain, append(plain, [None], 0), part)], 16, {}))  # type: ignore[arg-type]
        plain.commit([TreeNodeId(0)], [])
    tree = heads.session(committed, 12)
    at_once = by_kernels(heads, [Rows(tree, append(tree, parents, 0), rows)], bucket, {})
    assert torch.equal(at_once[path], torch.cat(want))
    kv_cache = heads.session(committed, 12)
    first = tuple(each[:, :6] for each in rows)
    by_kernels(heads, [Rows(kv_cache, append(kv_cache, parents[:6], 0), first)], bucket, {})  # type: ignore[arg-type]
    kv_cache.commit([TreeNodeId(0), TreeNodeId(2)], [TreeNodeId(3), TreeNodeId(5)])
    later = [TreeNodeId(node) for node in (6, 8, 9)]
    visible = kv_cache.slots.append(later, [TreeNodeId(5), *later[:2]], range(committed + 4, committed + 7))
    part = tuple(each[:, [6, 8, 9]] for each in rows)
    got = by_kernels(heads, [Rows(kv_cache, torch.from_numpy(visible), part)], bucket, {})  # type: ignore[arg-type]
    assert torch.equal(got, torch.cat(want[4:]))


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, 3000), (HALF, None)])
def test_items_of_many_splits_change_no_bit(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = Heads(1, 1, dtype=dtype)
    batch = batch_of(heads, ((4900, 2, 3),))
    fine = by_kernels(heads, batch, 32, {"sliding_window": window})
    monkeypatch.setattr(batch_plan, "MANY_SPLITS", 1)
    assert torch.equal(by_kernels(heads, batch, 32, {"sliding_window": window}), fine)
