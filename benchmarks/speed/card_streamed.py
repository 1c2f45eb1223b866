"""What does a sweep's forward take on a GPU, with resident and with streamed weights?

One process, no network: a whole model of a large one's shape (`benchmarks.speed.grown`), a context of so many tokens,
and the rows of a tree below them. The floor is what must be read, weights and KV, at the rate at which this GPU copies.
Streamed layers must give the same rows as resident ones, on a GPU bit for bit, sweep after sweep, or the program fails.
Both run by the plain path, which streamed layers have; `python -m benchmarks card` measures the fast one.

    python -m benchmarks card_streamed --record          # on a machine with a GPU
    python -m benchmarks card_streamed --device cpu --shape tiny --dtype float32
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import tyro
from rich.console import Console

from benchmarks.sheet import Recording, Sheet
from benchmarks.speed.grown import SHAPES, device_name, grown_model
from node.model.checkpoint import open_checkpoint
from node.model.loading import DTYPES
from node.model.offload import Offload, load_offloaded
from node.model.span import SpanModel, load_span
from swarm.ids import TreeNodeId
from swarm.inference.kv_cache import KvCache
from swarm.inference.ragged_batch import SessionRows
from swarm.layers import Span
from swarm.runtime.cli import make_console
from swarm.runtime.library_logging import quiet_libraries

COPY_BYTES = 2 << 30
ON_HOST_BYTES = 256 << 20
BRANCHES = 4
"""Nodes below each parent, level by level."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure a card."""

    shape: str = "8B"
    """Dimensions of the model, by name."""
    device: str = "cuda"
    """Where it runs."""
    dtype: str = "bfloat16"
    """Of the model's weights."""
    rows: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 512)
    """A sweep's: the pending token and its tree."""
    context: int = 1_024
    """Tokens in the KV cache."""
    repeats: int = 15
    """Sweeps of each size, with resident weights."""
    offloaded_repeats: int = 5
    """The same with streamed weights."""
    folder: Path | None = None
    """Of a model that was grown before, or where one is to be."""


@dataclass(frozen=True, slots=True)
class CardRow:
    """Sweeps of one size: medians in milliseconds.

    Attributes:
        forward_ms: The forward of a resident model.
        head_ms: The forward, the head and all rows' best tokens.
    """

    rows: int
    forward_ms: float
    head_ms: float
    floor_ms: float
    offloaded_ms: float


class CardBench:
    """One model with a context, whose trees are run and forgotten again."""

    def __init__(self, model: SpanModel, context: int, most_rows: int) -> None:
        self._model = model
        self._context = context
        self._kv_cache = KvCache(model.layout, context + most_rows)
        ids = torch.arange(context) % 1_000 + 3
        nodes = [TreeNodeId(number) for number in range(context)]
        model.forward([SessionRows(self._kv_cache, nodes, [None, *nodes[:-1]], range(context), ids)])
        self._kv_cache.commit(nodes, [])

    def sweep(self, rows: int) -> torch.Tensor:
        """The last layer's rows of a tree: [rows, hidden_size]."""
        parents = [None if offset == 0 else (offset - 1) // BRANCHES for offset in range(rows)]
        depths = [0] * rows
        for offset, parent in enumerate(parents):
            depths[offset] = 0 if parent is None else depths[parent] + 1
        nodes = [TreeNodeId(self._context + offset) for offset in range(rows)]
        above = [None if parent is None else nodes[parent] for parent in parents]
        ids = torch.arange(rows) % 997 + 5
        hidden = self._model.forward(
            [SessionRows(self._kv_cache, nodes, above, [self._context + d for d in depths], ids)]
        )
        self._kv_cache.truncate(self._context)
        return hidden

    def time_ms(self, rows: int, repeats: int, *, head: bool) -> float:
        """The median of some sweeps, each until the device is done."""
        return _median_ms(lambda: self._run(rows, head=head), repeats, self._model.device)

    def _run(self, rows: int, *, head: bool) -> None:
        hidden = self.sweep(rows)
        if head:
            self._model.logits(hidden).argmax(dim=1).tolist()


def _median_ms(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    took = []
    for _ in range(repeats + 2):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        took.append((time.perf_counter() - started) * 1e3)
    return median(took[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether rows are the same, bit for bit on a GPU; on a CPU those of one row depend on where weights lie."""
    return torch.equal(ours.cpu(), theirs) if ours.device.type == "cuda" else torch.allclose(ours, theirs, atol=1e-4)


def copy_rates(device: torch.device) -> tuple[float, float]:
    """Bytes per second that the device's memory moves, read and written; and that come from the host's."""
    size = COPY_BYTES if device.type == "cuda" else COPY_BYTES // 16
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(255)
    target = torch.empty_like(source)
    inside_s = _median_ms(lambda: target.copy_(source), 7, device) / 1e3
    host = torch.empty(ON_HOST_BYTES, dtype=torch.uint8)
    host = host.pin_memory() if device.type == "cuda" else host
    there = target[:ON_HOST_BYTES]
    across_s = _median_ms(lambda: there.copy_(host[: len(there)], non_blocking=True), 7, device) / 1e3
    return 2 * size / inside_s, len(there) / across_s


def measure(folder: Path, options: Options, console: Console) -> tuple[list[CardRow], dict[str, float]]:
    """All sizes, resident and passing by.

    Raises:
        AssertionError: layers that pass by gave other rows.
    """
    device, dtype, whole = torch.device(options.device), DTYPES[options.dtype], Span(0, _layers(options))
    inside, across = copy_rates(device)
    console.print(f"memory {inside / 1e9:,.0f} GB/s, from the host {across / 1e9:.1f} GB/s")
    started = time.monotonic()
    model = load_span(open_checkpoint(folder), whole, dtype, device)
    console.print(f"loaded {model.weight_bytes / 2**30:.1f} GiB in {time.monotonic() - started:.0f} s")
    bench = CardBench(model, options.context, max(options.rows))
    resident = {
        rows: (bench.time_ms(rows, options.repeats, head=False), bench.time_ms(rows, options.repeats, head=True))
        for rows in options.rows
    }
    expected = [bench.sweep(rows).cpu() for rows in options.rows]
    kv_bytes, weight_bytes = options.context * model.layout.bytes_per_token, model.weight_bytes
    del bench, model
    if device.type == "cuda":
        torch.cuda.empty_cache()
    started = time.monotonic()
    with closing(load_offloaded(open_checkpoint(folder), whole, dtype, device, Offload())) as streamed:
        console.print(f"layers are in the host's memory after {time.monotonic() - started:.0f} s")
        bench = CardBench(streamed, options.context, max(options.rows))
        for _ in range(2):
            for rows, hidden in zip(options.rows, expected, strict=True):
                assert _same(bench.sweep(rows), hidden), f"{rows} rows: layers that pass by gave others"
        offloaded = {rows: bench.time_ms(rows, options.offloaded_repeats, head=False) for rows in options.rows}
        stored = float(streamed.stored_bytes)
    floor_ms = (weight_bytes + kv_bytes) / inside * 1e3
    known = {"memory_bytes_per_s": inside, "host_bytes_per_s": across, "stored_bytes": stored}
    known |= {"weight_bytes": float(weight_bytes), "kv_bytes": float(kv_bytes), "floor_ms": floor_ms}
    lines = [CardRow(rows, *times, floor_ms, offloaded[rows]) for rows, times in resident.items()]
    return lines, known


def _layers(options: Options) -> int:
    return SHAPES[options.shape].num_hidden_layers


def sheet(lines: Sequence[CardRow], known: dict[str, float], options: Options) -> Sheet:
    name = device_name(options.device)
    exactly = "bit for bit" if options.device.startswith("cuda") else "up to rounding"
    made = Sheet(
        "card_streamed",
        f"{options.shape} shape, {options.dtype}, {options.context} tokens of context, on {name}: ms per sweep",
        ("rows", "forward", "× of one row", "× floor", "with head and picks", "streamed layers", "× reading them"),
    )
    reading_ms = known["stored_bytes"] / known["host_bytes_per_s"] * 1e3
    for line in lines:
        made.rows.append(
            (
                *(f"{line.rows}", f"{line.forward_ms:.1f}", f"{line.forward_ms / lines[0].forward_ms:.2f}"),
                *(f"{line.forward_ms / line.floor_ms:.2f}", f"{line.head_ms:.1f}"),
                *(f"{line.offloaded_ms:.0f}", f"{line.offloaded_ms / reading_ms:.2f}"),
            )
        )
    made.notes.append(
        f"Floor: {known['weight_bytes'] / 2**30:.1f} GiB of weights and {known['kv_bytes'] / 2**20:.0f} MiB of KV at "
        f"{known['memory_bytes_per_s'] / 1e9:,.0f} GB/s (a copy's bytes, read and written): "
        f"{known['floor_ms']:.2f} ms. Streamed layers: {known['stored_bytes'] / 2**30:.1f} GiB from pinned memory, "
        f"which this machine copies at {known['host_bytes_per_s'] / 1e9:.1f} GB/s: {reading_ms:.0f} ms; the rows are "
        f"the resident model's {exactly} (asserted, every size twice). Medians of "
        f"{options.repeats} and {options.offloaded_repeats} sweeps."
    )
    made.measured = {"lines": [asdict(line) for line in lines], "known": known, "options": asdict(options)}
    return made


def main() -> None:
    """Grow the model if need be, measure and print."""
    options = tyro.cli(Options)
    if options.shape not in SHAPES:
        sys.exit(f"card_streamed: no shape {options.shape!r}; there are {', '.join(SHAPES)}")
    quiet_libraries()
    console = make_console()
    with grown_model(options.folder, options.shape, DTYPES[options.dtype], options.device) as folder:
        lines, known = measure(folder, options, console)
    sheet(lines, known, options).finish(console, options)
