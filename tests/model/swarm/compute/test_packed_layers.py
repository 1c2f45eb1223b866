"""Products with packed weights, and layers that share one; what kernels do is tested where they are interpreted."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

import swarm.compute.weights.packed_weight
from swarm.compute.packed_layers import PackedLinear, matrices_in, pack_embedding, pack_head, pack_layer
from swarm.compute.quantisation import quantise, restore
from swarm.compute.weights.format import WeightFormat, bits_of, small_size
from swarm.compute.weights.packed_weight import BLOCK, RestoredWeight, TorchInt4Weight, pack_weight

FORMATS = [4, 8, 16]


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    return weight.to(torch.bfloat16).float() if bits == 16 else restore(quantise(weight, bits))


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("block", [BLOCK, 20 * 96])
def test_a_product_is_that_of_the_restored_weight(bits: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm.compute.weights.packed_weight, "BLOCK", block)
    weight, x, bias = weights(70, 96), weights(2, 3, 96, seed=1), weights(70, seed=2)
    packed = pack_weight(weight, bits, with_kernels=False)
    assert isinstance(packed, RestoredWeight)
    wanted = linear(x, rounded(weight, bits), bias)
    assert (packed.product(x, bias) - wanted).abs().max() <= 1e-6
    assert torch.equal(packed.restored(), rounded(weight, bits))
    assert torch.equal(packed.take(torch.tensor([5, 0, 69])), rounded(weight, bits)[[5, 0, 69]])
    assert sum(one.numel() * one.itemsize for one in packed.parameters()) == WeightFormat(
        torch.float32, bits
    ).size_bytes(weight.numel(), [(70, 96)])


@pytest.mark.parametrize("rows", [64, 72])
def test_torchs_own_int4_product_serves_bfloat16(rows: int) -> None:
    weight, x = weights(rows, 128).bfloat16(), weights(5, 128, seed=1).bfloat16()
    packed = pack_weight(weight, 4, with_kernels=False)
    assert isinstance(packed, TorchInt4Weight) is (rows % 16 == 0)
    wanted = linear(x.float(), rounded(weight.float(), 4))
    assert (packed.product(x).float() - wanted).abs().max() <= 0.01 * wanted.abs().max()
    assert torch.equal(packed.restored(), rounded(weight.float(), 4).bfloat16())


def test_no_more_than_a_block_is_restored_for_a_product() -> None:
    weight = RestoredWeight(torch.ones(3 * BLOCK // 512, 512), 4)
    seen: list[int] = []
    restored = RestoredWeight._restore

    def noting(own: RestoredWeight, rows: slice, *, fresh: bool = False) -> torch.Tensor:
        seen.append((rows.stop - rows.start) * 512)
        return restored(own, rows, fresh=fresh)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RestoredWeight, "_restore", noting)
        weight.product(torch.ones(1, 512))
    assert seen == [BLOCK] * 3


def test_what_ran_in_inference_mode_runs_outside_of_it_too() -> None:
    weight = pack_weight(weights(32, 64), 4, with_kernels=False)
    swarm.compute.weights.packed_weight._SCRATCH._blocks.clear()
    with torch.inference_mode():
        inside = weight.product(weights(2, 64, seed=1))
    assert torch.equal(weight.product(weights(2, 64, seed=1)), inside)


class Layer(nn.Module):
    """Linear layers that read one tensor, two tensors of the same values, and one that changes in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32, bias=False)
        self.copied, self.late, self.router = nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(64, 4)
        self.twice, self.gpt2, self.odd = nn.Linear(64, 64), cast("Any", Conv1D)(48, 64), nn.Linear(40, 64)
        self.never = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: list[torch.Tensor] = [
            self.v(x),
            self.q(x),
            self.k(x),
            self.copied(x.clone()),
            self.router(x),
            self.gpt2(x),
        ]
        outputs += [self.twice(x), self.twice(x + 1), self.odd(x[..., :40])]
        y = x.clone()
        outputs.append(self.never(y) if len(x) > 9 else y)
        self.q(y)
        y.add_(1)
        return torch.cat([*outputs, self.late(y)], -1)


def packed_layer(bits: int) -> Layer:
    layer = Layer()
    pack_layer(layer, lambda: layer(weights(2, 64)), bits, with_kernels=False)
    return layer


def test_only_layers_that_read_the_very_same_tensor_share_a_product() -> None:
    layer = packed_layer(8)
    shared = {name: part.shared for name, part in layer.named_modules() if isinstance(part, PackedLinear)}
    assert set(shared) == {"q", "k", "v", "copied", "late", "twice", "gpt2", "never"}, "the router, and an odd width"
    together = {frozenset(other for other in shared if shared[other] is shared[name]) for name in shared}
    assert {group for group in together if len(group) > 1} == {frozenset({"k", "gpt2"})}, "q is called twice"


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("rows", [1, 12])
def test_a_packed_layer_computes_what_its_rounded_weights_do(bits: int, rows: int) -> None:
    plain = Layer()
    small = small_size(matrices_in(plain))
    assert small == 16 * 64, "the smallest one has 8 bits beside others of 4"
    for name, part in plain.named_children():
        if isinstance(part, (nn.Linear, Conv1D)) and name not in ("router", "odd"):
            turned = isinstance(part, Conv1D)
            matrix = part.weight.data.t() if turned else part.weight.data
            new = rounded(matrix, bits_of(matrix.numel(), bits, small))
            part.weight.data = new.t() if turned else new
    layer, x = packed_layer(bits), weights(rows, 64, seed=3)
    if bits == 16:
        plain.odd.weight.data = rounded(plain.odd.weight.data, bits)
    for _ in range(2):
        assert (layer(x) - plain(x)).abs().max() <= 1e-5


def test_siblings_may_be_called_in_any_order_and_with_other_tensors() -> None:
    layer, x, other = packed_layer(4), weights(3, 64, seed=4), weights(3, 64, seed=5)
    k, gpt2 = layer.get_submodule("k"), layer.get_submodule("gpt2")
    for part, rows in ((gpt2, x), (k, other), (k, x), (gpt2, other), (k, x), (gpt2, x), (k, x)):
        assert isinstance(part, PackedLinear)
        assert (part(rows) - linear(rows, part.weight, part.bias)).abs().max() <= 1e-6


def test_a_weight_is_still_there_for_code_that_reads_it() -> None:
    layer, plain = packed_layer(8), Layer()
    for name in ("k", "gpt2"):
        own: Any = plain.get_submodule(name)
        matrix = own.weight.data.t() if name == "gpt2" else own.weight.data
        packed = layer.get_submodule(name)
        assert isinstance(packed, PackedLinear)
        assert torch.equal(packed.weight, rounded(matrix, 8))
        assert packed.bias is not None
        assert torch.equal(packed.bias, own.bias)


@pytest.mark.parametrize("bits", FORMATS)
def test_a_tied_head_shares_the_embeddings_weight(bits: int) -> None:
    embedding, head = nn.Embedding(100, 64, padding_idx=99), nn.Linear(64, 100, bias=False)
    head.weight = embedding.weight
    matrix = rounded(embedding.weight.data.clone(), bits)
    packed = pack_embedding(embedding, bits, with_kernels=False)
    assert packed is not None
    packed_head = pack_head(head, bits, with_kernels=False, tied=packed)
    assert packed_head is not None
    assert torch.equal(packed(torch.tensor([[7, 99, 7]])), matrix[[7, 99, 7]][None])
    x = weights(3, 64, seed=1)
    assert (packed_head(x) - linear(x, matrix)).abs().max() <= 1e-5
    both = nn.ModuleList([packed, packed_head])
    assert len(list(both.parameters())) == {16: 1, 8: 2, 4: 3}[bits], "once, not twice"


def test_an_embedding_of_an_odd_width_stays() -> None:
    assert pack_embedding(nn.Embedding(10, 40), 4, with_kernels=False) is None
