"""Experts whose tensors are packed: each row with the few experts that its router chose, no other one is restored.

Hugging Face's experts hold 3-D tensors and dispatch their forward by name (`ExpertsInterface`); here the name is
"canopy". A family's own gate, biases, activation and norm stay its own.
"""

from __future__ import annotations

import copy
from typing import Any, Final, Self, cast

import torch
from torch import nn
from torch.nn.functional import linear

from swarm.compute.weights.format import Matrix, bits_of, is_packed
from swarm.compute.weights.kernel_codes import expert_form
from swarm.compute.weights.kernel_form import KernelForm
from swarm.compute.weights.packed_weight import RestoredWeight, kernels_take
from swarm.compute.weights.stored_rows import StoredRows
from swarm.compute.weights.stored_weight import StoredWeight, hold

NAME: Final = "canopy"
TENSORS: Final = ("gate_up_proj", "up_proj", "down_proj")
"""What Hugging Face calls the experts' tensors."""


class PackedExperts(nn.Module):
    """Matrices [experts, rows, columns], and products of rows with those that were chosen for them.

    Attributes:
        is_on_host: whether they stay in host memory, and no kernel reads them.
    """

    def __init__(
        self, held: RestoredWeight | StoredWeight | KernelForm | _WholeRows | nn.ModuleList, shape: torch.Size
    ) -> None:
        """Hold matrices of the shape [experts, rows, columns], one below the other, or each by itself."""
        super().__init__()
        self.experts, self.rows, self.columns = shape
        self.is_on_host = False
        self._held = held

    @classmethod
    def pack(cls, weight: torch.Tensor, bits: int, *, with_kernels: bool) -> Self:
        """Pack [experts, rows, columns] of the compute type."""
        _, rows, columns = weight.shape
        if with_kernels and kernels_take(rows, columns, bits, weight.dtype):
            form = KernelForm.whole(weight) if bits in (16, 32) else KernelForm.rounded(weight, bits)
            return cls(form, weight.shape)
        return cls(RestoredWeight(weight.reshape(-1, columns), bits), weight.shape)

    def use_kernel_codes(self) -> None:
        """Hold published weights as the kernels read them, if they can."""
        if isinstance(self._held, StoredWeight) and not self.is_on_host:
            self._held = expert_form(self._held, self.experts) or self._held

    def product(self, x: torch.Tensor, chosen: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply each row with its experts' matrices.

        Args:
            x: [r, columns], or [r, top_k, columns] with a row for each expert.
            chosen: int64 [r, top_k]
            bias: [experts, rows]

        Returns:
            [r, top_k, rows]
        """
        if isinstance(self._held, KernelForm):
            return self._held.expert_product(x, chosen, bias)
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


class _WholeRows(nn.Module):
    """Experts' matrices of the compute type, one below the other."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def product_of(self, x: torch.Tensor, start: int, end: int, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(x, self.weight[start:end], bias)


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
    run_as_packed(module)


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
    run_as_packed(module)


def _held(weight: torch.Tensor, stored: StoredRows, *, codes: bool) -> StoredWeight | nn.ModuleList | None:
    """Matrices [experts, rows, columns] as a checkpoint has them; None where it has them not."""
    if not codes:
        pieces = stored.find(weight.reshape(-1, weight.shape[2]))
        return None if pieces is None else StoredWeight(pieces, weight.dtype)
    every = [stored.find(one.contiguous()) for one in weight]
    held = [hold(pieces, weight.dtype, codes=True) for pieces in every if pieces is not None]
    return nn.ModuleList(held) if len(held) == len(every) else None


def keep_on_host(module: nn.Module, bits: int) -> None:
    """Let an experts module stay in host memory, wherever the rest of its layer goes, and compute there.

    Rows, choices and shares come to it and its result goes back: some KB a row, where an expert has tens of MB.

    Args:
        module: on the CPU, with its experts packed or not.
        bits: to pack them in, where they are not packed yet; 0 leaves them in the compute type.
    """
    own: Any = module
    if bits:
        pack_experts(module, bits, with_kernels=False)
    for name, _ in _shapes(module):
        weight = own.get_parameter(name).data
        plain = weight.transpose(1, 2) if own.is_transposed else weight
        delattr(module, name)
        setattr(module, name, PackedExperts(_WholeRows(plain.reshape(-1, plain.shape[2])), plain.shape))
    run_as_packed(module)
    for part in module.children():
        if isinstance(part, PackedExperts):
            part.is_on_host = True
    own._apply = lambda *_, **__: module  # what moves its layer leaves it where it is
    computed = module.forward

    def on_host(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        given = (one.cpu() for one in (hidden_states, top_k_index, top_k_weights))
        return cast("torch.Tensor", computed(*given)).to(hidden_states.device)

    own.forward = on_host


def run_as_packed(module: nn.Module) -> None:
    """Make an experts module whose tensors were exchanged run as `forward` says."""
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
