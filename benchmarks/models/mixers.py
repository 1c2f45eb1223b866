"""What does a tree cost where layers keep a state of the text, and what does a session keep?

Four layers of one kind, random and of equal width, on one thread of the CPU in float32, by transformers' reference
code. Each forward comes behind one committed token and is timed as a node times itself (`node/engine/measure.py`):
one row, a chain, and trees whose levels have one, two, three nodes and so on. Times are the shortest of several runs,
as multiples of one row's.

    python -m benchmarks mixers --record
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

import torch
import tyro
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.sheet import Sheet
from node.engine.measure import forward_ms
from swarm.ids import TreeNodeId
from swarm.inference.kv_cache import KvCache
from swarm.inference.ragged_batch import RaggedModel, SessionRows
from swarm.inference.tree_attention import use_canopy
from swarm.layers import Span
from swarm.runtime.console import make_console
from swarm.runtime.library_logging import quiet_libraries

WIDTH: Final = 768
LAYERS: Final = 4
CHAIN: Final = 64
TREES: Final = (8, 16, 64)
_ATTENTION: Final[Mapping[str, Any]] = {
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
KINDS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "attention": ("llama", _ATTENTION),
    "gated delta rule": (
        "qwen3_5_text",
        {
            **_ATTENTION,
            "layer_types": ["linear_attention"] * LAYERS,
            "linear_num_key_heads": 6,
            "linear_num_value_heads": 12,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "Mamba 2": ("mamba2", {"num_heads": 24, "head_dim": 64, "state_size": 64, "n_groups": 1}),
    "short convolution": ("lfm2", {**_ATTENTION, "head_dim": None, "layer_types": ["conv"] * LAYERS}),
}
"""Kinds of layers: a family that has them, and its config."""


@dataclass(frozen=True, slots=True)
class Options:
    """Measure every kind."""

    repeats: int = 12
    """Runs of which the shortest counts."""
    record: bool = False
    """Write the table into docs/benchmarks and the measurements beside it."""


@dataclass(frozen=True, slots=True)
class MixerCost:
    """What one kind of layer costs.

    Attributes:
        kind: Its name.
        token_bytes: What a session keeps per token and layer.
        state_bytes: What a state takes per layer.
        one_ms: Milliseconds of one row.
        chain_ms: Of a chain of `CHAIN` rows.
        tree_ms: Of trees, by nodes.
    """

    kind: str
    token_bytes: int
    state_bytes: int
    one_ms: float
    chain_ms: float
    tree_ms: dict[int, float]


def make_model(family: str, changes: Mapping[str, Any]) -> RaggedModel:
    """Some layers of a family, with random weights."""
    values = {"vocab_size": 128, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "pad_token_id": 0, **changes}
    config = CONFIG_MAPPING[family](**{name: value for name, value in values.items() if value is not None})
    use_canopy(config)
    torch.manual_seed(0)
    whole = cast("Any", AutoModelForCausalLM).from_config(config).eval().float()
    return RaggedModel(whole, Span(0, LAYERS))


def chain_ms(model: RaggedModel, rows: int) -> float:
    """Milliseconds of a forward of a chain behind one committed token."""
    kv_cache = KvCache(model.layout, 1 + rows)
    model.forward([SessionRows(kv_cache, [TreeNodeId(0)], [None], [0], torch.tensor([3]))])
    kv_cache.commit([TreeNodeId(0)], [])
    ids = [TreeNodeId(1 + row) for row in range(rows)]
    work = SessionRows(kv_cache, ids, [None, *ids[:-1]], range(1, 1 + rows), torch.arange(rows) % 100 + 3)
    started = time.perf_counter()
    model.forward([work])
    return (time.perf_counter() - started) * 1e3


def measure(kind: str, repeats: int) -> MixerCost:
    """Measure one kind of layer."""
    model = make_model(*KINDS[kind])
    span: Any = model  # a whole model has what is timed of a span
    chain_ms(model, 1)

    best = dict.fromkeys((1, *TREES), math.inf)
    chain = math.inf
    for _ in range(repeats):  # sizes take turns, so that a slow moment of the machine does not fall on one of them
        chain = min(chain, chain_ms(model, CHAIN))
        for nodes in best:
            best[nodes] = min(best[nodes], forward_ms(span, nodes, time.perf_counter))
    layout = model.layout
    tree_ms = {nodes: best[nodes] for nodes in TREES}
    return MixerCost(kind, layout.bytes_per_token // LAYERS, layout.state_bytes // LAYERS, best[1], chain, tree_ms)


def make_sheet(costs: list[MixerCost], options: Options) -> Sheet:
    """The table: one line per kind."""
    sheet = Sheet(
        "mixers",
        "Time of a forward as a multiple of one row's, and what a session keeps per layer",
        ("layers", "per token", "a state", f"chain of {CHAIN}", *(f"tree of {nodes}" for nodes in TREES)),
    )
    for cost in costs:
        times = [cost.chain_ms, *cost.tree_ms.values()]
        state = f"{cost.state_bytes / 1024:,.0f} KiB" if cost.state_bytes else "–"
        sheet.rows.append(
            (cost.kind, f"{cost.token_bytes / 1024:.1f} KiB", state, *(f"{each / cost.one_ms:.1f}" for each in times))
        )
    sheet.notes.append(f"{LAYERS} layers of width {WIDTH}, float32, one thread of a CPU.")
    sheet.measured = {"options": asdict(options), "costs": [asdict(cost) for cost in costs]}
    return sheet


def main() -> None:
    """Entry point."""
    options = tyro.cli(Options)
    quiet_libraries()
    torch.set_num_threads(1)
    costs = [measure(kind, options.repeats) for kind in KINDS]
    make_sheet(costs, options).finish(make_console(), record=options.record)


if __name__ == "__main__":
    main()
