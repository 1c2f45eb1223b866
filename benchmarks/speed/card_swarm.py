"""What are trees worth for a large model on three nodes that share a GPU?

The nodes share the model's layers, over the emulated network. The model has a large one's shape and the demo target's
text (`benchmarks.speed.grown`), so forwards, rows and links are those of a large model, and drafts guess as they do for
the demo pair. Every prompt goes through all methods, in turns. In bfloat16 the last bits depend on how many rows are
computed together, so texts of two methods may differ; the table says how many do.

    python -m benchmarks card_swarm --record          # on a machine with a GPU; as root, for the emulated network
    python -m benchmarks card_swarm --device cpu --shape tiny --dtype float32 --pairs 2
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import tyro
from rich.console import Console

from benchmarks.emulation.client_process import run_part, work
from benchmarks.emulation.network import NetworkKind, NetworkPlan, open_network
from benchmarks.emulation.swarm import ServeOptions, covered, hosted_swarm
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.acceptance import FIRST_SEED, demo_prompts
from benchmarks.simulation.profiles import PROFILES
from benchmarks.speed.decoding_methods import Case, canopy_methods
from benchmarks.speed.grown import SHAPES, device_name, grown_model
from client.library.aio import AsyncSwarm
from client.tools.bench.paired_ratio import median_of, ratios
from client.tools.demo.link_shape import LinkShape
from node.model.loading import DTYPES
from swarm.base.cli import make_console
from swarm.base.library_logging import quiet_libraries
from swarm.demo import DRAFT

NODES = 3
PLAIN = "Canopy, plain"


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure a swarm on one card."""

    shape: str = "8B"
    """Dimensions of the model, by name."""
    device: str = "cuda"
    """Where it runs."""
    dtype: str = "bfloat16"
    """Of the model's weights."""
    networks: tuple[str, ...] = ("1 ms, 1 Gbit/s", "25 ms, 100 Mbit/s")
    """Which networks."""
    trees: tuple[int, ...] = (16, 64)
    """Sizes of fixed trees."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Of sampling; 0 is greedy."""
    codec: str = "lossless"
    """Of hidden rows."""
    pairs: int = 6
    """Prompts that go through all methods."""
    new_tokens: int = 48
    """New tokens of each text."""
    kind: NetworkKind | None = None
    """tun needs root; left out: the best that this machine allows."""
    folder: Path | None = None
    """Of a model that was grown before, or where one is to be."""


@dataclass(frozen=True, slots=True)
class Job:
    """The client's part."""

    model: str
    peer: str
    trees: tuple[int, ...]
    temperatures: tuple[float, ...]
    codec: str
    pairs: int
    new_tokens: int
    result: str


@dataclass(frozen=True, slots=True)
class NetworkRuns:
    kind: str
    runs: list[dict[str, Any]]


async def tell(job: Job) -> list[dict[str, Any]]:
    """Every prompt through all methods, which begin with another one each time."""
    runs = []
    options: dict[str, Any] = {"peers": [job.peer], "draft": DRAFT, "draft_device": "cpu", "threads": 1}
    options |= {"codec": job.codec, "calibration": None}
    async with AsyncSwarm.connect(job.model, **options) as swarm:
        ways = canopy_methods(swarm, job.trees)
        await covered(swarm)
        prompts = [tuple(prompt) for prompt in demo_prompts(job.pairs + 1)]
        for temperature in job.temperatures:
            for way in ways:
                await way.run(Case(prompts[-1], temperature, 1, 16))
        for number, prompt in enumerate(prompts[:-1]):
            for temperature in job.temperatures:
                start = number % len(ways)
                for way in ways[start:] + ways[:start]:
                    run = await way.run(Case(prompt, temperature, FIRST_SEED + number, job.new_tokens))
                    said = f"pair {number}, temperature {temperature:g}, {way.name}: {run.tokens_per_s:.1f} tokens/s"
                    print(said, flush=True)  # noqa: T201
                    runs.append({"pair": number, "way": way.name, "temperature": temperature, **asdict(run)})
    return runs


async def measure(network: str, model: Path, options: Options, console: Console) -> NetworkRuns:
    costs, layers = PROFILES[network], SHAPES[options.shape].num_hidden_layers
    cuts = [round(layers * part / NODES) for part in range(NODES + 1)]
    spans = tuple(f"{start}-{end}" for start, end in itertools.pairwise(cuts))
    served = ServeOptions(model, spans, ("--device", options.device, "--dtype", options.dtype))
    with tempfile.TemporaryDirectory(prefix="canopy-card-") as temporary:
        folder = Path(temporary)
        plan = NetworkPlan(NODES + 2, LinkShape(delay_ms=costs.delay_ms, mbit=costs.mbit))
        async with (
            open_network(plan, options.kind) as net,
            hosted_swarm(net, folder, served) as hosted,
        ):
            console.print(f"{network}: {net.kind} network ({net.reason})")
            job = Job(
                str(model), hosted.peer, options.trees, options.temperatures, options.codec, options.pairs,
                options.new_tokens, str(folder / "result.json"),
            )  # fmt: skip
            return NetworkRuns(
                net.kind, await run_part("benchmarks.speed.card_swarm", asdict(job), net, folder, console)
            )


def sheet(found: dict[str, NetworkRuns], options: Options) -> Sheet:
    name = device_name(options.device)
    made = Sheet(
        "card_swarm",
        f"{options.shape} shape, {options.dtype}, {NODES} nodes on one {name}, codec {options.codec}",
        ("network, way", "T", "tokens/s", "× plain (95 %)", "accept.", "ms/sweep", "same text"),
    )
    for network, one in found.items():
        made.rows.append((f"**{network}**", *[""] * 6))
        keys = dict.fromkeys((run["way"], run["temperature"]) for run in one.runs)
        for way, temperature in sorted(keys, key=lambda key: key[1]):
            runs, plain = (
                sorted(
                    (run for run in one.runs if (run["way"], run["temperature"]) == (which, temperature)),
                    key=lambda run: int(run["pair"]),
                )
                for which in (way, PLAIN)
            )
            sweeps = [ms for run in runs for ms in run["sweep_ms"]]
            same = sum(run["tokens"] == other["tokens"] for run, other in zip(runs, plain, strict=True))
            speeds = [[run["tokens_per_s"] for run in some] for some in (runs, plain)]
            made.rows.append(
                (
                    *(way, f"{temperature:g}", f"{median(speeds[0]):.1f}", str(median_of(ratios(*speeds)))),
                    f"{mean(run['acceptance_length'] for run in runs):.2f}",
                    *(f"{median(sweeps):.1f}" if sweeps else "", f"{same} of {len(runs)}"),
                )
            )
    kinds = " and ".join(dict.fromkeys(one.kind for one in found.values()))
    made.notes.append(
        f"{options.pairs} pairs, prompts of 96 tokens, {options.new_tokens} new ones; medians, acceptance a mean. "
        f"Network: {kinds}. A hidden row is {_row_bytes(options):,} bytes. The draft runs on the CPU."
    )
    made.measured = {"options": asdict(options), "networks": {network: asdict(one) for network, one in found.items()}}
    return made


def _row_bytes(options: Options) -> int:
    width = SHAPES[options.shape].hidden_size
    return width + width // 16 if options.codec == "int8" else width * DTYPES[options.dtype].itemsize


async def run(options: Options, console: Console) -> dict[str, NetworkRuns]:
    """Every network, with one model; the file of measurements is written after each."""
    found: dict[str, NetworkRuns] = {}
    with grown_model(options.folder, options.shape, DTYPES[options.dtype], options.device) as model:
        for network in options.networks:
            found[network] = await measure(network, model, options, console)
            if options.json is not None:
                sheet(found, options).write(options.json)
    return found


def main() -> None:
    """Measure and print; with a job, be the client's part."""
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        work(Job, tell)
        return
    quiet_libraries()
    options = tyro.cli(Options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the nodes would stay on the card
    console = make_console()
    if options.shape not in SHAPES or set(options.networks) - PROFILES.keys():
        sys.exit(f"card_swarm: shapes are {', '.join(SHAPES)}; networks {', '.join(PROFILES)}")
    sheet(asyncio.run(run(options, console)), options).finish(console, options)


if __name__ == "__main__":
    main()
