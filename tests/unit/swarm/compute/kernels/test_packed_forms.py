"""Layers whose products are the kernels': weights in any format, siblings, routers, embeddings and experts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, silu

from swarm.compute.packed_layers import PackedLinear, pack_embedding, pack_head, pack_layer
from swarm.compute.quantisation import quantise, restore
from swarm.compute.weights.experts import PackedExperts, forward, pack_experts
from swarm.compute.weights.format import WeightFormat
from swarm.compute.weights.packed_weight import KernelWeight
from tests.devices import DEVICE


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.05).to(DEVICE)


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    return weight if bits == 32 else restore(quantise(weight, bits))


class Layer(nn.Module):
    """Two siblings, and a router that reads the same rows and is too small for a format."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.router = nn.Linear(192, 64), nn.Linear(192, 32), nn.Linear(192, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.gate(x), self.up(x), self.router(x)], -1)


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_every_product_of_a_layer_is_a_kernels(bits: int) -> None:
    layer, plain, x = Layer().to(DEVICE), Layer().to(DEVICE), weights(3, 192, seed=1)
    pack_layer(layer, lambda: layer(x), bits, with_kernels=True)
    parts = dict(layer.named_children())
    assert all(isinstance(part, PackedLinear) for part in parts.values())
    assert all(
        isinstance(part.shared.weight, KernelWeight) for part in parts.values() if isinstance(part, PackedLinear)
    )
    for own in (plain.gate, plain.up):
        own.weight.data = rounded(own.weight.data, bits)
    assert (layer(x) - plain(x)).abs().max() <= 1e-5
    assert torch.equal(layer(x)[1:2], layer(x[1:2])), "a row's bits do not depend on the rows beside it"


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_a_tied_embedding_come_out_of_the_kernels_form(bits: int) -> None:
    embedding, head = nn.Embedding(50, 192).to(DEVICE), nn.Linear(192, 50, bias=False).to(DEVICE)
    head.weight = embedding.weight
    matrix = rounded(embedding.weight.data.clone(), bits)
    packed = pack_embedding(embedding, bits, with_kernels=True)
    assert packed is not None
    packed_head = pack_head(head, bits, with_kernels=True, tied=packed)
    assert packed_head is not None
    assert torch.equal(packed(torch.tensor([[7, 49]], device=DEVICE)), matrix[[7, 49]][None])
    assert (packed_head(weights(2, 192)) - linear(weights(2, 192), matrix)).abs().max() <= 1e-5
    form = WeightFormat(torch.float32, bits, with_kernels=True)
    size = sum(one.numel() * one.itemsize for one in nn.ModuleList([packed, packed_head]).parameters())
    assert size == form.size_bytes(matrix.numel(), [(50, 192)], bits)


class Experts(nn.Module):
    """As Hugging Face has them, transposed and with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_experts_implementation="eager")
        self.is_transposed = self.has_bias = self.has_gate = True
        self.has_post_expert_norm = False
        self.gate_up_proj = nn.Parameter(weights(4, 64, 96))
        self.down_proj = nn.Parameter(weights(4, 48, 64, seed=1))
        self.gate_up_proj_bias = nn.Parameter(weights(4, 96, seed=2))
        self.down_proj_bias = nn.Parameter(weights(4, 64, seed=3))

    def _apply_gate(self, raised: torch.Tensor) -> torch.Tensor:
        gate, up = raised.chunk(2, -1)
        return silu(gate) * up


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_meet_the_experts_that_were_chosen_for_them(bits: int, with_kernels: bool) -> None:
    experts, plain = Experts(), Experts()
    pack_experts(experts, bits, with_kernels=with_kernels)
    assert isinstance(experts.gate_up_proj, PackedExperts)
    assert experts.config._experts_implementation == "canopy"
    x, chosen = weights(5, 64, seed=4), torch.tensor([[0, 3], [3, 0], [1, 3], [0, 1], [3, 1]], device=DEVICE)
    shares = torch.rand(5, 2, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    up = rounded(plain.gate_up_proj.data.transpose(1, 2), bits)
    down = rounded(plain.down_proj.data.transpose(1, 2), bits)
    for row in range(5):
        wanted = torch.zeros(64, device=DEVICE)
        for place, expert in enumerate(chosen[row].tolist()):
            raised = plain._apply_gate(linear(x[row], up[expert], plain.gate_up_proj_bias[expert]))
            wanted += shares[row, place] * linear(raised, down[expert], plain.down_proj_bias[expert])
        assert (forward(experts, x, chosen, shares)[row] - wanted).abs().max() <= 1e-6
