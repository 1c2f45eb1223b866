"""How much does a large tree bring where every sweep reads the weights again?

One node holds the whole demo target on loopback, once with its layers streamed through a rate limiter, so that a plain
sweep takes a fixed time, and once resident. The same prompts and seeds run with every tree size in turns.

SpecExec's trade-off says where the fastest size is: a sweep costs one reading of the weights until computing its nodes
takes longer, while tokens per sweep grow ever more slowly. From the resident node's runs follows, for each size,

    tokens/s = tokens per sweep / (max(reading, resident sweep) + draft)      reading: a plain offloaded sweep

    python -m benchmarks offload --record
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import tyro
from rich.console import Console
from rich.progress import track

from benchmarks.emulation.swarm import covered
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.acceptance import FIRST_SEED, demo_prompts
from client.base.stats import Stats
from client.library.aio import AsyncSwarm
from client.tools.demo.programs import start_program
from swarm.base.cli import make_console
from swarm.base.library_logging import quiet_libraries
from swarm.demo import DRAFT, TARGET

CHOSEN = -1
"""Stands for trees whose size the client chooses."""
WARM_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure an offloaded node."""

    nodes: tuple[int, ...] = (0, 1, 4, 16, 64, 256, 1_024, 2_048)
    """Tree nodes per sweep (K)."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Of sampling; 0 is greedy."""
    prompts: int = 3
    """How many prompts."""
    new_tokens: int = 32
    """New tokens of each text."""
    mb_per_s: float = 80.0
    """The store's rate; the demo target's layers are 18.9 MB in fp32: 236 ms."""


@dataclass(frozen=True, slots=True)
class Run:
    """One text.

    Attributes:
        nodes: Tree nodes per sweep (K), or `CHOSEN`.
        draft_ms: Median drafting per sweep.
        acceptance_length: Tokens per sweep.
    """

    offloaded: bool
    nodes: int
    temperature: float
    tokens: tuple[int, ...]
    tokens_per_s: float
    sweeps: int
    sweep_ms: float
    draft_ms: float
    mean_nodes: float
    acceptance_length: float
    repairs: int


Cells = dict[tuple[bool, float, int], list[Run]]
"""The texts by whether the node was offloaded, temperature and tree size."""


@asynccontextmanager
async def one_node(folder: Path, extra: Sequence[str]) -> AsyncIterator[AsyncSwarm]:
    """A node with every layer, on loopback, and a client of it."""
    serve = ["node.cli", "serve", str(TARGET), "--layers", "0-12", "--host", "127.0.0.1", "--threads", "1"]
    serve += ["--identity", str(folder / "node.key"), *extra]
    async with start_program("node", serve, folder) as node:
        await node.wait_for("serving at")
        peer = await node.wait_for(r"/ip4/\S+")
        async with AsyncSwarm.connect(TARGET, peers=[peer], draft=DRAFT, threads=1, calibration=None) as swarm:
            await covered(swarm)
            yield swarm


async def measure(options: Options, console: Console) -> list[Run]:
    """Every tree size in turns, prompt after prompt."""
    prompts, runs = demo_prompts(options.prompts), list[Run]()
    for offloaded in (True, False):
        extra = ["--offload", "--offload-mb-per-s", str(options.mb_per_s)] if offloaded else []
        with tempfile.TemporaryDirectory(prefix="canopy-offload-bench-") as temporary:
            async with one_node(Path(temporary), extra) as swarm:
                for temperature in options.temperatures:  # the draft learns whom to believe
                    await swarm.generate(prompts[0], max_new_tokens=WARM_TOKENS, temperature=temperature, seed=1)
                about = "offloaded" if offloaded else "resident"
                for number, prompt in enumerate(track(prompts, about, console=console)):
                    for temperature in options.temperatures:
                        for nodes in (*options.nodes, CHOSEN):
                            swarm.forget_texts()  # another size generated this very text just now
                            result = await swarm.generate(
                                prompt,
                                max_new_tokens=options.new_tokens,
                                temperature=temperature,
                                seed=FIRST_SEED + number,
                                nodes=None if nodes == CHOSEN else nodes,
                            )
                            runs.append(_run(offloaded, nodes, temperature, (result.tokens, result.stats)))
    return runs


def _run(offloaded: bool, nodes: int, temperature: float, made: tuple[tuple[int, ...], Stats]) -> Run:
    tokens, stats = made
    sweeps = stats.sweeps
    return Run(
        offloaded=offloaded,
        nodes=nodes,
        temperature=temperature,
        tokens=tokens,
        tokens_per_s=stats.tokens_per_s,
        sweeps=len(sweeps),
        sweep_ms=median(sweep.total_ms for sweep in sweeps),
        draft_ms=median(sweep.draft_ms for sweep in sweeps),
        mean_nodes=sum(sweep.nodes for sweep in sweeps) / len(sweeps),
        acceptance_length=stats.acceptance_length,
        repairs=len(stats.repairs),
    )


def sheet(runs: Sequence[Run], options: Options) -> Sheet:
    """The table: a line per temperature and tree size; the fastest of each kind is bold."""
    made = Sheet(
        "offload",
        f"Demo pair, one node with all 12 layers on loopback, one thread each; {options.prompts} prompts, "
        f"{options.new_tokens} tokens; layers read at {options.mb_per_s:g} MB/s, or resident",
        ("T", "K", "tokens/sweep", "sweep ms", "draft ms", "tokens/s", "predicted", "resident: sweep ms", "tokens/s"),
        notes=[
            "Bold: the fastest tree size. Chosen: the client chooses before each sweep; in brackets what "
            "it chose on average. Its sweeps overlap, so their times do too.",
            "Predicted: tokens per sweep / (the longer of reading and the resident sweep + draft), resident figures.",
            "The rate limiter stands for a slow store; host memory to a GPU: *On a GPU*.",
        ],
        measured={"runs": [asdict(run) for run in runs]},
    )
    cells: Cells = defaultdict(list)
    for run in runs:
        cells[run.offloaded, run.temperature, run.nodes].append(run)
    for temperature in options.temperatures:
        foreseen = predicted(cells, temperature, options.nodes)
        for nodes in (*options.nodes, CHOSEN):
            here, there = cells[True, temperature, nodes], cells[False, temperature, nodes]
            row = [f"{_mean(here, 'acceptance_length'):.2f}"]
            row += [f"{_mean(here, name):.0f}" for name in ("sweep_ms", "draft_ms")]
            row += [_rate(cells, here), f"{foreseen[nodes]:.2f}" if nodes in foreseen else ""]
            row += [f"{_mean(there, 'sweep_ms'):.0f}", _rate(cells, there)]
            size = f"chosen ({_mean(here, 'mean_nodes'):.0f})" if nodes == CHOSEN else f"{nodes:,}"
            made.rows.append((f"{temperature:g}", size, *row))
        made.notes.append(_peaks(cells, temperature, foreseen))
    same, texts = _same_texts(runs)
    made.notes.append(f"{same} of {texts} texts are those of plain decoding on the resident node.")
    if repairs := sum(run.repairs for run in runs):
        made.notes.append(f"Chains were repaired {repairs} times meanwhile: the machine had too much else to do.")
    return made


def predicted(cells: Cells, temperature: float, sizes: Sequence[int]) -> dict[int, float]:
    """Tokens per second of an offloaded node by tree size, from what reading takes and the resident node's runs."""
    reading_ms = _mean(cells[True, temperature, 0], "sweep_ms")
    found: dict[int, float] = {}
    for nodes in sizes:
        there = cells[False, temperature, nodes]
        each_ms = max(reading_ms, _mean(there, "sweep_ms")) + _mean(there, "draft_ms")
        if there and reading_ms:
            found[nodes] = 1e3 * _mean(there, "acceptance_length") / each_ms
    return found


def _peaks(cells: Cells, temperature: float, foreseen: dict[int, float]) -> str:
    """Where the fastest tree size should be, and where it is."""
    if not foreseen:
        return f"T={temperature:g}: no prediction without K = 0."
    rates = {nodes: _mean(cells[True, temperature, nodes], "tokens_per_s") for nodes in foreseen}
    first, last = min(foreseen), max(foreseen)
    times = [_mean(cells[False, temperature, nodes], "sweep_ms") for nodes in (first, last)]
    return (
        f"T={temperature:g}: reading takes {_mean(cells[True, temperature, 0], 'sweep_ms'):.0f} ms, a node computes "
        f"{(times[1] - times[0]) / max(last - first, 1):.2f} ms; peak predicted at K = "
        f"{max(foreseen, key=foreseen.__getitem__):,}, measured at K = {max(rates, key=rates.__getitem__):,}."
    )


def _mean(runs: Sequence[Run], name: str) -> float:
    return float(sum(getattr(run, name) for run in runs) / len(runs)) if runs else 0.0


def _rate(cells: Cells, runs: list[Run]) -> str:
    """Tokens per second; bold where no other fixed size is faster."""
    if not runs:
        return ""
    rate, first = _mean(runs, "tokens_per_s"), runs[0]
    rivals = [
        _mean(some, "tokens_per_s")
        for (offloaded, temperature, nodes), some in cells.items()
        if (offloaded, temperature) == (first.offloaded, first.temperature) and nodes != CHOSEN
    ]
    return f"**{rate:.2f}**" if first.nodes != CHOSEN and rate >= max(rivals) else f"{rate:.2f}"


def _same_texts(runs: Sequence[Run]) -> tuple[int, int]:
    plain: dict[tuple[float, int], tuple[int, ...]] = {}
    turns: dict[tuple[bool, float, int], int] = defaultdict(int)
    same = 0
    ordered = sorted(runs, key=lambda run: (run.offloaded, run.nodes != 0))
    for run in ordered:
        number = turns[run.offloaded, run.temperature, run.nodes]
        turns[run.offloaded, run.temperature, run.nodes] += 1
        same += plain.setdefault((run.temperature, number), run.tokens) == run.tokens
    return same, len(runs)


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(1)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    quiet_libraries()
    console = make_console()
    runs = asyncio.run(measure(options, console))
    sheet(runs, options).finish(console, options)
