"""How fast this machine would run a model's layers, before any of them is downloaded: with synthetic ones.

A hint for choosing how many layers to hold, and for the user. What is announced is measured on the real layers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from node.engine.measure import TREE_NODES, forward_ms
from node.model.packed_span import pack_loaded
from node.model.span import ModelLayout, synthetic_span
from swarm.errors import UnsupportedModel
from swarm.inference.weights.format import WeightFormat
from swarm.layers import Span

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
    """Measure one and two layers from the middle of a model, or a matrix as large where they are too large.

    Args:
        layout: of the model.
        form: compute type, and how weights are held.
        device: where.
        clock: seconds, from any point on.
    """
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
