"""What does a sweep take on a GPU, of what reading weights and KV takes?

One process, no network: a span of a large model's shape with random weights, sessions with random KV, and trees below
them. Every sweep runs by the plain path and by the fast one (docs/design/kernels.md) in the same call. The floor is
what must be read, at the rate at which this GPU copies. Quantised weights are those of the first format, rounded.

    python -m benchmarks card --json card.json           # on a machine with a GPU: eight minutes
    python -m benchmarks card --device cpu --shape tiny --dtype float32       # the same steps, by the interpreter
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final

import torch
import tyro
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.sheet import Sheet
from benchmarks.speed.card_streamed import copy_rates
from benchmarks.speed.grown import SHAPES, device_name
from node.model.loading import DTYPES
from node.model.span import SpanModel
from swarm.ids import TreeNodeId
from swarm.inference.fast_path import use_static
from swarm.inference.kv_cache import KvCache
from swarm.inference.packed_layers import pack_model
from swarm.inference.ragged_batch import SessionRows
from swarm.inference.sampling import pick
from swarm.inference.tree_attention import use_canopy
from swarm.layers import Span
from swarm.protocol.messages import Sampling
from swarm.runtime.console import make_console
from swarm.runtime.library_logging import quiet_libraries

BRANCHES = 4
"""Nodes below each parent, level by level."""
REPLAYS = 12
"""Replays one behind the other, so that the card never waits for the host."""
COMMIT_LAYERS = 16
WEIGHT_BITS: Final = {"own": 0, "int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True)
class Options:
    """Measure a card."""

    shape: str = "8B"
    """Dimensions of the model, by name."""
    layers: tuple[int, ...] = (32, 10)
    """Spans: so many layers, the first with the head."""
    device: str = "cuda"
    """Where it runs."""
    dtype: str = "bfloat16"
    """To compute in."""
    weights: tuple[str, ...] = ("own", "int8", "int4")
    """Formats of the weights: own is the compute type."""
    contexts: tuple[int, ...] = (1_024, 8_192)
    """Tokens in the KV cache."""
    rows: tuple[int, ...] = (1, 16, 64)
    """A sweep's: the pending token and its tree."""
    repeats: int = 9
    """Sweeps of each size."""
    record: bool = False
    """Write the table into docs/benchmarks and the measurements beside it."""
    json: Path | None = None
    """Write the measurements into this file."""


@dataclass(frozen=True, slots=True)
class CardSweep:
    """Sweeps of one size: medians in milliseconds.

    Attributes:
        weights: Their format.
        layers: Of the span.
        context: Tokens in the KV cache.
        rows: Of a sweep.
        plain_ms: By the plain path, until the rows are there; 0 where it was not run.
        card_ms: The card alone, by the fast path.
        wall_ms: The fast path, until the rows are there.
        floor_ms: Reading weights and KV.
    """

    weights: str
    layers: int
    context: int
    rows: int
    plain_ms: float
    card_ms: float
    wall_ms: float
    floor_ms: float


class CardSession:
    """A session with so many committed tokens, whose trees are run and forgotten again."""

    def __init__(self, model: SpanModel, context: int, most_rows: int) -> None:
        self.context = context
        self._model = model
        self._kv_cache = KvCache(model.layout, context + most_rows)
        generator = torch.Generator(model.device).manual_seed(context)
        for layer in model.layout.layers:
            for kept in self._kv_cache.view(layer.index, context):
                kept.normal_(generator=generator)
        self._kv_cache.slots.committed = context

    def tree(self, rows: int) -> SessionRows:
        """New nodes, of the pending token and a tree below it."""
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

    def commit(self, rows: int) -> float:
        """Milliseconds that a commit of every second node of a chain takes: all of them move."""
        whole = self.tree(rows)
        chain = replace(whole, parents=[None] * rows, positions=[self.context] * rows)
        self._model.forward([chain])
        _wait(self._model.device)
        started = time.perf_counter()
        self._kv_cache.commit([whole.node_ids[-1]], [])
        _wait(self._model.device)
        took = (time.perf_counter() - started) * 1e3
        self._kv_cache.truncate(self.context)
        return took

    def path_differs(self, rows: int) -> int:
        """How many values of a tree's last path differ when its tokens are decoded one by one."""
        tree = self.tree(rows)
        whole = self.sweep(rows)
        path, offset = [], rows - 1
        while True:
            path.insert(0, offset)
            if offset == 0:
                break
            offset = (offset - 1) // BRANCHES
        assert tree.token_ids is not None
        differs = 0
        for depth, place in enumerate(path):
            node = TreeNodeId(self.context + depth)
            ids = tree.token_ids[place : place + 1]
            row = self._model.forward([SessionRows(self._kv_cache, [node], [None], [self.context + depth], ids)])
            differs += int((row[0] != whole[place]).sum())
            self._kv_cache.commit([node], [])
        self._kv_cache.truncate(self.context)
        return differs


def random_span(options: Options, layers: int) -> SpanModel:
    """A whole model of that many layers, its weights random, the same each time."""
    config = LlamaConfig(
        **{name: getattr(SHAPES[options.shape], name) for name in SHAPES[options.shape].__slots__}
        | {"num_hidden_layers": layers, "max_position_embeddings": 131_072, "tie_word_embeddings": False},
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    use_canopy(config)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[options.dtype])
    try:
        with torch.device(options.device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    return SpanModel(model, Span(0, layers))


def measure(options: Options, console: Console) -> tuple[list[CardSweep], dict[str, float | str]]:
    """All formats, spans, contexts and sizes.

    Raises:
        SystemExit: this device has no fast path.
    """
    device = torch.device(options.device)
    inside, _ = copy_rates(device)
    known: dict[str, float | str] = {"memory_bytes_per_s": inside}
    lines: list[CardSweep] = []
    plain: dict[tuple[int, int, int], float] = {}
    for layers in options.layers:
        for weights in options.weights:
            model = random_span(options, layers)
            sessions = [CardSession(model, context, max(options.rows)) for context in options.contexts]
            if weights == options.weights[0]:
                plain |= {
                    (layers, session.context, rows): _wall_ms(
                        lambda s=session, r=rows: s.sweep(r), options.repeats, device
                    )  # type: ignore[misc]
                    for session in sessions
                    for rows in options.rows
                }
                if layers == options.layers[0]:
                    known["plain_commit_ms"] = median(session.commit(16) for session in sessions * 5)
            if WEIGHT_BITS[weights]:
                pack_model(model, WEIGHT_BITS[weights])
            began = time.monotonic()
            use_static(model, max(options.contexts) + 1_024, forced=device.type == "cpu")
            if model.static is None:
                sys.exit(f"card: no fast path: {model.path_reason}")
            known[f"ready_s {layers} {weights}"] = time.monotonic() - began
            console.print(f"{layers} layers, {weights}: {model.path}; {model.path_reason or 'nothing to say'}")
            for session in sessions:
                floor_ms = (model.weight_bytes + session.context * model.layout.bytes_per_token) / inside * 1e3
                for rows in options.rows:
                    wall_ms = _wall_ms(lambda s=session, r=rows: s.sweep(r), options.repeats, device)  # type: ignore[misc]
                    session.sweep(rows)
                    card_ms = _card_ms(lambda m=model, r=rows: m.static.replay(r), device)  # type: ignore[misc]
                    own = plain[layers, session.context, rows] if weights == options.weights[0] else 0.0
                    lines.append(CardSweep(weights, layers, session.context, rows, own, card_ms, wall_ms, floor_ms))
                known[f"path_differs {layers} {weights} {session.context}"] = session.path_differs(max(options.rows))
            if layers == options.layers[0]:
                _ends(model, sessions[0], known, weights, options)
            del model, sessions, session
            gc.collect()
            with suppress(RuntimeError):
                torch.cuda.empty_cache()
    return lines, known


def _ends(
    model: SpanModel, session: CardSession, known: dict[str, float | str], weights: str, options: Options
) -> None:
    """What stands beside a sweep: the head, picks and a commit."""
    for rows in options.rows:
        hidden = session.sweep(rows)
        known[f"head_ms {weights} {rows}"] = _wall_ms(lambda h=hidden: model.logits(h), options.repeats, model.device)  # type: ignore[misc]
        logits = model.logits(hidden)
        for temperature in (0.0, 1.0):
            sampling = Sampling(temperature=temperature)
            known[f"picks_ms {weights} {rows} T={temperature:g}"] = _wall_ms(
                lambda made=logits, how=sampling: pick(made.clone(), range(len(made)), how),  # type: ignore[misc]
                options.repeats,
                model.device,
            )
    known[f"commit_ms {weights}"] = median(session.commit(16) for _ in range(9))


def sheet(lines: Sequence[CardSweep], known: dict[str, float | str], options: Options) -> Sheet:
    """The table."""
    made = Sheet(
        "card",
        f"{options.shape} shape, {options.dtype}, on {device_name(options.device)}: ms per sweep",
        (
            "layers, weights",
            "tokens",
            "rows",
            "plain path",
            "fast path",
            "× floor",
            "the card alone",
            "× floor",
            "× own",
        ),
    )
    own = {(line.layers, line.context, line.rows): line.card_ms for line in lines if line.weights == options.weights[0]}
    for line in lines:
        plain = f"{line.plain_ms:.2f}" if line.plain_ms else ""
        made.rows.append(
            (
                *(f"{line.layers}, {line.weights}", f"{line.context}", f"{line.rows}", plain, f"{line.wall_ms:.2f}"),
                *(f"{line.wall_ms / line.floor_ms:.2f}", f"{line.card_ms:.2f}", f"{line.card_ms / line.floor_ms:.2f}"),
                f"{line.card_ms / own[line.layers, line.context, line.rows]:.2f}",
            )
        )
    made.notes.append(
        f"Floor: weights and KV at {float(known['memory_bytes_per_s']) / 1e9:,.0f} GB/s, a copy's bytes, read and "
        f"written. The card alone: {REPLAYS} replays one behind the other. Medians of {options.repeats} sweeps."
    )
    made.notes += [
        f"{name}: {value:.3g}" if isinstance(value, float) else f"{name}: {value}" for name, value in known.items()
    ]
    made.measured = {"lines": [asdict(line) for line in lines], "known": known, "options": asdict(options)}
    return made


def _wall_ms(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    took = []
    for _ in range(repeats + 2):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        took.append((time.perf_counter() - started) * 1e3)
    return median(took[2:])


def _card_ms(work: Callable[[], object], device: torch.device) -> float:
    """Of several calls one behind the other."""
    if device.type != "cuda":
        return _wall_ms(work, 1, device)
    work()
    times = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(REPLAYS):
            work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / REPLAYS)
    return median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure and print."""
    options = tyro.cli(Options)
    if options.shape not in SHAPES:
        sys.exit(f"card: no shape {options.shape!r}; there are {', '.join(SHAPES)}")
    quiet_libraries()
    console = make_console()
    lines, known = measure(options, console)
    sheet(lines, known, options).finish(console, record=options.record, path=options.json)


if __name__ == "__main__":
    main()
