"""How fast this machine runs its span: measured before it is announced, as a hint to others and to the engine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from node.model.packed_span import pack_loaded
from node.model.span import ModelLayout, SpanModel, synthetic_span
from node.session.step_cost import MIN_ROWS, StepCost
from swarm.base.errors import UnsupportedModel
from swarm.base.ids import TreeNodeId
from swarm.base.layers import Span
from swarm.compute.fast_path import use_static
from swarm.compute.kv_cache import KvCache
from swarm.compute.ragged_batch import SessionRows
from swarm.compute.sampling import pick
from swarm.compute.weights.format import WeightFormat
from swarm.protocol.messages import Sampling

TREE_NODES = (1, 8, 64)
REPEATS = 5
WARM_UP_NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Tree nodes of the sweeps that a GPU runs before its first one: it loads kernels, which differ with the size.

With graphs these fill buckets, each of which was recorded before; what is left to load are the kernels that pick."""
OFFLOADED_ROWS = 2_560
"""More rows than the largest tree of one session."""


def make_ready(model: SpanModel, *, graphs: bool = True, streamed: bool = False) -> None:
    """Choose a span's path before it is announced: record and prove graphs where the device and the class allow them.

    Args:
        model: fully loaded; nothing else may use it meanwhile.
        graphs: whether they are wanted.
        streamed: whether its weights pass through: a graph needs them at fixed addresses.
    """
    if streamed:
        model.use_plain("weights are streamed")
    elif not graphs:
        model.use_plain("its numeric class is without kernels, as --no-graphs or the swarm wants it")
    else:
        use_static(model)


def measure_sweeps(model: SpanModel, clock: Callable[[], float] = time.perf_counter) -> tuple[tuple[int, float], ...]:
    """Median milliseconds of a sweep's forward, head included at the tail: at 1, 8 and 64 rows, or of each bucket.

    The sizes take turns, so that a slow moment of the machine does not fall on one of them alone. The results never
    fall with the size, because a larger sweep includes a smaller one.
    """
    sizes = sizes_of(model)
    if model.device.type == "cuda":
        warm_up(model)
    rounds = [[forward_ms(model, nodes, clock) for nodes in sizes] for _ in range(REPEATS + 1)][1:]
    return medians(sizes, rounds)


def sizes_of(model: SpanModel) -> tuple[int, ...]:
    """Tree nodes of the sweeps that are measured."""
    return TREE_NODES if model.static is None else tuple(model.static.buckets)


def medians(sizes: Sequence[int], rounds: Sequence[Sequence[float]]) -> tuple[tuple[int, float], ...]:
    """(tree nodes, median milliseconds) of rounds through all sizes, none below a smaller one's."""
    typical = [statistics.median(times) for times in zip(*rounds, strict=True)]
    return tuple((nodes, min(typical[place:])) for place, nodes in enumerate(sizes))


def uncounted_ms(model: SpanModel, nodes: int) -> float:
    """Milliseconds of one forward that is not counted as a session's work."""
    counted = model.forwards, model.rows_in
    try:
        return forward_ms(model, nodes, time.perf_counter)
    finally:
        model.forwards, model.rows_in = counted


def warm_up(model: SpanModel) -> None:
    """Run trees of many sizes below one token, and pick after them, so that no text waits for kernels to load."""
    kv_cache = KvCache(model.layout, 1 + max(WARM_UP_NODES))
    prompt = _chain(model, kv_cache, 1)
    model.forward([prompt])
    kv_cache.commit(prompt.node_ids, [])
    for nodes in WARM_UP_NODES:
        chain = _chain(model, kv_cache, nodes)
        ids = tuple(TreeNodeId(1 + node) for node in chain.node_ids)
        hidden = model.forward([replace(chain, node_ids=ids, parents=(None,) * nodes, positions=(1,) * nodes)])
        if model.span.end == model.num_layers:
            for sampling in (Sampling(), Sampling(temperature=1.0)):
                pick(model.logits(hidden), (2,) * nodes, sampling)
        kv_cache.truncate(1)


def step_cost(sweep_ms: tuple[tuple[int, float], ...], *, offloaded: bool = False) -> StepCost:
    """A first prediction for the engine, from the smallest and the largest measurement.

    Args:
        sweep_ms: (tree nodes, milliseconds), from the smallest sweep to the largest.
        offloaded: every forward reads all weights again, so a tree is never cut.
    """
    (few, few_ms), (many, many_ms) = sweep_ms[0], sweep_ms[-1]
    per_row = max(many_ms - few_ms, 0.0) / (many - few)
    return StepCost(max(few_ms - per_row * few, 0.0), per_row, OFFLOADED_ROWS if offloaded else MIN_ROWS)


def forward_ms(model: SpanModel, nodes: int, clock: Callable[[], float], sub: Span | None = None) -> float:
    """Milliseconds of one forward of a chain of tree nodes, head included at the tail.

    Args:
        sub: which of the layers; None for all.
    """
    kv_cache = KvCache(model.layout, 1 + nodes)
    work = _chain(model, kv_cache, nodes)
    if model.layout.states:  # what a mixer does depends on the tree's depth, and on whether a text is before it
        first = _chain(model, kv_cache, 1)
        model.forward([first], sub)
        kv_cache.commit(first.node_ids, [])
        work = _as_tree(work)
    started = clock()
    hidden = model.forward([work], sub)
    if (sub or model.span).end == model.num_layers:
        hidden = model.logits(hidden)
    hidden[-1, -1].item()  # waits for the device
    return (clock() - started) * 1e3


def _as_tree(chain: SessionRows) -> SessionRows:
    """The same nodes behind one token as a tree whose levels have one, two, three nodes and so on, as drafts' have."""
    ids = [TreeNodeId(1 + node) for node in chain.node_ids]
    levels: list[int] = []
    while len(levels) < len(ids):
        levels += [max(levels, default=0) + 1] * (max(levels, default=0) + 1)
    above: dict[int, list[TreeNodeId]] = {}
    parents: list[TreeNodeId | None] = []
    for node, level in zip(ids, levels, strict=False):
        row = above.setdefault(level, [])
        parents.append(None if level == 1 else above[level - 1][min(len(row), level - 2)])
        row.append(node)
    positions = levels[: len(ids)]
    return replace(chain, node_ids=tuple(ids), parents=tuple(parents), positions=tuple(positions))


def _chain(model: SpanModel, kv_cache: KvCache, nodes: int) -> SessionRows:
    ids = tuple(TreeNodeId(number) for number in range(nodes))
    embeds = model.span.start == 0
    return SessionRows(
        kv_cache=kv_cache,
        node_ids=ids,
        parents=(None, *ids[:-1]),
        positions=tuple(range(nodes)),
        token_ids=torch.zeros(nodes, dtype=torch.long, device=model.device),
        rows=None if embeds else torch.zeros(nodes, model.hidden_size, dtype=model.dtype, device=model.device),
    )


# How fast this machine would run a model's layers, before any of them is downloaded: with synthetic ones.
#
# A hint for choosing how many layers to hold, and for the user. What is announced is measured on the real layers.

MAX_BYTES: Final = 320 << 20
"""Of the synthetic layers together: a machine fills so much in less than a second."""
LAYERS: Final = 2
BUDGET_S: Final = 1.0
"""How long is measured; each size once in any case."""
ROUNDS: Final = 8
MATRIX_BYTES: Final = 128 << 20
"""Of the matrix that stands in for a layer that is too large to be made."""


@dataclass(frozen=True, slots=True)
class LayerSpeed:
    """What a span should take.

    Attributes:
        base_ms: what a sweep takes beside its layers.
        layer_ms: by tree nodes: what each layer takes.
        seconds: how long it took to find out.
        how: what was measured, as a clause.
        is_measured: whether it was layers; else it is an estimate, and of experts that a token does not use too slow.
    """

    base_ms: float
    layer_ms: dict[int, float]
    seconds: float
    how: str
    is_measured: bool

    def sweep_ms(self, layers: int) -> tuple[tuple[int, float], ...]:
        """(tree nodes, milliseconds of a sweep) of a span of so many layers, without embedding and head."""
        return tuple((nodes, self.base_ms + layers * self.layer_ms[nodes]) for nodes in sorted(self.layer_ms))


def benchmark(
    layout: ModelLayout, form: WeightFormat, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> LayerSpeed:
    """Measure one and two layers from the middle of a model, or a matrix as large where they are too large."""
    started = clock()
    middle = min(layout.borders.starts, key=lambda start: abs(start - layout.num_layers // 2))
    span = Span(middle, min(middle + LAYERS, layout.num_layers))
    names = [f"{layout.layers}.{index}" for index in range(span.start, span.end)]
    layer_bytes = max(layout.bytes_of(name, form) for name in names)
    made_bytes = max(layout.weights[name] for name in names) * form.dtype.itemsize  # they are packed afterwards
    ends_bytes = (layout.weights_in(span) - sum(map(layout.weights.__getitem__, names))) * form.dtype.itemsize
    while len(span) > 1 and len(span) * made_bytes + ends_bytes > MAX_BYTES:
        span = Span(span.start, span.end - 1)
    if len(span) * made_bytes + ends_bytes <= MAX_BYTES:
        try:
            found = _of_layers(layout, span, (form, device), clock)
        except (UnsupportedModel, RuntimeError):  # loading the real ones will say what is wrong
            pass
        else:
            how = f"measured on {'a synthetic layer' if len(span) == 1 else f'{len(span)} synthetic layers'}"
            return LayerSpeed(*found, clock() - started, how, is_measured=True)
    found = _of_matrix(layer_bytes, (form.dtype, device), clock)
    return LayerSpeed(*found, clock() - started, "estimated from how fast memory is read", is_measured=False)


def _of_layers(
    layout: ModelLayout, span: Span, compute: tuple[WeightFormat, torch.device], clock: Callable[[], float]
) -> tuple[float, dict[int, float]]:
    """Base, and time per layer by tree nodes, of the fastest runs: what slows a run down is not the machine's speed."""
    form, device = compute
    model = synthetic_span(layout, span, form.dtype, device)
    pack_loaded(model, layout, form)
    one = Span(span.start, span.start + 1)
    runs = [(one, TREE_NODES[0]), *((span, nodes) for nodes in TREE_NODES)]
    best = dict.fromkeys(runs, math.inf)
    forward_ms(model, TREE_NODES[0], clock)  # wakes everything up
    until = clock() + BUDGET_S
    for turn in range(ROUNDS):
        for sub, nodes in runs:
            if turn and clock() >= until:
                break
            best[sub, nodes] = min(best[sub, nodes], forward_ms(model, nodes, clock, sub))
    few_ms = best[span, TREE_NODES[0]]
    rise_ms = (few_ms - best[runs[0]]) / (len(span) - 1) if len(span) > 1 else few_ms
    base_ms = min(max(few_ms - len(span) * rise_ms, 0.0), few_ms / 2)  # noise must not make layers free
    return base_ms, {nodes: (best[span, nodes] - base_ms) / len(span) for nodes in TREE_NODES}


def _of_matrix(
    layer_bytes: int, compute: tuple[torch.dtype, torch.device], clock: Callable[[], float]
) -> tuple[float, dict[int, float]]:
    dtype, device = compute
    width = 4_096
    matrix = torch.full((MATRIX_BYTES // dtype.itemsize // width, width), 0.01, dtype=dtype, device=device)
    slope: dict[int, float] = {}
    for nodes in TREE_NODES:
        rows = torch.full((nodes, width), 0.01, dtype=dtype, device=device)
        times = []
        for _ in range(3):
            started = clock()
            (rows @ matrix.T)[-1, -1].item()
            times.append(clock() - started)
        slope[nodes] = min(times) * 1e3 * layer_bytes / MATRIX_BYTES
    return 0.0, slope
