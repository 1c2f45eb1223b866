"""A span whose layers are streamed: they lie in host memory or in a mapped file and are read for every sweep.

What a sweep costs then is one reading of the weights, however many tree nodes it carries. Embedding, norm and head stay
on the device, as do KV and the layers' buffers; of the layers' weights two layers' worth are there at a time: one
computes while the other is filled. The layers are the class's own: only where their weights lie changes, so results are
the resident span's, bit for bit.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from node.model.packed_span import read_packed_ends, read_packed_layer
from node.model.span import ModelLayout, SpanModel, check_family, dissect
from swarm.base.errors import NotEnoughSpace
from swarm.base.layers import Span
from swarm.compute.weights.format import WeightFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from node.model.checkpoint import Checkpoint


BUFFERS = 2
PIECE_BYTES = 256 << 10
"""Where the rate is limited, so much is read at a time."""
MAX_TRACE_EVENTS = 4_096

TraceEvent = tuple[Literal["read", "ready", "run", "done"], int]
"""Reading of a layer began, ended; computing it began, ended."""


ALIGNED = 64
"""Weights begin at multiples of so many bytes, as torch's own do: kernels choose by alignment, and so do last bits."""
NAME = "layer"


class RateLimiter:
    """Holds reading to a rate, for machines whose memory is faster than the store that they stand for."""

    def __init__(
        self,
        bytes_per_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        """Limit nothing yet.

        Args:
            bytes_per_s: the rate; None is as fast as it goes.
            clock: in seconds.
            wait: sleeps so many seconds.
        """
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._wait = wait
        self._due_s = 0.0

    @property
    def piece_bytes(self) -> int | None:
        """How much to read at a time; None is all of it."""
        return None if self._bytes_per_s is None else PIECE_BYTES

    def wait_for(self, count: int) -> None:
        """Wait until so many more bytes may have been read; idle time is not saved up."""
        if self._bytes_per_s is None:
            return
        now = self._clock()
        self._due_s = max(self._due_s, now) + count / self._bytes_per_s
        self._wait(self._due_s - now)


class LayerBuffer:
    """Room for one layer.

    Attributes:
        data: uint8 [size_bytes] on the compute device.
        layer: whose weights it has or gets; None while it is empty.
        reading: done when `layer` is in it.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.data = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.layer: int | None = None
        self.reading: Future[None] | None = None


class CopyStream(Protocol):
    """How bytes get from the store into a buffer, and how its reader and its user wait for each other."""

    @contextmanager
    def writing(self, buffer: LayerBuffer) -> Iterator[None]:
        """The reader's thread fills a buffer within this block."""
        yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy some bytes, within `writing`."""

    def begin(self, buffer: LayerBuffer) -> None:
        """The calling thread is about to compute with the buffer."""

    def end(self, buffer: LayerBuffer) -> None:
        """Everything that computes with the buffer was started."""


class HostCopyStream:
    """Buffers in host memory: what was copied is there, and what was computed is done."""

    @contextmanager
    def writing(self, buffer: LayerBuffer) -> Iterator[None]:
        """Nothing is waited for."""
        yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on this thread alone: torch would take the computing cores for it."""
        target.numpy()[:] = source.numpy()

    def begin(self, buffer: LayerBuffer) -> None:
        """Nothing is waited for."""

    def end(self, buffer: LayerBuffer) -> None:
        """Nothing is waited for."""


class CudaCopyStream:
    """Buffers on a GPU, filled on a CUDA stream of their own from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._filled: dict[LayerBuffer, torch.cuda.Event] = {}
        self._used: dict[LayerBuffer, torch.cuda.Event] = {}

    @contextmanager
    def writing(self, buffer: LayerBuffer) -> Iterator[None]:
        """Copies wait, on the device, until what computed with the buffer is done."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if buffer in self._used:
                self._stream.wait_event(self._used[buffer])
            yield
            filled = torch.cuda.Event()  # type: ignore[no-untyped-call]
            filled.record(self._stream)
            self._filled[buffer] = filled

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy, asynchronously where the source is pinned."""
        target.copy_(source, non_blocking=True)

    def begin(self, buffer: LayerBuffer) -> None:
        """Computing waits, on the device, for the copies."""
        torch.cuda.current_stream(self._device).wait_event(self._filled[buffer])

    def end(self, buffer: LayerBuffer) -> None:
        """Mark on the computing stream after what copies may overwrite the buffer."""
        used = torch.cuda.Event()  # type: ignore[no-untyped-call]
        used.record(torch.cuda.current_stream(self._device))
        self._used[buffer] = used


@dataclass(frozen=True, slots=True)
class LayerCycle:
    """The layers `[start, end)` that a sweep runs, one after the other, and the next sweep again."""

    start: int
    end: int

    def after(self, index: int) -> int:
        """Which layer comes next."""
        return index + 1 if index + 1 < self.end else self.start


class WeightStreamer:
    """Brings layers in order. One thread computes and calls everything here; a thread of the streamer reads.

    Attributes:
        trace: what happened, the last `MAX_TRACE_EVENTS` events.
        waited_s: how long computing waited for layers.
    """

    def __init__(self, store: Mapping[int, torch.Tensor], device: torch.device, bytes_per_s: float | None) -> None:
        """Read nothing yet.

        Args:
            store: uint8 [bytes] per layer, on the host.
            bytes_per_s: read no faster; None is as fast as it goes.
        """
        self.trace: deque[TraceEvent] = deque(maxlen=MAX_TRACE_EVENTS)
        self.reads = 0
        self.waited_s = 0.0
        self._store = store
        self._cycle = LayerCycle(min(store), max(store) + 1)
        largest = max(len(data) for data in store.values())
        self._buffers = [LayerBuffer(largest, device) for _ in range(min(BUFFERS, len(store)))]
        self._copy_stream: CopyStream = HostCopyStream() if device.type == "cpu" else CudaCopyStream(device)
        self._stopped = threading.Event()
        self._rate_limiter = RateLimiter(bytes_per_s, wait=self._stopped.wait)
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")

    @property
    def resident_bytes(self) -> int:
        """What the buffers take on the compute device."""
        return sum(len(buffer.data) for buffer in self._buffers)

    def set_layers(self, start: int, end: int) -> None:
        """The next sweeps run the layers `[start, end)`."""
        self._cycle = LayerCycle(start, end)

    def acquire(self, index: int) -> torch.Tensor:
        """The bytes of a layer, uint8 on the compute device, there until `release`; the next one is read meanwhile.

        Raises:
            OSError: the store cannot be read.
        """
        assert self._buffers, "the streamer is closed"
        buffer = self._buffer_of(index) or self._start_reading(index, self._spare(None))
        self._prefetch(self._cycle.after(index), buffer)
        started = time.perf_counter()
        assert buffer.reading is not None
        try:
            buffer.reading.result()
        except BaseException:
            buffer.layer = None
            raise
        self.waited_s += time.perf_counter() - started
        self._copy_stream.begin(buffer)
        self.trace.append(("run", index))
        return buffer.data[: len(self._store[index])]

    def release(self, index: int) -> None:
        """The layer was computed, or failed."""
        buffer = self._buffer_of(index)
        if buffer is None:
            return
        self._copy_stream.end(buffer)
        self.trace.append(("done", index))
        first = self._cycle.start
        if index + 1 == self._cycle.end and self._buffer_of(first) not in (None, buffer):
            self._prefetch(self._cycle.after(first), self._buffer_of(first))

    def close(self) -> None:
        """Stop reading and free the buffers; waits for the reader's thread."""
        self._stopped.set()
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._buffers.clear()

    def _prefetch(self, index: int, keep: LayerBuffer | None) -> None:
        """Begin to read what comes next into a buffer that is not needed."""
        if self._buffer_of(index) is None and len(self._buffers) > 1:
            self._start_reading(index, self._spare(keep))

    def _buffer_of(self, index: int) -> LayerBuffer | None:
        return next((buffer for buffer in self._buffers if buffer.layer == index), None)

    def _spare(self, keep: LayerBuffer | None) -> LayerBuffer:
        return next(buffer for buffer in self._buffers if buffer is not keep)

    def _start_reading(self, index: int, buffer: LayerBuffer) -> LayerBuffer:
        if buffer.reading is not None:
            buffer.reading.cancel()  # it was read ahead in vain
        buffer.layer = index
        buffer.reading = self._reader.submit(self._read, index, buffer)
        return buffer

    def _read(self, index: int, buffer: LayerBuffer) -> None:
        self.trace.append(("read", index))
        source = self._store[index]
        step = self._rate_limiter.piece_bytes or len(source)
        with self._copy_stream.writing(buffer):
            for start in range(0, len(source), step):
                piece = source[start : start + step]
                self._copy_stream.copy(buffer.data[start : start + len(piece)], piece)
                self._rate_limiter.wait_for(len(piece))
                if self._stopped.is_set():
                    raise RuntimeError("the span was closed while its layers were read")
        self.reads += 1
        self.trace.append(("ready", index))


def overlaps(trace: Iterable[TraceEvent]) -> int:
    """How many layers were computed while a later one was being read."""
    begun: set[int] = set()
    found = 0
    for kind, index in trace:
        match kind:
            case "read":
                begun.add(index)
            case "run":
                begun.discard(index)
            case "done":
                found += bool(begun)
            case "ready":
                pass
    return found


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
        ends: what `close` ends.
        weight_bytes: what the device holds, the buffers included.
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
        form: how weights are held and streamed; a compute type, where they are of that type.

    Raises:
        LayersError: the model does not have these layers.
        UnsupportedModel: Canopy cannot run this model, or the checkpoint's tensors are not what its class expects.
        NotEnoughSpace: the disk is full.
    """
    check_family(checkpoint)
    layout = dissect(checkpoint.config)
    layout.borders.check(span)
    names = {index: f"{layout.layers}.{index}" for index in range(span.start, span.end)}
    form = form if isinstance(form, WeightFormat) else WeightFormat(form)
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
