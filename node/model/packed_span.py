"""Spans whose weights are held in fewer bits than the compute type: read, rounded and packed layer after layer.

No more than one layer is there unpacked, so the peak is the packed span and that layer.
"""

from __future__ import annotations

import logging
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch

from node.model.span import ModelLayout, SpanModel, check_family, dissect, read_span
from swarm.ids import TreeNodeId
from swarm.inference.kv_cache import KvCache
from swarm.inference.packed_layers import PackedEmbedding, pack_embedding, pack_head, pack_layer
from swarm.inference.ragged_batch import RaggedModel, SessionRows
from swarm.layers import Span

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from torch import nn
    from transformers import PreTrainedModel

    from node.model.checkpoint import Checkpoint
    from swarm.inference.weights.format import WeightFormat

logger = logging.getLogger(__name__)

NOTHING_HELD: Mapping[str, nn.Module] = MappingProxyType({})


def load_packed(
    checkpoint: Checkpoint,
    span: Span,
    form: WeightFormat,
    device: torch.device,
    held: Mapping[str, nn.Module] = NOTHING_HELD,
) -> SpanModel:
    """Load a span with packed weights.

    Args:
        checkpoint: of any floating type; its values are rounded to the compute type first.
        span: the layers.
        form: how weights are held.
        device: where they are.
        held: parts of the last span that this one needs too, packed as they are; they are not read again.

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
    loaded.weight_bits = form.bits
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
        checkpoint: the model.
        layout: of its class.
        span: the layers.
        form: how weights are held.
        place: the device, and the names of what is left out.
    """
    device, left_out = place
    model: Any = read_span(checkpoint, layout, span, form.dtype, left_out)
    model = model.to(device)
    there = [name for name in layout.modules(span) if name not in left_out]
    _pack_ends(model, layout, form, there)
    _let_go_of_files(model)
    return cast("PreTrainedModel", model)


def _pack_ends(model: nn.Module, layout: ModelLayout, form: WeightFormat, there: list[str]) -> None:
    """Pack the embedding and the head in place, those of them that are there."""
    bits = layout.ends_bits(form)
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
    alone: Any = read_span(checkpoint, layout, span, form.dtype, [*layout.front, *layout.tail])
    alone = alone.to(device)
    layer: nn.Module = alone.get_submodule(f"{layout.layers}.{index}")
    if form.product_bits:  # a new RaggedModel runs one row
        pack_layer(layer, lambda: _run_alone(alone, span), form.product_bits, with_kernels=form.with_kernels)
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
