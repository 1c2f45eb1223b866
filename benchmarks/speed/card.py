"""What does a sweep take on a GPU, of what reading weights and KV takes?

One process, no network: spans of a model of a large one's shape (`benchmarks.speed.grown`), sessions with random KV,
and trees below them. Every sweep runs by the plain path and by the fast one (docs/design/kernels.md) in the same call.
The floor is what must be read, at the rate at which this GPU copies. Head, picks and a commit are measured beside it,
and whether a tree's path has the bits of the same tokens decoded one by one. What was measured is in the file after
every span and format, and a run that is broken off shows its table.

    python -m benchmarks card --json card.json           # on a machine with a GPU: eight minutes
    TRITON_INTERPRET=1 python -m benchmarks card --device cpu --shape tiny --layers 1 --dtype float32   # the same steps
"""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Final

import torch
import tyro
from rich.console import Console

from benchmarks.sheet import Recording, Sheet
from benchmarks.speed.grown import SHAPES, device_name, grown_model
from node.model.checkpoint import Checkpoint, open_checkpoint
from node.model.loading import DTYPES
from node.model.packed_span import load_packed
from node.model.span import SpanModel, load_span
from swarm.base.cli import make_console
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.base.library_logging import quiet_libraries
from swarm.compute.devices import empty_cache, synchronize
from swarm.compute.fast_path import BUCKETS, use_static
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import RaggedModel, SessionRows
from swarm.compute.sampling import pick
from swarm.compute.weights.format import WeightFormat, WeightsName
from swarm.protocol.messages import Sampling

BRANCHES: Final = 4
"""Nodes below each parent, level by level."""
REPLAYS: Final = 12
"""Replays one behind the other, so that the card never waits for the host."""
FORCED_BUCKETS: Final = (16, 64)
"""On a CPU, where the interpreter takes a minute for what a card does in milliseconds."""
COPY_BYTES: Final = 2 << 30
MOVED: Final = 16
"""Rows of the commit that is measured, of which the last one moves to the front."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure a card."""

    shape: str = "8B"
    """Dimensions of the model, by name."""
    layers: tuple[int, ...] = (32, 10)
    """Spans from layer 0 on, of so many layers."""
    device: str = "cuda"
    """Where it runs."""
    dtype: str = "bfloat16"
    """To compute in."""
    weights: tuple[WeightsName, ...] = ("auto", "int8", "int4")
    """Formats of the weights; auto is the compute type."""
    contexts: tuple[int, ...] = (1_024, 8_192)
    """Tokens in the KV cache."""
    rows: tuple[int, ...] = (1, 16, 64)
    """A sweep's: the pending token and its tree."""
    repeats: int = 9
    """Sweeps of each size."""
    folder: Path | None = None
    """Of a model that was grown before, or where one is to be."""


@dataclass(frozen=True, slots=True)
class CardSweep:
    """Sweeps of one size: medians in milliseconds.

    Attributes:
        plain_ms: By the plain path, until the rows are there; 0 where it was not run.
        card_ms: The card alone, by the fast path.
    """

    layers: int
    weights: str
    context: int
    rows: int
    plain_ms: float
    wall_ms: float
    card_ms: float
    floor_ms: float


@dataclass(slots=True)
class CardFindings:
    """What was measured.

    Attributes:
        memory_bytes_per_s: Copied within the card's memory, read and written.
        beside_ms: Head, picks and commits, by name.
        ready_s: Until a span was ready after loading, by span and format: compiled, recorded and proven.
        differing: Values of a tree's path that differ when its tokens are decoded one by one, by span and format.
        paths: By which path each span ran, and why by no faster one.
    """

    memory_bytes_per_s: float
    sweeps: list[CardSweep] = field(default_factory=list)
    beside_ms: dict[str, float] = field(default_factory=dict)
    ready_s: dict[str, float] = field(default_factory=dict)
    differing: dict[str, int] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)


class CardSession:
    """A session with so many committed tokens, whose trees are run and forgotten again."""

    def __init__(self, model: RaggedModel, context: int, most_rows: int) -> None:
        self.context = context
        self._model = model
        self._kv_cache = KvCache(model.layout, context + most_rows)
        generator = torch.Generator(model.device).manual_seed(context)
        for layer in model.layout.layers:
            for kept in self._kv_cache.view(layer.index, context):
                kept.normal_(generator=generator)
        self._kv_cache.slots.committed = context

    def tree(self, rows: int) -> SessionRows:
        """The pending token and a tree below it."""
        parents = [None if offset == 0 else (offset - 1) // BRANCHES for offset in range(rows)]
        depths = [0] * rows
        for offset, parent in enumerate(parents):
            depths[offset] = 0 if parent is None else depths[parent] + 1
        nodes = [TreeNodeId(self.context + offset) for offset in range(rows)]
        above = [None if parent is None else nodes[parent] for parent in parents]
        ids = torch.arange(rows) % 97 + 5
        return SessionRows(self._kv_cache, nodes, above, [self.context + depth for depth in depths], ids)

    def sweep(self, rows: int) -> torch.Tensor:
        """The last layer's rows of a tree: [rows, hidden_size]."""
        hidden = self._model.forward([self.tree(rows)])
        self._kv_cache.truncate(self.context)
        return hidden

    def commit_ms(self) -> float:
        """Milliseconds of a commit that moves a row, in all layers."""
        whole = self.tree(MOVED)
        self._model.forward([replace(whole, parents=[None] * MOVED, positions=[self.context] * MOVED)])
        synchronize(self._model.device)
        started = time.perf_counter()
        self._kv_cache.commit([whole.node_ids[-1]], [])
        synchronize(self._model.device)
        took_ms = (time.perf_counter() - started) * 1e3
        self._kv_cache.truncate(self.context)
        return took_ms

    def differing(self, rows: int) -> int:
        """How many values of a tree's last path differ when its tokens are decoded one by one."""
        tree, whole = self.tree(rows), self.sweep(rows)
        path: list[int] = [rows - 1]
        while path[0]:
            path.insert(0, (path[0] - 1) // BRANCHES)
        assert tree.token_ids is not None
        count = 0
        for position, place in enumerate(path, start=self.context):
            node, ids = TreeNodeId(position), tree.token_ids[place : place + 1]
            row = self._model.forward([SessionRows(self._kv_cache, [node], [None], [position], ids)])
            count += int((row[0] != whole[place]).sum())
            self._kv_cache.commit([node], [])
        self._kv_cache.truncate(self.context)
        return count


class CardBench:
    def __init__(
        self, checkpoint: Checkpoint, options: Options, console: Console, keep: Callable[[CardFindings], None]
    ) -> None:
        """Measure how fast memory is.

        Args:
            keep: is given what was measured so far, after every span and format.
        """
        self._keep = keep
        self.found = CardFindings(copy_rate(torch.device(options.device)))
        self._checkpoint, self._options, self._console = checkpoint, options, console
        self._device, self._dtype = torch.device(options.device), DTYPES[options.dtype]
        self._plain_ms: dict[tuple[int, int, int], float] = {}

    def run(self) -> None:
        """Every span by the plain path, then in every format by the fast one.

        Raises:
            SystemExit: this device has no fast path.
        """
        for layers in self._options.layers:
            self._run_plain(layers)
            for weights in self._options.weights:
                self._run_fast(layers, weights)
                self._keep(self.found)

    def _sessions(self, model: SpanModel) -> list[CardSession]:
        most = max(*self._options.rows, MOVED)
        return [CardSession(model, context, most) for context in self._options.contexts]

    def _sizes(self, sessions: Sequence[CardSession]) -> Iterator[tuple[CardSession, int]]:
        return product(sessions, self._options.rows)

    def _run_plain(self, layers: int) -> None:
        model = load_span(self._checkpoint, Span(0, layers), self._dtype, self._device)
        sessions = self._sessions(model)
        for session, rows in self._sizes(sessions):
            took_ms = self._wall_ms(partial(session.sweep, rows))
            self._plain_ms[layers, session.context, rows] = took_ms
        self.found.beside_ms[f"commit, {layers} layers, plain path"] = median(
            session.commit_ms() for session in sessions
        )
        self._console.print(f"{layers} layers by the plain path: done", highlight=False)
        del model, sessions, session
        self._clear()

    def _run_fast(self, layers: int, weights: WeightsName) -> None:
        options, found, name = self._options, self.found, f"{layers} layers, {weights}"
        form = replace(WeightFormat.of(weights, self._dtype, self._device), with_kernels=True)
        model = load_packed(self._checkpoint, Span(0, layers), form, self._device)
        began = time.monotonic()
        is_forced = self._device.type == "cpu"
        buckets = FORCED_BUCKETS if is_forced else BUCKETS
        use_static(model, max(options.contexts) + 1_024, buckets=buckets, forced=is_forced)
        found.paths[name] = f"{model.path} {model.path_reason}".rstrip()
        found.ready_s[name] = time.monotonic() - began
        self._console.print(f"{name}: {found.paths[name]}, {model.numeric_class}", highlight=False)
        if model.static is None:
            sys.exit(f"card: no fast path: {model.path_reason}")
        sessions = self._sessions(model)
        for session, rows in self._sizes(sessions):
            wall_ms = self._wall_ms(partial(session.sweep, rows))
            card_ms = self._card_ms(partial(model.static.replay, rows))
            read = model.weight_bytes + session.context * model.layout.bytes_per_token
            plain_ms = self._plain_ms[layers, session.context, rows] if weights == options.weights[0] else 0.0
            times_ms = plain_ms, wall_ms, card_ms, read / found.memory_bytes_per_s * 1e3
            found.sweeps.append(CardSweep(layers, weights, session.context, rows, *times_ms))
            said = f"{session.context:,} tokens, {rows} rows: {wall_ms:.2f} ms, the card {card_ms:.2f}"
            self._console.print(f"{said}, floor {times_ms[-1]:.2f}", highlight=False)
        found.differing[name] = sum(session.differing(max(options.rows)) for session in sessions)
        found.beside_ms[f"commit, {name}"] = median(session.commit_ms() for session in sessions * 5)
        if model.span.end == model.num_layers:
            self._measure_head(model, sessions[0], weights)
        del model, sessions, session
        self._clear()

    def _measure_head(self, model: SpanModel, session: CardSession, weights: str) -> None:
        for rows in self._options.rows:
            hidden = session.sweep(rows)
            self.found.beside_ms[f"head of {rows} rows, {weights}"] = self._wall_ms(partial(model.logits, hidden))
            logits = model.logits(hidden)
            for temperature in (0.0, 1.0):
                picks = partial(pick, logits, range(rows), Sampling(temperature=temperature))
                self.found.beside_ms[f"picks of {rows} rows at {temperature:g}, {weights}"] = self._wall_ms(picks)

    def _wall_ms(self, work: Callable[[], object]) -> float:
        """The median of some calls, each until the device is done."""
        return median_s(work, self._options.repeats, self._device) * 1e3

    def _card_ms(self, work: Callable[[], object]) -> float:
        """Of several calls one behind the other."""

        def several() -> None:
            for _ in range(REPLAYS):
                work()

        return self._wall_ms(several) / REPLAYS if self._device.type == "cuda" else self._wall_ms(work)

    def _clear(self) -> None:
        gc.collect()
        empty_cache()


def copy_rate(device: torch.device) -> float:
    """Bytes per second that the device's memory moves, read and written."""
    size = COPY_BYTES if device.type == "cuda" else COPY_BYTES // 16
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(255)
    target = torch.empty_like(source)
    return 2 * size / median_s(partial(target.copy_, source), 7, device)


def median_s(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The median of some calls, each until the device is done."""
    took = []
    for _ in range(repeats + 2):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        took.append(time.perf_counter() - started)
    return median(took[2:])


def sheet(found: CardFindings, options: Options) -> Sheet:
    made = Sheet(
        "card",
        f"{options.shape} shape, {options.dtype}, on {device_name(options.device)}: ms per sweep",
        ("layers", "weights", "tokens", "rows", "plain path", "fast path", "the card alone", "× floor", "× auto"),
    )
    auto = {
        (one.layers, one.context, one.rows): one.card_ms for one in found.sweeps if one.weights == options.weights[0]
    }
    for one in found.sweeps:
        own = auto[one.layers, one.context, one.rows]
        plain = f"{one.plain_ms:.2f}" if one.plain_ms else ""
        made.rows.append(
            (
                *(f"{one.layers}", one.weights, f"{one.context:,}", f"{one.rows}", plain, f"{one.wall_ms:.2f}"),
                *(f"{one.card_ms:.2f}", f"{one.card_ms / one.floor_ms:.2f}", f"{one.card_ms / own:.2f}"),
            )
        )
    made.notes.append(
        f"Floor: weights and KV at {found.memory_bytes_per_s / 1e9:,.0f} GB/s, a copy's bytes, read and written. "
        f"The card alone: {REPLAYS} replays one behind the other. Medians of {options.repeats} sweeps."
    )
    made.notes += [f"{name}: {ms:.2f} ms" for name, ms in found.beside_ms.items()]
    made.notes += [
        f"{name}: ready after {seconds:.0f} s; {found.paths[name]}" for name, seconds in found.ready_s.items()
    ]
    made.notes += [
        f"{name}: {count} values of a path differ from plain decoding" for name, count in found.differing.items()
    ]
    made.measured = {**asdict(found), "options": asdict(options)}
    return made


def main() -> None:
    """Grow the model if need be, measure and print."""
    options = tyro.cli(Options)
    if options.shape not in SHAPES:
        sys.exit(f"card: no shape {options.shape!r}; there are {', '.join(SHAPES)}")
    most = SHAPES[options.shape].num_hidden_layers
    options = replace(options, layers=tuple(dict.fromkeys(min(layers, most) for layers in options.layers)))
    quiet_libraries()
    console = make_console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    measure(options, console)


def measure(options: Options, console: Console) -> None:
    """Measure and print; where it breaks off, print what there is, and record nothing.

    Raises:
        SystemExit: it was interrupted, or this device has no fast path.
    """

    def keep(found: CardFindings) -> None:
        if options.json is not None:
            sheet(found, options).write(options.json)

    with grown_model(options.folder, options.shape, DTYPES[options.dtype], options.device) as folder:
        bench = CardBench(open_checkpoint(folder), options, console, keep)
        try:
            bench.run()
        except BaseException as reason:
            if bench.found.sweeps:
                sheet(bench.found, options).finish(console, replace(options, record=False))
            if isinstance(reason, KeyboardInterrupt):
                sys.exit("card: interrupted: the table has what was measured until then")
            raise
    sheet(bench.found, options).finish(console, options)
