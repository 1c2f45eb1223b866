"""Sessions with random KV and random trees, which tests run through the attention kernels and through their oracle."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch

from swarm.base.ids import TreeNodeId
from swarm.compute.kernels.batch_plan import PlannedSession, part_count, plan_batch, plan_words
from swarm.compute.kv_cache import KvCache, KvLayout, LayerKv
from swarm.compute.tree_attention import AttentionStep, SessionRange, attend
from tests.devices import DEVICE

Options = Mapping[str, Any]
"""What a model family passes to its attention, by Hugging Face's names."""

MODULE = cast("torch.nn.Module", SimpleNamespace(layer_idx=0))


@dataclass(frozen=True)
class Heads:
    """One layer's shape."""

    heads: int = 2
    kv_heads: int = 1
    key: int = 16
    value: int = 16
    dtype: torch.dtype = torch.float32

    def session(self, committed: int, more: int, seed: int = 0) -> KvCache:
        """A session of random keys and values."""
        layer = LayerKv(0, self.kv_heads, self.key, self.value)
        kv_cache = KvCache(KvLayout((layer,), self.dtype, torch.device(DEVICE)), committed + more)
        noise = torch.Generator().manual_seed(seed)
        for tensor in kv_cache.view(0, committed + more):
            tensor.copy_(torch.randn(tensor.shape, generator=noise))
        kv_cache.slots.committed = committed
        return kv_cache

    def rows(self, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [heads, count, key], key and value [kv_heads, count, …] of new rows."""
        noise = torch.Generator().manual_seed(seed)
        shapes = [(self.heads, count, self.key), (self.kv_heads, count, self.key), (self.kv_heads, count, self.value)]
        query, key, value = (torch.randn(shape, generator=noise).to(DEVICE, self.dtype) for shape in shapes)
        return query, key, value


@dataclass
class Rows:
    """New nodes of one session, and their rows."""

    kv_cache: KvCache
    visible: torch.Tensor
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    part: SessionRange = field(init=False)

    def __post_init__(self) -> None:
        slots = self.kv_cache.slots
        positions = torch.from_numpy(slots.positions)
        everything = torch.ones(len(self.visible), slots.committed, dtype=torch.bool)
        visible = torch.cat([everything, self.visible], 1)
        self.part = SessionRange(self.kv_cache, 0, len(visible), visible, positions, is_prefill=False)


def random_parents(count: int, seed: int) -> list[int | None]:
    """A ragged tree: each node hangs below one of the three before it, some below the tip."""
    chance = random.Random(seed)
    return [
        None if node == 0 or chance.random() < 0.1 else chance.randrange(max(0, node - 3), node)
        for node in range(count)
    ]


def append(kv_cache: KvCache, parents: Sequence[int | None], first: int) -> torch.Tensor:
    """Give nodes `first`… of a tree their slots; bool [new, live]: what each sees."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent is None else depths[parent] + 1)
    nodes = range(first, len(parents))
    above = [None if parents[node] is None else TreeNodeId(cast("int", parents[node])) for node in nodes]
    positions = [kv_cache.slots.committed + depths[node] for node in nodes]
    return torch.from_numpy(kv_cache.slots.append([TreeNodeId(node) for node in nodes], above, positions))


def by_kernels(heads: Heads, batch: Sequence[Rows], bucket: int, options: Options) -> torch.Tensor:
    """The new rows through the kernels: [R, heads, value]."""
    from swarm.compute.kernels import tree_attention

    planned = [
        PlannedSession(line, rows.kv_cache.slots.committed, rows.visible.numpy()) for line, rows in enumerate(batch)
    ]
    tile = tree_attention.tile_rows(heads.heads // heads.kv_heads, heads.dtype)
    most = max(rows.kv_cache.slots.capacity for rows in batch)
    plan = plan_batch(planned, bucket, tile, most)
    assert len(plan.words) <= plan_words(bucket, most)
    assert plan.parts <= part_count(bucket, most)
    words = torch.from_numpy(plan.words).to(DEVICE)
    new = [torch.cat(each, 1) for each in zip(*(rows.tensors for rows in batch), strict=True)]
    count = new[0].shape[1]
    inputs = [torch.nn.functional.pad(each, (0, 0, 0, bucket - count), value=7.0)[None] for each in new]
    # What is read and was not written shows as NaN.
    part_out = torch.full((plan.parts * heads.heads * heads.value,), torch.nan, device=DEVICE)
    part_ml = torch.full((plan.parts * heads.heads * 2,), torch.nan, device=DEVICE)
    addresses = torch.cat([rows.kv_cache.addresses() for rows in batch]).to(DEVICE)
    window, softcap = options.get("sliding_window") or 0, options.get("softcap") or 0.0
    rules = tile, options.get("scaling") or heads.key**-0.5, window, softcap
    out: torch.Tensor = torch.ops.canopy.tree_attention(
        *inputs, addresses, words, part_out, part_ml, options.get("s_aux"), *rules
    )
    assert out.shape == (1, bucket, heads.heads, heads.value)
    assert torch.equal(out[0, count:], torch.zeros_like(out[0, count:]))
    return out[0, :count]


def by_oracle(batch: Sequence[Rows], options: Options) -> torch.Tensor:
    """The new rows through the plain path: [R, heads, value]."""
    outputs = []
    for rows in batch:
        query, key, value = (each[None] for each in rows.tensors)
        out, _ = attend(MODULE, query, key, value, None, canopy=AttentionStep((rows.part,)), **options)
        outputs.append(out[0])
    return torch.cat(outputs)
