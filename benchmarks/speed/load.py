"""How fast are 1, 4 and 16 clients on one chain?

Without speculation, with trees of 16 nodes, and with what the controller chooses, in turns; all clients' tokens per
second together. Drafts are recorded ones, so that drafting does not use the nodes' cores.

    sudo python -m benchmarks load --record
"""

from __future__ import annotations

import asyncio
import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from rich.console import Console

from benchmarks.emulation.client_process import run_part
from benchmarks.emulation.network import NetworkKind, NetworkPlan, open_network
from benchmarks.emulation.swarm import SPANS, hosted_swarm
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.profiles import FIRST_SEED
from benchmarks.simulation.recorded import ModelPair, RecordedText, prompts_of, record_trees
from benchmarks.speed.load_client import WAYS, Job
from client.tools.bench.paired_ratio import median_of
from client.tools.demo.link_shape import LinkShape
from swarm.base.cli import make_console
from swarm.base.library_logging import quiet_libraries
from swarm.compute.ragged_batch import load_whole
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Sampling

TREE = 64
"""Nodes of the recorded trees."""
MTU = 9_000
"""Bytes per packet: what the emulator computes for each takes the nodes' cores, as no network does."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure one chain under load."""

    loads: tuple[int, ...] = (1, 4, 16)
    """Numbers of clients, each in turn."""
    rounds: int = 6
    """Rounds of each."""
    warm_s: float = 2.0
    """Seconds before those, which do not count."""
    seconds: float = 5.0
    """Seconds that count."""
    prompts: int = 8
    """How many prompts."""
    new_tokens: int = 64
    """New tokens of each text."""
    delay_ms: float = 10.0
    """One way, on each link."""
    mbit: float = 200.0
    """Rate of each link."""
    kind: NetworkKind | None = None
    """tun needs root; left out: the best that this machine allows."""


def record_texts(options: Options) -> list[RecordedText]:
    """Greedy and sampled texts of passages, in turn, with trees that cost no pass of a model."""
    torch.set_num_threads(1)
    pair = ModelPair(load_whole(TARGET, torch.float32), load_whole(DRAFT, torch.float32), options.new_tokens)
    prompts = prompts_of("passages", options.prompts)
    samplings = [Sampling(FIRST_SEED + place, float(place % 2)) for place in range(len(prompts))]
    made = record_trees(pair, prompts, samplings, TREE)
    free = [{length: replace(tree, rounds=0) for length, tree in text.trees.items()} for text in made]
    return [replace(text, trees=trees) for text, trees in zip(made, free, strict=True)]


async def measure(options: Options, texts: Sequence[RecordedText], console: Console) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="canopy-load-") as temporary:
        folder = Path(temporary)
        (folder / "texts").write_bytes(pickle.dumps(list(texts)))
        shape = LinkShape(delay_ms=options.delay_ms, mbit=options.mbit)
        async with (
            open_network(NetworkPlan(len(SPANS) + 2, shape, mtu=MTU), options.kind) as net,
            hosted_swarm(net, folder) as hosted,
        ):
            times = (options.rounds, options.warm_s, options.seconds)
            job = Job(hosted.peer, str(folder / "texts"), options.loads, *times, str(folder / "result.json"))
            found: list[dict[str, Any]] = await run_part(
                "benchmarks.speed.load_client", asdict(job), net, folder, console
            )
            return found


def sheet(found: Sequence[dict[str, Any]], options: Options) -> Sheet:
    made = Sheet(
        "load",
        f"Aggregate tokens/s of clients on one chain of three nodes, {options.delay_ms:g} ms one way, recorded drafts; "
        f"medians of {options.rounds} rounds of {options.seconds:g} s",
        ("clients", *WAYS, "median K", "chosen / better of the two (95 %)"),
    )
    for load in options.loads:
        speeds = {
            way: [row["tokens_per_s"] for row in found if (row["load"], row["way"]) == (load, way)] for way in WAYS
        }
        medians = {way: median(values) for way, values in speeds.items()}
        *fixed, chosen = WAYS
        better = max(fixed, key=medians.__getitem__)
        parts = median_of([a / b for a, b in zip(speeds[chosen], speeds[better], strict=True)])
        nodes = median(row["nodes"] for row in found if (row["load"], row["way"]) == (load, chosen))
        made.rows.append((str(load), *(f"{medians[way]:.1f}" for way in WAYS), f"{nodes:g}", str(parts)))
    made.notes.append(
        f"{options.prompts} texts of {options.new_tokens} tokens, greedy and at temperature 1 in turn; every text "
        "was the recorded one."
    )
    made.measured = {"runs": list(found)}
    return made


def main() -> None:
    options = tyro.cli(Options)
    quiet_libraries()
    console = make_console()
    found = asyncio.run(measure(options, record_texts(options), console))
    sheet(found, options).finish(console, options)
