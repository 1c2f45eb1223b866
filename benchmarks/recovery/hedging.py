"""What does a second replica bring where one of the two stutters?

Real programs on hosts of an emulated network: three spans, and a second replica of the middle one, some of whose
forwards wait for a while. The same prompts go over the steady replica, over the stuttering one, and over both, in
turns.

    sudo python -m benchmarks hedging --record
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from rich.console import Console

from benchmarks.emulation.client_process import run_part
from benchmarks.emulation.network import NetworkKind, NetworkPlan, open_network
from benchmarks.emulation.swarm import SPANS, hosted_swarm
from benchmarks.recovery.fault_plan import percentile
from benchmarks.recovery.hedging_client import Job
from benchmarks.sheet import Recording, Sheet
from client.bench.paired_ratio import median_of, ratios
from client.demo.link_shape import LinkShape
from client.demo.programs import start_program
from swarm.demo import TARGET
from swarm.runtime.cli import make_console

MIDDLE = 1
STUTTERER, CLIENT = len(SPANS) + 1, len(SPANS) + 2
STUTTERING, HEDGED = "stuttering holder", "both, hedged"


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure hedging."""

    rounds: int = 12
    """Texts over each route."""
    new_tokens: int = 96
    """New tokens of each text."""
    nodes: int = 0
    """Tree nodes per sweep (K); 0, plain decoding, has the most sweeps."""
    chance: float = 0.05
    """Probability that a forward of the stuttering replica waits."""
    stall_ms: float = 250.0
    """How long such a forward waits."""
    delay_ms: float = 10.0
    """One way, on each link."""
    kind: NetworkKind | None = None
    """tun needs root; left out: the best that this machine allows."""


async def measure(options: Options, console: Console) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """The kind of network, and runs by route."""
    with tempfile.TemporaryDirectory(prefix="canopy-hedging-") as temporary:
        folder = Path(temporary)
        plan = NetworkPlan(CLIENT + 1, LinkShape(delay_ms=options.delay_ms, mbit=100))
        async with open_network(plan, options.kind) as net, hosted_swarm(net, folder) as hosted:
            console.print(f"{net.kind} network ({net.reason})")
            span = SPANS[MIDDLE]
            serve = ["benchmarks.recovery.stuttering_node", str(options.chance), str(options.stall_ms / 1e3), "serve"]
            serve += [str(TARGET), "--layers", span, "--join", hosted.peer, "--threads", "1"]
            serve += ["--identity", str(folder / "second.key"), *net.node_options(STUTTERER)]
            async with start_program("second", serve, folder, net.command(STUTTERER, [])) as second:
                job = Job(
                    peer=hosted.peer,
                    steady=(await hosted.nodes[MIDDLE].wait_for(r"serving at \S+ as \S+")).split()[-1],
                    stuttering=(await second.wait_for(r"serving at \S+ as \S+")).split()[-1],
                    rounds=options.rounds,
                    new_tokens=options.new_tokens,
                    nodes=options.nodes,
                    result=str(folder / "result.json"),
                )
                return str(net.kind), await run_part(
                    "benchmarks.recovery.hedging_client", asdict(job), net, folder, console
                )


def sheet(found: dict[str, list[dict[str, Any]]], options: Options, network: str) -> Sheet:
    made = Sheet(
        "hedging",
        f"Three hops, {options.delay_ms:g} ms one way ({network}), K = {options.nodes}. Of the middle one's two "
        f"holders one is steady, the other waits {options.stall_ms:g} ms before {options.chance:.0%} of its forwards",
        ("over", "sweeps", "median, ms", "p90", "p99", "worst", "p99 against the stuttering one", "tokens/s"),
        notes=[
            "A sweep's time is the client's, its draft included. The ratio is taken per text: paired median and its "
            f"95 % interval over {options.rounds} rounds, each through all three ways in turns."
        ],
        measured={"options": {"chance": options.chance, "stall_ms": options.stall_ms}, "runs": found},
    )
    theirs = [percentile(run["sweep_ms"], 0.99) for run in found[STUTTERING]]
    for name, runs in found.items():
        sweeps = [ms for run in runs for ms in run["sweep_ms"]]
        cells = [f"{value:.0f}" for value in (median(sweeps), percentile(sweeps, 0.9), percentile(sweeps, 0.99))]
        against = median_of(ratios([percentile(run["sweep_ms"], 0.99) for run in runs], theirs))
        speed = median(run["tokens_per_s"] for run in runs)
        last = ("1" if name == STUTTERING else str(against), f"{speed:.1f}")
        made.rows.append((name, str(len(sweeps)), *cells, f"{max(sweeps):.0f}", *last))
    repairs = sum(run["repairs"] for run in found[HEDGED])
    differences = sum(len(run["differences"]) for run in found[HEDGED])
    made.notes.append(f"Hedged: {repairs} changes of route, {differences} differences between the two reported.")
    return made


def _texts(runs: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [run["tokens"] for run in runs]


def main() -> None:
    """Measure, print, and fail if a text differs."""
    options = tyro.cli(Options)
    console = make_console()
    network, found = asyncio.run(measure(options, console))
    sheet(found, options, network).finish(console, options)
    if any(_texts(runs) != _texts(found[STUTTERING]) for runs in found.values()):
        sys.exit("hedging: the texts differ")
