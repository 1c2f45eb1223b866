"""How much the weights of a quantised checkpoint take as they are stored, before anything is loaded. Reads headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm.inference.weights.format import WeightFormat, WeightsName
from swarm.models.stored.source import StoredSize

if TYPE_CHECKING:
    import torch

    from node.model.checkpoint import Checkpoint
    from node.model.span import ModelLayout


def format_of(
    checkpoint: Checkpoint, layout: ModelLayout, name: WeightsName, dtype: torch.dtype, device: torch.device
) -> WeightFormat:
    """How a checkpoint's weights are held under a name of the command line, with their sizes where they stay stored."""
    form = WeightFormat.of(name, dtype, device, checkpoint.source.encoding)
    return form.with_stored_sizes(stored_sizes(checkpoint, layout)) if form.stored else form


def stored_sizes(checkpoint: Checkpoint, layout: ModelLayout) -> dict[str, StoredSize]:
    """Packed weights and their bytes, by the name of each module that has some; what is not known is left out.

    Layers whose tensors have the same names take the same, so that of a model on the hub few headers are read.
    """
    names: dict[str, list[str]] = {}
    for tensor in checkpoint.weight_map:
        names.setdefault(layout.owner(tensor), []).append(tensor)
    alike: dict[tuple[int, tuple[str, ...]], StoredSize | None] = {}
    found: dict[str, StoredSize] = {}
    for module, own in names.items():
        if module not in layout.weights:
            continue
        index = f".{module.rpartition('.')[2]}."
        key = (layout.weights[module], tuple(sorted(tensor.partition(index)[2] or tensor for tensor in own)))
        if alike.get(key) is None:
            alike[key] = _size_of(checkpoint, own)
        size = alike[key]
        if size is not None:
            found[module] = size
    return found


def _size_of(checkpoint: Checkpoint, tensors: list[str]) -> StoredSize | None:
    sizes = [size for tensor in tensors if (size := checkpoint.source.stored_size(tensor)) is not None]
    return (sum(weights for weights, _ in sizes), sum(size_bytes for _, size_bytes in sizes)) if sizes else None
