"""What does a quantised checkpoint take and cost, held as it was published?

In one process on the CPU in float32: a whole model whose weights stay as the file has them (GGUF, or any format that
is read), and one whose weights were decoded when it was loaded. Memory is of weights, as a share of the file's own
bytes. Times are of forwards of both models in turn, so that what else the machine does hits both; their ratio is the
median of such pairs. Texts are greedy.

    python -m benchmarks published MODEL        # a GGUF file, a folder, a hub id
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Final

import torch
import tyro
from rich.console import Console
from rich.progress import track

from benchmarks.drafting.quantised import Cases, cases_of
from benchmarks.sheet import Sheet
from benchmarks.simulation.acceptance import Size, generate
from client.drafting.drafter import NoDrafter
from node.model.checkpoint import Checkpoint, open_checkpoint
from node.model.packed_span import load_packed
from node.model.span import SpanModel, dissect, load_span
from node.model.stored_sizes import format_of
from swarm.ids import TreeNodeId
from swarm.inference.kv_cache import KvCache
from swarm.inference.ragged_batch import SessionRows
from swarm.layers import Span
from swarm.models.stored.source import StoredTensor
from swarm.protocol.messages import Sampling
from swarm.runtime.console import make_console
from swarm.runtime.library_logging import quiet_libraries

CPU: Final = torch.device("cpu")
ROWS: Final = (1, 8, 64, 256)
"""Rows of a forward."""


@dataclass(frozen=True, slots=True)
class Options:
    """Measure a quantised checkpoint as it was published."""

    model: Annotated[str, tyro.conf.Positional]
    """A GGUF file, a folder or a hub id."""
    prompts: int = 4
    """How many texts."""
    new_tokens: int = 32
    """New tokens of each text."""
    rounds: int = 15
    """Pairs of forwards of each size."""
    threads: int = 1
    """Threads of torch."""
    record: bool = False
    """Write the table into docs/benchmarks and the measurements beside it."""


@dataclass(frozen=True, slots=True)
class StoredCost:
    """What weights take and cost that stay as they were published.

    Attributes:
        model: its name.
        encoding: the format.
        file_mib: What the file's tensors take in it, in MiB.
        held_mib: What they take in memory.
        expanded_mib: What they take in float32.
        ratios: Time of a forward by that of the expanded model, by the number of rows.
        same_text: Greedy texts that are the expanded model's.
        texts: All texts.
    """

    model: str
    encoding: str
    file_mib: float
    held_mib: float
    expanded_mib: float
    ratios: dict[int, float]
    same_text: int
    texts: int


def bytes_in_files(checkpoint: Checkpoint) -> int:
    """What a model's tensors take in its files."""
    read = checkpoint.read(checkpoint.weight_map)
    return sum(one.matrix.size_bytes if isinstance(one, StoredTensor) else one.nbytes for one in read.values())


def forward_s(model: SpanModel, rows: int) -> float:
    """How long a forward of some rows takes, in seconds."""
    nodes = [TreeNodeId(number) for number in range(rows)]
    ids = torch.arange(rows) % 256
    work = SessionRows(KvCache(model.layout, rows), nodes, [None, *nodes[:-1]], range(rows), ids)
    started = time.perf_counter()
    model.logits(model.forward([work]))
    return time.perf_counter() - started


def ratios_of(stored: SpanModel, expanded: SpanModel, options: Options, console: Console) -> dict[int, float]:
    """By how much a forward takes longer, by rows."""
    found = {}
    for rows in track(ROWS, "forwards", console=console):
        pairs = [(forward_s(stored, rows), forward_s(expanded, rows)) for _ in range(options.rounds + 1)]
        found[rows] = median(ours / theirs for ours, theirs in pairs[1:])
    return found


def texts_of(model: SpanModel, cases: Cases, new_tokens: int) -> list[tuple[int, ...]]:
    """Greedy texts."""
    return [tuple(generate(model, NoDrafter(), ids, Sampling(), Size(new_tokens, 0)).tokens) for ids in cases[1]]


def measure(options: Options, console: Console) -> StoredCost:
    """One model."""
    checkpoint = open_checkpoint(options.model)
    layout = dissect(checkpoint.config)
    whole = Span(0, layout.num_layers)
    form = format_of(checkpoint, layout, "auto", torch.float32, CPU)
    stored, expanded = load_packed(checkpoint, whole, form, CPU), load_span(checkpoint, whole, torch.float32)
    cases = cases_of(checkpoint.folder, options.prompts)
    ours, theirs = (texts_of(model, cases, options.new_tokens) for model in (stored, expanded))
    return StoredCost(
        model=checkpoint.name,
        encoding=checkpoint.source.encoding or "float",
        file_mib=bytes_in_files(checkpoint) / 2**20,
        held_mib=stored.weight_bytes / 2**20,
        expanded_mib=expanded.weight_bytes / 2**20,
        ratios=ratios_of(stored, expanded, options, console),
        same_text=sum(old == new for old, new in zip(theirs, ours, strict=True)),
        texts=len(ours),
    )


def make_sheet(costs: Sequence[StoredCost], options: Options) -> Sheet:
    """The table."""
    sheet = Sheet(
        "published",
        "Weights that stay as they were published, on a CPU in float32, against the same weights in float32",
        (
            *("model", "file, MiB", "held, MiB", "held / file", "float32, MiB"),
            *(f"{rows} {'row' if rows == 1 else 'rows'}, × time" for rows in ROWS),
            "same text",
        ),
    )
    for one in costs:
        sheet.rows.append(
            (
                f"{one.model}, {one.encoding}",
                f"{one.file_mib:.1f}",
                f"{one.held_mib:.1f}",
                f"{one.held_mib / one.file_mib:.3f}",
                f"{one.expanded_mib:.1f}",
                *(f"{one.ratios[rows]:.2f}" for rows in ROWS),
                f"{one.same_text} of {one.texts}",
            )
        )
    kept = asdict(options) | {"model": costs[0].model}  # where it lies here is nobody's business
    sheet.measured = {"options": kept, "costs": [asdict(one) for one in costs]}
    return sheet


def main() -> None:
    """Entry point."""
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads)
    quiet_libraries()
    console = make_console()
    make_sheet([measure(options, console)], options).finish(console, record=options.record)


if __name__ == "__main__":
    main()
