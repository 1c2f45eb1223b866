"""Spans whose weights are held in fewer bits than the compute type: read, rounded and packed layer after layer.

Weights of a quantised checkpoint may stay as they are stored: a layer is filled with their decoded values, and then
each matrix that consists of stored rows is held as these (`swarm.compute.weights.stored_rows`). What such a
checkpoint leaves in 16 bits stays so where the compute type has 32. No more than one layer is there unpacked, so the
peak is the packed span and that layer.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn

from node.model.span import ModelLayout, SpanModel, check_family, dissect, fill_span, read_tensors
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.kv_cache import KvCache
from swarm.compute.ordered_rows import use_codes
from swarm.compute.packed_layers import (
    PackedEmbedding,
    hold_embedding,
    hold_linear,
    hold_stored,
    join_kernel_codes,
    keep_experts_on_host,
    pack_embedding,
    pack_head,
    pack_layer,
    tied_head,
    use_kernel_codes,
)
from swarm.compute.ragged_batch import RaggedModel, SessionRows
from swarm.compute.rounding import rounding_of
from swarm.compute.weights.stored_rows import DecodedMatrix, StoredRows
from swarm.files.stored.matrix import PartedMatrix, bits_of
from swarm.files.stored.source import StoredTensor, decoded

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from transformers import PreTrainedModel

    from node.model.checkpoint import Checkpoint
    from swarm.compute.weights.format import WeightFormat


TYPES: Final = (torch.bfloat16, torch.float16)
HALVES: Final = ("bf16", "f16")
"""What these are called as encodings."""


logger = logging.getLogger(__name__)
NOTHING_HELD: Mapping[str, nn.Module] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class HalfMatrix(PartedMatrix):
    """A matrix of bfloat16 or float16.

    Attributes:
        encoding: `bf16` or `f16`.
        codes: int16 [rows, columns], the numbers' bits.
    """

    kind: torch.dtype

    def decode(self, start: int, end: int) -> torch.Tensor:
        """As `StoredMatrix.decode`."""
        return self.codes[start:end].view(self.kind).float()


def as_half(tensor: torch.Tensor) -> StoredTensor:
    """A tensor [..., rows, columns] of 16 bits as a stored one."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    encoding = "bf16" if tensor.dtype is torch.bfloat16 else "f16"
    matrix = HalfMatrix(len(flat), flat.shape[1], encoding, bits_of(flat), tensor.dtype)
    return StoredTensor(matrix, tuple(tensor.shape))


def load_packed(  # noqa: PLR0913 - a span, and how it is held
    checkpoint: Checkpoint,
    span: Span,
    form: WeightFormat,
    device: torch.device,
    held: Mapping[str, nn.Module] = NOTHING_HELD,
    *,
    ordered: bool = True,
) -> SpanModel:
    """Load a span with packed weights.

    Args:
        checkpoint: of any floating type; its values are rounded to the compute type first.
        held: parts of the last span that this one needs too, packed as they are; they are not read again.
        ordered: whether a CPU that multiplies with integers is to promise texts, if it can.

    Raises:
        LayersError: the model does not have these layers.
        UnsupportedModel: Canopy cannot run this model, or its tensors are not what its class expects, or not finite.
    """
    check_family(checkpoint)
    layout = dissect(checkpoint.config)
    layout.borders.check(span)
    names = {index: f"{layout.layers}.{index}" for index in range(span.start, span.end)}
    model: Any = read_packed_ends(checkpoint, layout, span, form, (device, [*names.values(), *held]))
    for index, name in names.items():
        part = held[name] if name in held else read_packed_layer(checkpoint, layout, index, form, device)
        model.set_submodule(name, part)
    for name in held.keys() - set(names.values()):
        model.set_submodule(name, held[name])
    loaded = SpanModel(model, span)
    loaded.weight_bits, loaded.stored_as = form.bits, form.stored
    if form.codes:
        loaded.varies = use_codes(loaded, ordered=ordered)
        loaded.rounding = "" if loaded.varies else rounding_of(loaded.config)
    return loaded


def read_packed_ends(
    checkpoint: Checkpoint,
    layout: ModelLayout,
    span: Span,
    form: WeightFormat,
    place: tuple[torch.device, Container[str]],
) -> PreTrainedModel:
    """The model class with what a span needs beside its layers: embedding and head packed, the layers left out.

    Args:
        place: the device, and the names of what is left out.
    """
    device, left_out = place
    model, stored = _read(checkpoint, layout, span, form, left_out)
    there = [name for name in layout.modules(span) if name not in left_out]
    if stored is not None:
        _hold_ends(model, layout, stored, there, codes=form.codes)
    model = model.to(device)
    if form.with_kernels:
        use_kernel_codes(model)
    _pack_ends(model, layout, form, there)
    _let_go_of_files(model)
    return cast("PreTrainedModel", model)


def _read(
    checkpoint: Checkpoint, layout: ModelLayout, span: Span, form: WeightFormat, left_out: Container[str]
) -> tuple[Any, StoredRows | None]:
    """A span filled with a checkpoint's values, and the rows that it holds packed, if these are to stay so."""
    read = read_tensors(checkpoint, layout, span, left_out)
    if form.stored and form.dtype is torch.float32 and not form.with_kernels:
        read = {
            name: as_half(one) if isinstance(one, torch.Tensor) and one.dtype in TYPES and one.ndim > 1 else one
            for name, one in read.items()
        }
    tensors = decoded(read, form.dtype)
    model: Any = fill_span(layout, span, tensors, form.dtype, left_out)
    if not form.stored:
        return model, None
    packed = (
        DecodedMatrix(one.matrix, _rows_of(one, tensors[name]))
        for name, one in sorted(read.items())
        if isinstance(one, StoredTensor) and not (form.codes and one.matrix.encoding in HALVES)
    )
    return model, StoredRows(packed)


def _rows_of(stored: StoredTensor, tensor: torch.Tensor) -> torch.Tensor:
    """A decoded tensor as the stored matrix has it, [rows, columns]."""
    turned = tensor.transpose(-1, -2) if stored.is_transposed else tensor
    return turned.reshape(stored.matrix.rows, stored.matrix.columns)


def _hold_ends(model: Any, layout: ModelLayout, stored: StoredRows, there: list[str], *, codes: bool) -> None:  # noqa: ANN401 - any class
    """Hold the embedding and the head in place as the checkpoint has them, those of them that it has packed."""
    embedding, head = layout.front[0], layout.tail[-1]
    own_head: Any = model.get_submodule(head) if head in there else None
    if embedding in there:
        own: Any = model.get_submodule(embedding)
        is_tied = own_head is not None and own_head.weight is own.weight
        held = hold_embedding(own, stored, codes=codes)
        if held is not None:
            model.set_submodule(embedding, held)
            if is_tied:
                model.set_submodule(head, tied_head(own_head, held))
        if is_tied:
            return
    if isinstance(own_head, nn.Linear) and (held_head := hold_linear(own_head, stored, codes=codes)) is not None:
        model.set_submodule(head, held_head)


def _pack_ends(model: nn.Module, layout: ModelLayout, form: WeightFormat, there: list[str]) -> None:
    """Pack the embedding and the head in place, those of them that are there."""
    bits = form.ends_bits
    embedding, head = layout.front[0], layout.tail[-1]
    own_head: Any = model.get_submodule(head) if head in there else None
    tied: PackedEmbedding | None = None
    if bits and embedding in there:
        own: Any = model.get_submodule(embedding)
        is_tied = own_head is not None and own_head.weight is own.weight
        packed = pack_embedding(own, bits, with_kernels=form.with_kernels)
        if packed is not None:
            model.set_submodule(embedding, packed)
            tied = packed if is_tied else None
    if own_head is not None:
        packed_head = pack_head(own_head, bits or form.product_bits, with_kernels=form.with_kernels, tied=tied)
        if packed_head is not None:
            model.set_submodule(head, packed_head)


def read_packed_layer(
    checkpoint: Checkpoint, layout: ModelLayout, index: int, form: WeightFormat, device: torch.device
) -> nn.Module:
    """One decoder layer, read and packed."""
    span = Span(index, index + 1)
    alone, stored = _read(checkpoint, layout, span, form, [*layout.front, *layout.tail])
    name = f"{layout.layers}.{index}"
    if stored is not None:
        hold_stored(alone.get_submodule(name), stored, lambda: _run_alone(alone, span), codes=form.codes)
    if form.host_experts:
        keep_experts_on_host(alone.get_submodule(name), form.bits)
    alone = alone.to(device)
    layer: nn.Module = alone.get_submodule(name)
    if form.stored and form.with_kernels:
        use_kernel_codes(layer)
        join_kernel_codes(layer, lambda: _run_alone(alone, span))
    if form.product_bits:  # a new RaggedModel runs one row
        pack_layer(layer, lambda: _run_alone(alone, span), form.product_bits, with_kernels=form.with_kernels)
    if form.product_bits or form.stored or form.host_experts:
        _let_go_of_files(layer)
    return layer


def _run_alone(alone: PreTrainedModel, span: Span) -> None:
    """Run a layer's row as far as it gets: one that needs more than a row is packed matrix by matrix."""
    try:
        RaggedModel(alone, span, examine=False)
    except Exception as failure:  # noqa: BLE001 - a class may raise anything, and nothing depends on the result
        logger.debug("layer %s does not run alone: %s", span, failure)


def _let_go_of_files(module: nn.Module) -> None:
    """Copy what was not packed: a norm that lies in a mapped file would keep all of the file in memory."""
    for weight in module.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.clone()


def pack_loaded(model: SpanModel, layout: ModelLayout, form: WeightFormat) -> None:
    """Pack the layers of a span that is loaded already: of a synthetic one, whose layers are few."""
    if not form.product_bits:
        return
    for index in range(model.span.start, model.span.end):
        layer = model.model.get_submodule(f"{layout.layers}.{index}")
        pack_layer(layer, lambda: _run_one_row(model), form.product_bits, with_kernels=form.with_kernels)
    model.weight_bits = form.bits


def _run_one_row(model: SpanModel) -> None:
    row = torch.zeros(1, model.hidden_size, dtype=model.dtype, device=model.device)
    model.forward([SessionRows(KvCache(model.layout, 1), [TreeNodeId(0)], [None], [0], rows=row)])
