"""What does a hop cost beyond its forward?

Three nodes on loopback, without delay, against the same forwards timed bare. Trees of several sizes are measured in
turns, and the bare parts between them. What is left over is divided by the hops and set beside what the nodes report.

    python -m benchmarks hop --record
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import tyro
from rich.console import Console
from rich.progress import track

from benchmarks.emulation.swarm import SPANS, covered, local_swarm
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.acceptance import demo_prompts
from benchmarks.speed.bare import PAUSE_S, BareTimer, BareTimes
from client.base.stats import SweepMeasurement
from client.library.aio import AsyncSwarm
from client.tools.demo.link_shape import LinkShape
from swarm.base.cli import make_console
from swarm.base.layers import Span
from swarm.base.library_logging import quiet_libraries
from swarm.demo import DRAFT, TARGET

LOOPBACK = LinkShape()
BARE_REPEATS = 10


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure the overhead of a hop."""

    nodes: tuple[int, ...] = (0, 16, 64)
    """Tree nodes per sweep (K)."""
    rounds: int = 12
    """Rounds of each."""
    new_tokens: int = 48
    """New tokens of each text."""


async def measure(options: Options, console: Console) -> tuple[dict[int, list[SweepMeasurement]], dict[int, BareTimes]]:
    """Sweeps by tree size, and the bare parts of each size."""
    rig = BareTimer([Span.parse(span) for span in SPANS])
    rig.load()
    rig.teach([0.0])
    sweeps: dict[int, list[SweepMeasurement]] = defaultdict(list)
    prompts = demo_prompts(options.rounds)
    with tempfile.TemporaryDirectory(prefix="canopy-hop-") as temporary:
        async with local_swarm(Path(temporary)) as (peer, nodes):
            await asyncio.gather(*(node.wait_for("serving at") for node in nodes))
            async with AsyncSwarm.connect(TARGET, peers=[peer], draft=DRAFT, threads=1, calibration=None) as swarm:
                await covered(swarm)
                await swarm.generate(prompts[0], max_new_tokens=8, nodes=max(options.nodes))
                for prompt in track(prompts, "rounds", console=console):
                    for size in options.nodes:
                        result = await swarm.generate(prompt, max_new_tokens=options.new_tokens, nodes=size)
                        sweeps[size] += [sweep for sweep in result.stats.sweeps if sweep.nodes == size]
                        rig.sample(size, 0.0, BARE_REPEATS)
    return sweeps, {size: rig.result(size, 0.0) for size in options.nodes}


def sheet(sweeps: dict[int, list[SweepMeasurement]], bare: dict[int, BareTimes], options: Options) -> Sheet:
    made = Sheet(
        "hop",
        f"Three nodes on loopback, no delay, one thread each; medians of {options.rounds} rounds, ms",
        (
            *("K", "sweep", "bare compute", "bare draft", "over, per hop", "draft beyond bare", "forward beyond bare"),
            *("of it by a pause", "queue", "messages", "links and the rest"),
        ),
        notes=[
            "The columns after “over” say where it is, by the programs' own clocks, divided by the hops. By a pause: "
            f"how much longer the same bare forwards take after {PAUSE_S * 1e3:.0f} ms in which the machine did "
            "nothing, as on hops."
        ],
        measured={
            "bare": [asdict(one) for one in bare.values()],
            "sweeps": {size: [asdict(sweep) for sweep in some] for size, some in sweeps.items()},
        },
    )
    hops = len(SPANS)
    for size, some in sweeps.items():
        known = bare[size]
        whole = median(sweep.draft_ms + sweep.total_ms for sweep in some)
        over = (whole - known.floor_ms(LOOPBACK)) / hops
        queue, messages = (_per_hop(some, name) for name in ("queue_ms", "other_ms"))
        beyond = _per_hop(some, "compute_ms") - known.compute_ms / hops
        draft = (median(sweep.draft_ms for sweep in some) - known.draft_ms) / hops
        rest = over - draft - beyond - queue - messages
        pause = (known.rested_ms - known.compute_ms) / hops
        cells = (whole, known.compute_ms, known.draft_ms, over, draft, beyond, pause, queue, messages, rest)
        made.rows.append((str(size), *(f"{cell:.2f}" for cell in cells)))
    return made


def _per_hop(sweeps: Sequence[SweepMeasurement], name: str) -> float:
    return float(median(sum(getattr(hop, name) for hop in sweep.hops) for sweep in sweeps)) / len(SPANS)


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(1)
    quiet_libraries()
    console = make_console()
    found = asyncio.run(measure(options, console))
    sheet(*found, options).finish(console, options)
