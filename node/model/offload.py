"""A span whose layers are streamed: they lie in host memory or in a mapped file and are read for every sweep.

What a sweep costs then is one reading of the weights, however many tree nodes it carries. Embedding, norm and head stay
on the device, as do KV and the layers' buffers; of the layers' weights two layers' worth are there at a time
(`node.model.weight_streaming`). The layers are the class's own: only where their weights lie changes, so results are
the resident span's, bit for bit.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from node.model.packed_span import read_packed_ends, read_packed_layer
from node.model.span import ModelLayout, SpanModel, check_family, dissect
from node.model.weight_streaming import WeightStreamer
from swarm.errors import NotEnoughSpace
from swarm.inference.weights.format import WeightFormat
from swarm.layers import Span

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from node.model.checkpoint import Checkpoint

ALIGNED = 64
"""Weights begin at multiples of so many bytes, as torch's own do: kernels choose by alignment, and so do last bits."""
NAME = "layer"


@dataclass(frozen=True, slots=True)
class Offload:
    """Where weights lie, and how fast they are read."""

    mb_per_s: float | None = None
    """Read no faster."""
    folder: Path | None = None
    """Of mapped files; None is pinned memory for a GPU, and the system's temporary folder for a CPU, whose memory the
    weights would fill otherwise."""


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Where one weight lies in its layer's bytes `[start, end)`."""

    weight: nn.Parameter
    start: int
    end: int
    shape: torch.Size


class Layer:
    """A layer without weights of its own.

    Attributes:
        module: the model class's own layer.
        places: where each weight lies in the layer's bytes.
        size_bytes: of all weights, with gaps for alignment.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.places: list[WeightSlice] = []
        end = 0
        for weight in module.parameters():
            start = -(-end // ALIGNED) * ALIGNED
            end = start + weight.numel() * weight.itemsize
            self.places.append(WeightSlice(weight, start, end, weight.shape))
        self.size_bytes = end

    def pack(self) -> torch.Tensor:
        """Take the weights out: uint8 [size_bytes]."""
        data = torch.zeros(self.size_bytes, dtype=torch.uint8)
        for place in self.places:
            data[place.start : place.end] = place.weight.data.contiguous().view(-1).view(torch.uint8)
        self.unbind(torch.device("cpu"))
        return data

    def bind(self, data: torch.Tensor) -> None:
        """Compute with these bytes; nothing is copied."""
        for place in self.places:
            place.weight.data = data[place.start : place.end].view(place.weight.dtype).view(place.shape)

    def unbind(self, device: torch.device) -> None:
        """Hold no weights."""
        for place in self.places:
            place.weight.data = torch.empty(0, dtype=place.weight.dtype, device=device)


class OffloadedSpan(SpanModel):
    """A span whose layers' weights are streamed.

    Attributes:
        streamer: brings the layers' weights.
        ends: what `close` ends.
        weight_bytes: what the device holds, the buffers included.
        stored_bytes: what lies in the store.
    """

    def __init__(
        self, model: PreTrainedModel, span: Span, layers: Mapping[int, Layer], streamer: WeightStreamer
    ) -> None:
        self.streamer = streamer
        self.ends = ExitStack()
        self.stored_bytes = sum(layer.size_bytes for layer in layers.values())
        for index, layer in layers.items():
            self._stream(index, layer)
        super().__init__(model, span)
        self.weight_bytes += streamer.resident_bytes

    def close(self) -> None:
        """End the reader's thread and remove the files; this span cannot run again."""
        self.ends.close()

    def hand_over(self, names: Iterable[str]) -> dict[str, nn.Module]:
        """Nothing: these layers have no weights to keep."""
        super().hand_over(())
        return {}

    def _arrange(self, start: int, end: int) -> None:
        super()._arrange(start, end)
        if start < end:
            self.streamer.set_layers(start, end)

    def _stream(self, index: int, layer: Layer) -> None:
        streamer = self.streamer

        def leave(*_: object) -> None:
            layer.unbind(self.device)
            streamer.release(index)

        layer.module.register_forward_pre_hook(lambda *_: layer.bind(streamer.acquire(index)))
        layer.module.register_forward_hook(leave, always_call=True)


def load_offloaded(
    checkpoint: Checkpoint, span: Span, form: WeightFormat | torch.dtype, device: torch.device, offload: Offload
) -> OffloadedSpan:
    """Load a span layer after layer into its store; no more than one of them is held meanwhile.

    Args:
        checkpoint: the model.
        span: the layers.
        form: how weights are held and streamed; a compute type, where they are of that type.
        device: where it computes.
        offload: where the weights lie.

    Raises:
        LayersError: the model does not have these layers.
        UnsupportedModel: Canopy cannot run this model, or the checkpoint's tensors are not what its class expects.
        NotEnoughSpace: the disk is full.
    """
    check_family(checkpoint)
    layout = dissect(checkpoint.config)
    span.within(layout.num_layers)
    names = {index: f"{layout.layers}.{index}" for index in range(span.start, span.end)}
    form = form if isinstance(form, WeightFormat) else WeightFormat(form, on_cpu=device.type == "cpu")
    frame = read_packed_ends(checkpoint, layout, span, form, (device, list(names.values())))
    layers: dict[int, Layer] = {}
    store: dict[int, torch.Tensor] = {}
    with ExitStack() as ends:
        files = None
        if offload.folder is not None or device.type == "cpu":
            files = Path(tempfile.mkdtemp(prefix="canopy-offload-", dir=offload.folder))
            ends.callback(shutil.rmtree, files, ignore_errors=True)
        for index, name in names.items():
            layers[index] = layer = Layer(read_packed_layer(checkpoint, layout, index, form, device))
            store[index] = _keep(layer.pack(), files and files / f"{index}.safetensors", device)
            layer.unbind(device)
            frame.set_submodule(name, layer.module.to(device))
        streamer = WeightStreamer(store, device, None if offload.mb_per_s is None else offload.mb_per_s * 1e6)
        ends.callback(streamer.close)
        model = OffloadedSpan(frame, span, layers, streamer)
        model.ends = ends.pop_all()
        model.weight_bits, model.stored_as = form.bits, form.stored
        return model


def held_bytes(layout: ModelLayout, span: Span, form: WeightFormat) -> tuple[int, int]:
    """What the weights take that an offloaded span holds on its device, and those that lie in its store."""
    layers = [layout.bytes_of(f"{layout.layers}.{index}", form) for index in range(span.start, span.end)]
    return layout.bytes_in(span, form) - sum(layers) + 2 * max(layers), sum(layers)


def _keep(data: torch.Tensor, file: Path | None, device: torch.device) -> torch.Tensor:
    """The same bytes, mapped from a file, or in memory that a GPU can read by itself."""
    if file is None:
        return data.pin_memory() if device.type == "cuda" else data
    try:
        save_file({NAME: data}, file)
    except OSError as error:
        raise NotEnoughSpace(f"{file.parent}: no room for the offloaded layers ({error.strerror})") from error
    with safe_open(file, framework="pt") as opened:
        mapped: torch.Tensor = opened.get_tensor(NAME)
    with suppress(OSError):  # where the system lets go of names of mapped files, nothing is left of a killed node
        file.unlink()
    return mapped
