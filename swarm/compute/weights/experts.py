"""Experts whose tensors are packed: each row with the few experts that its router chose, no other one is restored.

Hugging Face's experts hold 3-D tensors and dispatch their forward by name (`ExpertsInterface`); here the name is
"canopy". A family's own gate, biases, activation and norm stay its own.
"""

from __future__ import annotations

import copy
from typing import Any, Final, Self, cast

import torch
from torch import nn

from swarm.compute.quantisation import group_of, quantise
from swarm.compute.weights.format import Matrix, bits_of, is_packed
from swarm.compute.weights.packed_weight import RestoredWeight, as_scales, kernels_take
from swarm.compute.weights.stored_rows import StoredRows
from swarm.compute.weights.stored_weight import StoredWeight, hold

NAME: Final = "canopy"
TENSORS: Final = ("gate_up_proj", "up_proj", "down_proj")
"""What Hugging Face calls the experts' tensors."""


class PackedExperts(nn.Module):
    """Matrices [experts, rows, columns], and products of rows with those that were chosen for them."""

    def __init__(self, held: RestoredWeight | StoredWeight | _KernelExperts | nn.ModuleList, shape: torch.Size) -> None:
        """Hold matrices of the shape [experts, rows, columns], one below the other, or each by itself."""
        super().__init__()
        self.experts, self.rows, self.columns = shape
        self._held = held

    @classmethod
    def pack(cls, weight: torch.Tensor, bits: int, *, with_kernels: bool) -> Self:
        """Pack [experts, rows, columns] of the compute type."""
        _, rows, columns = weight.shape
        if with_kernels and kernels_take(rows, columns, bits, weight.dtype):
            return cls(_KernelExperts(weight, bits), weight.shape)
        return cls(RestoredWeight(weight.reshape(-1, columns), bits), weight.shape)

    def product(self, x: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply each row with its experts' matrices.

        Args:
            x: [r, columns], or [r, top_k, columns] with a row for each expert.
            chosen: int64 [r, top_k]
            bias: [experts, rows]

        Returns:
            [r, top_k, rows]
        """
        if isinstance(self._held, _KernelExperts):
            return self._held.product(x, chosen, bias)
        out = x.new_empty(*chosen.shape, self.rows)
        for expert in sorted(set(chosen.flatten().tolist())):
            row, place = torch.where(chosen == expert)
            entering = x[row] if x.ndim == 2 else x[row, place]
            start = expert * self.rows
            own = None if bias is None else bias[expert]
            if isinstance(self._held, nn.ModuleList):
                out[row, place] = self._held[expert].product(entering, own)
            else:
                out[row, place] = self._held.product_of(entering, start, start + self.rows, own)
        return out


class _KernelExperts(nn.Module):
    """Experts' matrices as the kernel on a GPU reads them; for 16 and 32 bits the weights themselves."""

    def __init__(self, weight: torch.Tensor, bits: int) -> None:
        from swarm.compute.kernels.packed_product import arrange  # only where Triton is there

        super().__init__()
        self.bits, self.group = bits, 0
        self.scales: nn.Parameter | None = None
        self.zeros: nn.Parameter | None = None
        if bits in (16, 32):
            self.words = nn.Parameter(weight.detach(), requires_grad=False)
            return
        self.group = group_of(weight.shape[-1], bits) or 0
        quantised = quantise(weight, bits)
        words, scales = arrange(quantised.codes, quantised.scales, bits, self.group)
        self.words = nn.Parameter(words, requires_grad=False)
        self.scales = nn.Parameter(scales.view(torch.int16), requires_grad=False)
        if quantised.zeros is not None:
            self.zeros = nn.Parameter(as_scales(quantised.zeros, scales).view(torch.int16), requires_grad=False)

    def product(self, x: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        import swarm.compute.kernels.expert_product  # noqa: F401 - registers the operator

        scales = None if self.scales is None else self.scales.view(torch.bfloat16)
        zeros = () if self.zeros is None else (self.zeros.view(torch.bfloat16),)
        own = (x, chosen, self.words, scales, bias, self.bits, self.group)
        out: torch.Tensor = torch.ops.canopy.expert_product(*own, *zeros)
        return out


def forward(
    experts: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Hugging Face's signature of an experts' forward.

    Args:
        experts: a module that `pack_experts` changed.
        hidden_states: [r, hidden_size]
        top_k_index: int64 [r, top_k]
        top_k_weights: [r, top_k]

    Returns:
        [r, hidden_size]
    """
    own: Any = experts
    rows, top_k = top_k_index.shape
    first = "gate_up_proj" if own.has_gate else "up_proj"
    raised = _product(own, first, hidden_states, top_k_index).flatten(0, 1)
    gated = own._apply_gate(raised) if own.has_gate else own.act_fn(raised)
    lowered = _product(own, "down_proj", gated.view(rows, top_k, -1), top_k_index)
    if own.has_post_expert_norm:
        lowered = own.post_expert_norm(lowered)
    weighed = lowered * top_k_weights[..., None]
    return weighed.sum(1).to(hidden_states.dtype)


def is_experts(module: nn.Module) -> bool:
    """Whether Hugging Face dispatches this module's forward by name."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_post_expert_norm")


def expert_matrices(module: nn.Module) -> list[Matrix]:
    """Rows and columns of the tensors that can be packed, all experts' rows together."""
    return [(shape[0] * shape[1], shape[2]) for _, shape in _shapes(module)]


def pack_experts(module: nn.Module, bits: int, *, with_kernels: bool, small: int = 0) -> None:
    """Pack the tensors of an experts module, and make it run as `forward` says.

    Args:
        small: up to so many weights a matrix has 8 bits in place of 4 (`small_size`).
    """
    own: Any = module
    found = {name: own.get_parameter(name) for name, _ in _shapes(module)}
    if not found:
        return
    if not all(is_packed(shape[2], bits) for _, shape in _shapes(module)):
        if not with_kernels:
            return  # one whose columns do not split into groups: all stay as they are
        bits = next(iter(found.values())).itemsize * 8
    for name, weight in found.items():
        plain = weight.data.transpose(1, 2) if own.is_transposed else weight.data
        delattr(module, name)
        own_bits = bits_of(plain.numel(), bits, small)
        setattr(module, name, PackedExperts.pack(plain, own_bits, with_kernels=with_kernels))
    _run_as_packed(module)


def hold_experts(module: nn.Module, stored: StoredRows, *, codes: bool = False) -> None:
    """Hold the tensors of an experts module as a checkpoint has them, if it has all of them; else all stay.

    codes: whether a CPU's products read the integers.
    """
    own: Any = module
    found = {name: own.get_parameter(name).data for name, _ in _shapes(module)}
    plain = {name: weight.transpose(1, 2) if own.is_transposed else weight for name, weight in found.items()}
    held = {name: _held(weight, stored, codes=codes) for name, weight in plain.items()}
    if not held or any(one is None for one in held.values()):
        return
    for name, one in held.items():
        assert one is not None
        delattr(module, name)
        setattr(module, name, PackedExperts(one, plain[name].shape))
    _run_as_packed(module)


def _held(weight: torch.Tensor, stored: StoredRows, *, codes: bool) -> StoredWeight | nn.ModuleList | None:
    """Matrices [experts, rows, columns] as a checkpoint has them; None where it has them not."""
    if not codes:
        pieces = stored.find(weight.reshape(-1, weight.shape[2]))
        return None if pieces is None else StoredWeight(pieces, weight.dtype)
    every = [stored.find(one.contiguous()) for one in weight]
    held = [hold(pieces, weight.dtype, codes=True) for pieces in every if pieces is not None]
    return nn.ModuleList(held) if len(held) == len(every) else None


def _run_as_packed(module: nn.Module) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    own: Any = module
    ALL_EXPERTS_FUNCTIONS.register(NAME, forward)
    own.config = copy.copy(own.config)  # its own: experts elsewhere may not be packed
    own.config._experts_implementation = NAME


def _product(own: Any, name: str, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - any family's
    packed: PackedExperts = getattr(own, name)
    return packed.product(x, chosen, getattr(own, f"{name}_bias") if own.has_bias else None)


def _shapes(module: nn.Module) -> list[tuple[str, tuple[int, int, int]]]:
    """Names of the 3-D tensors, and (experts, rows, columns) of each."""
    named = dict(module.named_parameters(recurse=False))
    is_transposed: bool = cast("Any", module).is_transposed
    found: list[tuple[str, tuple[int, int, int]]] = []
    for name in TENSORS:
        if name in named and named[name].ndim == 3:
            experts, *sides = named[name].shape
            rows, columns = reversed(sides) if is_transposed else sides
            found.append((name, (experts, rows, columns)))
    return found
