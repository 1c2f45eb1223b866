"""Weights that pass by: layers lie in a store and come into two slots, one that computes and one that is being filled.

    sweep      … │ layer i computes in slot A │ layer i+1 computes in slot B │ …
    reader     … │ i+1 is read into slot B    │ i+2 is read into slot A      │ …

Reading goes on behind the last layer with the first ones, for the next sweep. A store is a tensor of bytes per layer,
in host memory or mapped from a file; one thread of the belt's own reads it, in order. Knows no model and no session.
Source: SpecExec (arXiv 2406.02532), its offloading: a pass over the weights is paid by all nodes of a large tree.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

SLOTS = 2
PIECE_BYTES = 256 << 10
"""So much is read between two looks at the pace."""
MOMENTS_KEPT = 4_096

TraceEvent = tuple[Literal["read", "ready", "run", "done"], int]
"""Reading of a layer began, ended; computing it began, ended."""


class RateLimiter:
    """Holds reading to a rate, for machines whose memory is faster than the store that they stand for."""

    def __init__(
        self,
        bytes_per_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        """bytes_per_s: None is as fast as it goes."""
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._wait = wait
        self._due_s = 0.0

    @property
    def piece_bytes(self) -> int | None:
        """How much to read at a time; None is all of it."""
        return None if self._bytes_per_s is None else PIECE_BYTES

    def spent(self, count: int) -> None:
        """Wait until so many bytes more than before could have been read; time that nobody read in is not saved up."""
        if self._bytes_per_s is None:
            return
        now = self._clock()
        self._due_s = max(self._due_s, now) + count / self._bytes_per_s
        self._wait(self._due_s - now)


class LayerBuffer:
    """Room for one layer: `buffer` uint8 on the compute device. reading: ends when `layer` is in it."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.buffer = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.layer: int | None = None
        self.reading: Future[None] | None = None


class CopyStream(Protocol):
    """How bytes get from the store into a slot, and how the two sides of a slot wait for each other."""

    @contextmanager
    def writing(self, slot: LayerBuffer) -> Iterator[None]:
        """The reader's thread fills a slot within this."""
        yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Some bytes, within `writing`."""

    def begin(self, slot: LayerBuffer) -> None:
        """The slot is about to be computed with, by the calling thread."""

    def end(self, slot: LayerBuffer) -> None:
        """Everything that computes with it was started."""


class HostCopyStream:
    """Slots in host memory: what was copied is there, and what was computed is done."""

    @contextmanager
    def writing(self, slot: LayerBuffer) -> Iterator[None]:
        """Nothing is waited for."""
        yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """On this thread alone: torch would take the computing cores for it."""
        target.numpy()[:] = source.numpy()

    def begin(self, slot: LayerBuffer) -> None:
        """Nothing is waited for."""

    def end(self, slot: LayerBuffer) -> None:
        """Nothing is waited for."""


class CudaCopyStream:
    """Slots on a GPU, filled on a stream of their own from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._filled: dict[LayerBuffer, torch.cuda.Event] = {}
        self._used: dict[LayerBuffer, torch.cuda.Event] = {}

    @contextmanager
    def writing(self, slot: LayerBuffer) -> Iterator[None]:
        """Copies wait, on the device, until what computed with the slot is done."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if slot in self._used:
                self._stream.wait_event(self._used[slot])
            yield
            filled = torch.cuda.Event()  # type: ignore[no-untyped-call]
            filled.record(self._stream)
            self._filled[slot] = filled

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Asynchronous where the source is pinned."""
        target.copy_(source, non_blocking=True)

    def begin(self, slot: LayerBuffer) -> None:
        """Computing waits, on the device, for the copies."""
        torch.cuda.current_stream(self._device).wait_event(self._filled[slot])

    def end(self, slot: LayerBuffer) -> None:
        """Marks on the computing stream after what copies must not overwrite the slot."""
        used = torch.cuda.Event()  # type: ignore[no-untyped-call]
        used.record(torch.cuda.current_stream(self._device))
        self._used[slot] = used


@dataclass(frozen=True, slots=True)
class Round:
    """The layers `[start, end)` that a sweep takes, one after the other, and the next sweep again."""

    start: int
    end: int

    def after(self, index: int) -> int:
        """Which layer comes next."""
        return index + 1 if index + 1 < self.end else self.start


class WeightStreamer:
    """Brings layers by in order. One thread computes and calls everything here; the belt's own thread reads.

    moments: what happened, the last `MOMENTS_KEPT`. reads: layers that were read. waited_s: computing waited so long.
    """

    def __init__(self, store: Mapping[int, torch.Tensor], device: torch.device, bytes_per_s: float | None) -> None:
        """store: uint8 [bytes] per layer, on the host."""
        self.moments: deque[TraceEvent] = deque(maxlen=MOMENTS_KEPT)
        self.reads = 0
        self.waited_s = 0.0
        self._store = store
        self._round = Round(min(store), max(store) + 1)
        largest = max(len(data) for data in store.values())
        self._slots = [LayerBuffer(largest, device) for _ in range(min(SLOTS, len(store)))]
        self._lane: CopyStream = HostCopyStream() if device.type == "cpu" else CudaCopyStream(device)
        self._stopped = threading.Event()
        self._pace = RateLimiter(bytes_per_s, wait=self._stopped.wait)
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="belt")

    @property
    def resident_bytes(self) -> int:
        """What the slots take on the compute device."""
        return sum(len(slot.buffer) for slot in self._slots)

    def take(self, start: int, end: int) -> None:
        """The next sweeps take these layers."""
        self._round = Round(start, end)

    def enter(self, index: int) -> torch.Tensor:
        """The bytes of a layer, uint8 on the compute device, there until `leave`; the next one is read meanwhile.

        Raises:
            OSError: the store cannot be read.
        """
        assert self._slots, "the belt is closed"
        slot = self._slot_of(index) or self._fetch(index, self._spare(None))
        self._ahead(self._round.after(index), slot)
        started = time.perf_counter()
        assert slot.reading is not None
        try:
            slot.reading.result()
        except BaseException:
            slot.layer = None
            raise
        self.waited_s += time.perf_counter() - started
        self._lane.begin(slot)
        self.moments.append(("run", index))
        return slot.buffer[: len(self._store[index])]

    def leave(self, index: int) -> None:
        """The layer is done with, or failed."""
        slot = self._slot_of(index)
        if slot is None:
            return
        self._lane.end(slot)
        self.moments.append(("done", index))
        first = self._round.start
        if index + 1 == self._round.end and self._slot_of(first) not in (None, slot):
            self._ahead(self._round.after(first), self._slot_of(first))

    def close(self) -> None:
        """Stop reading and give the slots up; waits for the reader's thread."""
        self._stopped.set()
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._slots.clear()

    def _ahead(self, index: int, keep: LayerBuffer | None) -> None:
        """Begin to read what comes next into a slot that is not needed."""
        if self._slot_of(index) is None and len(self._slots) > 1:
            self._fetch(index, self._spare(keep))

    def _slot_of(self, index: int) -> LayerBuffer | None:
        return next((slot for slot in self._slots if slot.layer == index), None)

    def _spare(self, keep: LayerBuffer | None) -> LayerBuffer:
        return next(slot for slot in self._slots if slot is not keep)

    def _fetch(self, index: int, slot: LayerBuffer) -> LayerBuffer:
        if slot.reading is not None:
            slot.reading.cancel()  # a guess that nobody needs any more
        slot.layer = index
        slot.reading = self._reader.submit(self._read, index, slot)
        return slot

    def _read(self, index: int, slot: LayerBuffer) -> None:
        self.moments.append(("read", index))
        source = self._store[index]
        step = self._pace.piece_bytes or len(source)
        with self._lane.writing(slot):
            for start in range(0, len(source), step):
                piece = source[start : start + step]
                self._lane.copy(slot.buffer[start : start + len(piece)], piece)
                self._pace.spent(len(piece))
                if self._stopped.is_set():
                    raise RuntimeError("the span was closed while its layers were read")
        self.reads += 1
        self.moments.append(("ready", index))


def overlaps(moments: Iterable[TraceEvent]) -> int:
    """How many layers were computed while reading of a later one had begun before they ended."""
    begun: set[int] = set()
    found = 0
    for kind, index in moments:
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
