"""A commit as one kernel against the plain path: the same bytes."""

from __future__ import annotations

import pytest
import torch

from swarm.base.ids import TreeNodeId
from swarm.compute.kernels.support import is_interpreted, kernel_support
from swarm.compute.kv_cache import KvCache, KvLayout, LayerKv
from tests.devices import DEVICE

pytest.importorskip("triton")

LAYERS = (LayerKv(3, 2, 4, 6), LayerKv(4, 1, 24, 4), LayerKv(6, 3, 2, 2))


def filled(dtype: torch.dtype, by_kernel: bool) -> KvCache:
    """Four committed tokens and 20 live nodes below them; random keys and values."""
    kv_cache = KvCache(KvLayout(LAYERS, dtype, torch.device(DEVICE)), 32)
    kv_cache.moves_in_kernel = by_kernel
    noise = torch.Generator().manual_seed(1)
    for layer in LAYERS:
        for tensor in kv_cache.view(layer.index, 32):
            tensor.copy_(torch.randn(tensor.shape, generator=noise))
    kv_cache.slots.committed = 4
    nodes = [TreeNodeId(node) for node in range(20)]
    kv_cache.append(nodes, [None, *nodes[:-1]], range(4, 24))
    return kv_cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kept", [(0, 1, 5, 6), (0, 2, *range(4, 20)), (19,), (0, 1)], ids=["few", "many", "last", "stay"]
)
def test_a_commit_by_kernel_moves_the_same_bytes(dtype: torch.dtype, kept: tuple[int, ...]) -> None:
    plain, moved = filled(dtype, by_kernel=False), filled(dtype, by_kernel=True)
    for kv_cache in (plain, moved):
        kv_cache.commit([TreeNodeId(kept[0])], [TreeNodeId(node) for node in kept[1:]])
        assert kv_cache.slots.used == 4 + len(kept)
    assert (moved._mover is None) == (kept == (0, 1))  # a commit that moves no row starts nothing
    for layer in LAYERS:
        for one, other in zip(plain.view(layer.index, 32), moved.view(layer.index, 32), strict=True):
            assert torch.equal(one, other)


def test_programs_do_not_choose_interpreted_kernels() -> None:
    device = torch.device("cpu")
    assert not KvCache(KvLayout(LAYERS, torch.float32, device), 4).moves_in_kernel
    assert not kernel_support(device).kernels
    assert kernel_support(device, interpreted=True).kernels == is_interpreted()


def test_addresses_say_where_each_layer_lies() -> None:
    kv_cache = filled(torch.float32, by_kernel=False)
    keys, values = kv_cache.view(4, 32)
    assert kv_cache.addresses()[1].tolist() == [keys.data_ptr(), values.data_ptr(), 32]
    assert kv_cache.addresses().shape == (3, 3)
