"""Layers of a Hugging Face model with packed weights in place of their own: linear ones, embedding, head and experts.

No family is named. Linear layers that receive the very same tensor are found by running a layer once; they become one
product, which is made when the first of them is called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from swarm.compute.weights.experts import (
    PackedExperts,
    expert_matrices,
    hold_experts,
    is_experts,
    keep_on_host,
    pack_experts,
)
from swarm.compute.weights.format import Matrix, bits_of, is_packed, small_size
from swarm.compute.weights.kernel_codes import KernelCodes
from swarm.compute.weights.packed_weight import PackedWeight, kernels_take, pack_weight
from swarm.compute.weights.stored_rows import StoredRows
from swarm.compute.weights.stored_weight import StoredWeight, hold
from swarm.files.stored.matrix import StoredMatrix

MIN_ROWS: Final = 16
"""A linear layer with fewer outputs stays as it is: it decides much, as routers do, and takes little."""


class SharedProduct(nn.Module):
    """One product for linear layers that read the same tensor.

    Attributes:
        weight: their matrices, one below the other.
        bias: their biases, one after the other; None where they have none.
        edges: where each one's outputs begin, and where the last one's end.
    """

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, sizes: Sequence[int]) -> None:
        super().__init__()
        self.weight = weight
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.edges = (0, *accumulate(sizes))
        self._sizes = list(sizes)
        self._made = _Made()

    def part(self, x: torch.Tensor, place: int) -> torch.Tensor:
        """The outputs [..., n] of one of the layers; all are made when the first is asked for."""
        if len(self.edges) == 2:
            return self.weight.product(x, self.bias)
        made = self._made
        if made.of is not x:  # the very tensor: another one of the same values is another input
            made.of, made.left = x, len(self.edges) - 1
            made.outputs = torch.split(self.weight.product(x, self.bias), self._sizes, -1)
        outputs = made.outputs[place]
        made.left -= 1
        if not made.left:
            made.of, made.outputs = _NOTHING, ()
        return outputs


class _Made:
    """What a shared product made, until all of its layers have taken their part."""

    def __init__(self) -> None:
        self.of = _NOTHING
        self.outputs: Sequence[torch.Tensor] = ()
        self.left = 0


_NOTHING: Final = torch.empty(0)


class PackedLinear(nn.Module):
    """In place of a linear layer.

    Attributes:
        shared: the product, with other layers or alone.
    """

    def __init__(self, shared: SharedProduct, place: int = 0) -> None:
        super().__init__()
        self.shared = shared
        self.place = place
        self.in_features = shared.weight.columns
        self.out_features = shared.edges[place + 1] - shared.edges[place]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] to [..., out_features]."""
        return self.shared.part(x, self.place)

    @property
    def weight(self) -> torch.Tensor:
        """The matrix [out_features, in_features], restored as a whole: for a family that reads it by itself."""
        start, end = self.shared.edges[self.place : self.place + 2]
        return self.shared.weight.restored()[start:end]

    @property
    def bias(self) -> torch.Tensor | None:
        """[out_features], if it has one."""
        start, end = self.shared.edges[self.place : self.place + 2]
        return None if self.shared.bias is None else self.shared.bias[start:end]


class PackedEmbedding(nn.Module):
    """In place of an embedding: the rows that are looked up are restored, and its own class does the rest with them.

    Attributes:
        packed: the matrix [vocab_size, embedding_dim].
    """

    def __init__(self, embedding: nn.Embedding, packed: PackedWeight) -> None:
        super().__init__()
        self.packed = packed
        self.embedding_dim = embedding.embedding_dim
        del embedding.weight
        embedding.padding_idx = None  # matters for gradients alone, and would be looked for among the few rows
        self._own = embedding

    @property
    def weight(self) -> torch.Tensor:
        """What is packed: some classes ask where an embedding lies."""
        return next(self.packed.parameters())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids [...] to [..., embedding_dim]."""
        own: Any = self._own
        own.weight = self.packed.take(ids.flatten())
        try:
            rows: torch.Tensor = own(torch.arange(ids.numel(), device=ids.device).view(ids.shape))
        finally:
            own.weight = None
        return rows


def pack_layer(layer: nn.Module, run: Callable[[], object], bits: int, *, with_kernels: bool) -> None:
    """Pack the weights of a decoder layer in place, on their device; weights that do not fit the format stay.

    Args:
        run: runs it once, with any input.
        bits: of a weight: 4 (small matrices have 8), 8 or 16 (bfloat16); with kernels also those of the compute type
            itself.
        with_kernels: whether the device runs the Triton kernels.
    """
    linears = {name: part for name, part in layer.named_modules() if _is_linear(part)}
    small = small_size(matrices_in(layer))
    own_bits = {name: bits_of(_matrix(part).numel(), bits, small) for name, part in linears.items()}
    packed_bits = {name: _bits_of(part, own_bits[name], with_kernels=with_kernels) for name, part in linears.items()}
    for names in _siblings({name: part for name, part in linears.items() if packed_bits[name]}, run, packed_bits):
        own = [linears[name] for name in names]
        for name, packed in zip(
            names, _pack_linear(own, packed_bits[names[0]], with_kernels=with_kernels), strict=True
        ):
            layer.set_submodule(name, packed)
    for module in list(layer.modules()):
        if is_experts(module):
            pack_experts(module, bits, with_kernels=with_kernels, small=small)


def hold_stored(
    layer: nn.Module, stored: StoredRows, run: Callable[[], object] = lambda: None, *, codes: bool = False
) -> None:
    """Hold those weights of a decoder layer as a checkpoint has them that it has; all others stay, on their device.

    Args:
        layer: loaded, with the checkpoint's decoded values in the compute type.
        stored: the rows that the checkpoint holds for it.
        run: runs the layer once, with any input: what reads the same tensor shares a product.
        codes: whether a CPU's products read the integers.
    """
    found: dict[str, tuple[nn.Module, list[StoredMatrix]]] = {}
    for name, part in list(layer.named_modules()):
        if is_experts(part):
            hold_experts(part, stored, codes=codes)
        elif _is_linear(part) and (pieces := stored.find(_matrix(part).contiguous())) is not None:
            found[name] = part, pieces
    linears = {name: part for name, (part, _) in found.items()}
    shared = _siblings(linears, run, dict.fromkeys(found, 0)) if codes else [[name] for name in found]
    for names in shared:
        for name, held in zip(names, _hold_linears([found[name] for name in names], codes=codes), strict=True):
            layer.set_submodule(name, held)


def hold_linear(linear: nn.Module, stored: StoredRows, *, codes: bool = False) -> PackedLinear | None:
    """A linear layer whose matrix is held as a checkpoint has it; None where the checkpoint has it not."""
    pieces = stored.find(_matrix(linear).contiguous())
    return None if pieces is None else _hold_linears([(linear, pieces)], codes=codes)[0]


def _hold_linears(linears: Sequence[tuple[nn.Module, list[StoredMatrix]]], *, codes: bool) -> list[PackedLinear]:
    """Some that read the same tensor, whose matrices consist of these."""
    weight = hold([piece for _, pieces in linears for piece in pieces], _matrix(linears[0][0]).dtype, codes=codes)
    biases = [cast("Any", one).bias for one, _ in linears]
    bias = None if biases[0] is None else torch.cat([one.data for one in biases])
    shared = SharedProduct(weight, bias, [len(_matrix(one)) for one, _ in linears])
    return [PackedLinear(shared, place) for place in range(len(linears))]


def hold_embedding(embedding: nn.Module, stored: StoredRows, *, codes: bool = False) -> PackedEmbedding | None:
    """An embedding whose matrix is held as a checkpoint has it; None where the checkpoint has it not."""
    if not isinstance(embedding, nn.Embedding):
        return None
    pieces = stored.find(embedding.weight.data)
    return None if pieces is None else PackedEmbedding(embedding, hold(pieces, embedding.weight.dtype, codes=codes))


def use_kernel_codes(root: nn.Module) -> None:
    """Repack published weights, on their device, as the product kernels read them; those that they cannot read stay."""
    made: dict[StoredWeight, PackedWeight] = {}  # a tied head shares its embedding's
    for parent in list(root.modules()):
        if isinstance(parent, PackedExperts):
            parent.use_kernel_codes()
            continue
        for name, held in list(parent.named_children()):
            if isinstance(held, StoredWeight):
                if held not in made:
                    made[held] = KernelCodes.of(held) or held
                setattr(parent, name, made[held])


def keep_experts_on_host(layer: nn.Module, bits: int) -> None:
    """Let a layer's experts stay in host memory (`swarm.compute.weights.experts.keep_on_host`)."""
    for module in list(layer.modules()):
        if is_experts(module):
            keep_on_host(module, bits)


def experts_in(module: nn.Module) -> tuple[Matrix, ...]:
    """Of `matrices_in`, those of experts."""
    return tuple(matrix for part in module.modules() if is_experts(part) for matrix in expert_matrices(part))


def join_kernel_codes(layer: nn.Module, run: Callable[[], object]) -> None:
    """Make one product of published weights of one form that read the same tensor.

    Args:
        run: runs the layer once, with any input.
    """
    alone = {
        name: part
        for name, part in layer.named_modules()
        if isinstance(part, PackedLinear)
        and isinstance(part.shared.weight, KernelCodes)
        and len(part.shared.edges) == 2
    }
    kinds = dict.fromkeys(alone, 0)
    weights: dict[str, KernelCodes] = {name: cast("KernelCodes", part.shared.weight) for name, part in alone.items()}
    firsts: list[KernelCodes] = []
    for name, weight in weights.items():
        kinds[name] = next((at for at, first in enumerate(firsts) if first.joins(weight)), len(firsts))
        firsts += [weight] if kinds[name] == len(firsts) else []
    for names in _siblings(alone, run, kinds):
        if len(names) > 1 and len(weights[names[0]].forms) == 1:
            first, *rest = (weights[name] for name in names)
            biases = [alone[name].bias for name in names]
            bias = None if biases[0] is None else torch.cat([one for one in biases if one is not None])
            shared = SharedProduct(first.join(rest), bias, [weights[name].rows for name in names])
            for place, name in enumerate(names):
                layer.set_submodule(name, PackedLinear(shared, place))


def tied_head(head: nn.Linear, embedding: PackedEmbedding) -> PackedLinear:
    """A head that multiplies with the embedding's matrix."""
    bias = None if head.bias is None else head.bias.data
    return PackedLinear(SharedProduct(embedding.packed, bias, [head.out_features]))


def pack_embedding(embedding: nn.Module, bits: int, *, with_kernels: bool) -> PackedEmbedding | None:
    """A packed embedding in place of one of the compute type; None where its width does not fit the format."""
    if not isinstance(embedding, nn.Embedding) or not is_packed(embedding.embedding_dim, bits):
        return None
    packed = pack_weight(embedding.weight.data, bits, with_kernels=with_kernels, by_rows=True)
    return PackedEmbedding(embedding, packed)


def pack_head(
    head: nn.Module, bits: int, *, with_kernels: bool, tied: PackedEmbedding | None = None
) -> PackedLinear | None:
    """A packed head in place of one of the compute type; None where it does not fit the format.

    Args:
        with_kernels: whether the device runs the Triton kernels.
        tied: the embedding with which the head shares its matrix.
    """
    own_bits = _bits_of(head, bits, with_kernels=with_kernels) if isinstance(head, nn.Linear) and bits else 0
    if not isinstance(head, nn.Linear) or not own_bits:
        return None
    if tied is not None:
        return tied_head(head, tied)
    return _pack_linear([head], own_bits, with_kernels=with_kernels)[0]


def matrices_in(module: nn.Module) -> tuple[Matrix, ...]:
    """Rows and columns of the weights that can be packed; those of experts lie one below the other."""
    found: list[Matrix] = []
    for part in module.modules():
        if is_experts(part):
            found += expert_matrices(part)
        elif _is_linear(part):
            rows, columns = _matrix(part).shape
            found += [(rows, columns)] if rows >= MIN_ROWS else []
        elif isinstance(part, nn.Embedding):
            found.append((part.num_embeddings, part.embedding_dim))
    return tuple(found)


def _pack_linear(own: Sequence[nn.Module], bits: int, *, with_kernels: bool) -> list[PackedLinear]:
    """Packed linear layers in place of some that read the same tensor."""
    matrices = [_matrix(one) for one in own]
    weight = matrices[0] if len(own) == 1 else torch.cat(matrices)
    biases = [cast("Any", one).bias for one in own]
    bias = None if biases[0] is None else torch.cat([one.data for one in biases])
    packed = pack_weight(weight, bits, with_kernels=with_kernels)
    shared = SharedProduct(packed, bias, [len(matrix) for matrix in matrices])
    return [PackedLinear(shared, place) for place in range(len(own))]


def _siblings(linears: Mapping[str, nn.Module], run: Callable[[], object], bits: Mapping[str, int]) -> list[list[str]]:
    """Names of linear layers, as one product can serve them: those of one list read the same tensor, and only that."""
    seen: list[tuple[torch.Tensor, torch.Tensor, list[str]]] = []  # what was read, its values then, by whom

    def note(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0]
            for read, then, names in seen:
                if read is x and torch.equal(x, then):
                    names.append(name)
                    return
            seen.append((x, x.clone(), [name]))

        return hook

    hooks = [part.register_forward_pre_hook(note(name)) for name, part in linears.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    calls = Counter(name for _, _, names in seen for name in names)
    lists = []
    for _, _, names in seen:
        once = [name for name in names if calls[name] == 1]
        kinds = {name: (linears[name].bias is not None, bits[name]) for name in once}
        alike = ([name for name in once if kinds[name] == kind] for kind in dict.fromkeys(kinds.values()))
        lists += [one for one in alike if len(one) > 1]
    joined = {name for names in lists for name in names}
    return [*lists, *([name] for name in linears if name not in joined)]


def _bits_of(module: nn.Module, bits: int, *, with_kernels: bool) -> int:
    """In how many bits a linear layer is held; those of its own type where others do not fit and kernels take it.

    So every product of a layer is a kernel's, where the numeric class says that kernels made it. 0: it stays.
    """
    rows, columns = _matrix(module).shape
    dtype = _matrix(module).dtype
    own = dtype.itemsize * 8
    if bits != own and rows >= MIN_ROWS and is_packed(columns, bits):
        return bits
    return own if with_kernels and kernels_take(rows, columns, own, dtype) else 0


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer and nothing else: subclasses may do more."""
    return type(module) is nn.Linear or isinstance(module, Conv1D)


def _matrix(module: nn.Module) -> torch.Tensor:
    """[rows, columns]; GPT-2 holds it the other way round."""
    weight: torch.Tensor = cast("Any", module).weight  # the parameter itself: an embedding may be tied to it
    return weight.data.t() if isinstance(module, Conv1D) else weight
