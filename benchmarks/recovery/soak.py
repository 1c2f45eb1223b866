"""Does every text stay right while machines are killed again and again?

Real programs on loopback: a bootstrap peer, two replicas of each span, clients in processes of their own. A replica is
ended by kill -9 as soon as the last killed one is listed again, and not sooner than some seconds after the last kill.
It starts again with the same identity, port and layers. A span's last replica is never killed, until the end: then all
replicas of one span die at once, as a case apart.

    python -m benchmarks soak --record
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import tyro
from rich.console import Console
from rich.status import Status

from benchmarks.emulation.process_monitor import slope_per_min
from benchmarks.recovery.kill_plan import KillPlan
from benchmarks.recovery.soak_client import SoakText
from benchmarks.recovery.soak_swarm import ClientLoad, Kill, SoakSwarm, open_soak_swarm
from benchmarks.sheet import Sheet
from swarm.errors import SwarmError
from swarm.runtime.console import make_console
from swarm.runtime.tasks import TaskScope

LOOK_S = 2.0
SPARED_FROM, MEASURED_FROM = 0.2, 0.7
"""Parts of the time: when one replica of each span begins to be spared, and when its memory's slope begins to count.

In ten minutes it is five minutes old by then. A program grows in its first minutes, as caches and connections fill.
"""
MOST_MB_PER_MIN = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """Kill the machines of a swarm that clients use."""

    minutes: float = 10.0
    """How long machines are killed."""
    seed: int = 0
    """Of the choice of replicas to kill."""
    clients: int = 4
    """How many clients."""
    texts: int = 4
    """Per client: prompts, of which every second is sampled at temperature 1 and the others are greedy."""
    new_tokens: int = 96
    """New tokens of each text."""
    nodes: int = 8
    """Tree nodes per sweep (K)."""
    between_s: float = 15.0
    """Least time from one kill to the next."""
    record: bool = False
    """Write the table into docs/benchmarks and the measurements beside it."""
    json: Path | None = None
    """Write the measurements into this file."""


@dataclass(frozen=True, slots=True)
class SoakResult:
    """What came of a soak.

    Attributes:
        texts: All texts of all clients.
        kills: The kills of single nodes.
        apart: The kills of a whole span at the end.
        apart_at: Time of day of those.
        slopes: Growth of memory in MB per minute, of programs that are not killed any more.
        memory: (seconds, bytes) of each program over time.
        programs: Programs started.
        wrong: What went wrong with programs.
    """

    texts: Sequence[SoakText]
    kills: Sequence[Kill]
    apart: Sequence[Kill]
    apart_at: float
    slopes: dict[str, float]
    memory: dict[str, list[tuple[float, float]]]
    programs: int
    wrong: Sequence[str]

    def soaked(self) -> list[SoakText]:
        """The texts that ended before the case apart."""
        return [one for one in self.texts if not one.is_reference and one.ended_at <= self.apart_at]

    def waited(self) -> list[SoakText]:
        """The texts in work when a whole span died."""
        return [one for one in self.texts if one.started_at <= self.apart_at < one.ended_at]

    def faults(self) -> list[str]:
        """All that is wrong; a text begun while nobody had its layers may have been refused."""
        later = [one for one in self.texts if one.started_at > self.apart_at and one.error is None]
        wrong = [one for one in [*self.soaked(), *self.waited(), *later] if not one.is_same]
        texts = [f"text {one.case} at {one.started_at:.0f}: {one.error or 'other tokens'}" for one in wrong]
        grown = [
            f"memory of {name} grows by {slope:.2f} MB/min"
            for name, slope in self.slopes.items()
            if slope > MOST_MB_PER_MIN
        ]
        return [*self.wrong, *texts, *grown]


async def soak(options: Options, console: Console) -> SoakResult:
    """The whole run.

    Raises:
        SwarmError: a program did not start, or was not listed in time.
    """
    work = ClientLoad(options.clients, options.texts, options.new_tokens, options.nodes)
    length_s = options.minutes * 60
    with tempfile.TemporaryDirectory(prefix="canopy-soak-") as temporary, console.status("starting …") as status:
        async with open_soak_swarm(Path(temporary), work) as stage, TaskScope() as scope:
            watching = scope.spawn(_watch(stage, status))
            victims = KillPlan({name: name.split()[-1] for name in stage.replicas}, options.seed)
            survivors = await _kill(stage, victims, options, console)
            count, apart_at = len(stage.kills), time.time()
            memory = {name: list(stage.watch.memory[name]) for name in ("bootstrap", *stage.clients, *survivors)}
            await stage.kill(victims.span())
            await stage.wait_for_texts(time.time())
            watching.cancel()
            await stage.end()
            texts = [one for some in stage.texts() for one in some]
        await stage.gone(["bootstrap"])
    later = {name: [one for one in some if one[0] >= MEASURED_FROM * length_s] for name, some in memory.items()}
    slopes = {name: slope_per_min(some) for name, some in later.items()}
    kills, apart = stage.kills[:count], stage.kills[count:]
    return SoakResult(texts, kills, apart, apart_at, slopes, memory, len(stage.over), stage.wrong)


async def _watch(stage: SoakSwarm, status: Status) -> None:
    """Look at all programs until cancelled."""
    while True:
        stage.look()
        status.update(_line(stage))
        await asyncio.sleep(LOOK_S)


async def _kill(stage: SoakSwarm, victims: KillPlan, options: Options, console: Console) -> tuple[str, ...]:
    """Kill one replica after the other until the time is over; the runs that were spared."""
    survivors: tuple[str, ...] = ()
    length_s = options.minutes * 60
    while (at_s := stage.elapsed_s) < length_s:
        if at_s >= SPARED_FROM * length_s and not survivors:
            survivors = tuple(stage.replicas[name].life for name in victims.spare())
        await stage.kill([victims.next(frozenset(stage.replicas))])
        if not console.is_terminal:
            console.print(_line(stage), soft_wrap=True)
        await asyncio.sleep(max(0.0, at_s + options.between_s - stage.elapsed_s))
    return survivors


def _line(stage: SoakSwarm) -> str:
    """What happened so far."""
    texts = [one for some in stage.texts() for one in some if not one.is_reference]
    bad = sum(not one.is_same for one in texts)
    pause_s = max((one.pause_s for one in texts), default=0.0)
    said = f"{stage.elapsed_s:.0f} s: {len(stage.kills)} kills, {len(texts)} texts, {bad} wrong or lost"
    return f"{said}, longest pause {pause_s:.2f} s"


def sheet(found: SoakResult, options: Options) -> Sheet:
    """The table."""
    return Sheet(
        "soak",
        f"{options.minutes:g} minutes, 6 nodes (2 holders per layer) and {options.clients} clients on loopback; K = "
        f"{options.nodes}, {options.new_tokens} tokens a text, greedy and temperature 1; seed {options.seed}",
        ("what", "measured", "asked for"),
        [*_chains(found), *_processes(found), *_apart(found)],
        [
            "Memory: anonymous memory of a program and its descendants, every 2 s, least squares over the last 30 % of "
            "the time; nodes are those of each span that nobody killed any more after the first 20 %."
        ],
        {
            "options": {"minutes": options.minutes, "seed": options.seed, "clients": options.clients},
            "faults": found.faults(),
            "deaths": [asdict(one) for one in found.kills],
            "apart": [asdict(one) for one in found.apart],
            "texts": [asdict(one) for one in found.texts],
            "slopes_mb_per_min": found.slopes,
            "memory_mb": found.memory,
        },
    )


def _chains(found: SoakResult) -> list[tuple[str, str, str]]:
    soaked = found.soaked()
    repaired = [one for one in soaked if one.repairs]
    pauses = sorted(one.pause_s for one in repaired) or [0.0]
    listed = [one.listed_s for one in found.kills]
    middle, most = median(pauses), pauses[int(0.95 * (len(pauses) - 1))]
    return [
        ("kills (kill -9)", str(len(found.kills)), ""),
        ("from a kill to listed again: median (longest)", f"{median(listed):.1f} ({max(listed):.1f}) s", ""),
        ("texts (tokens)", f"{len(soaked)} ({sum(one.tokens for one in soaked)})", ""),
        ("texts with a lost or wrong token", str(_bad(soaked)), "0"),
        ("texts whose chain was repaired (repairs)", f"{len(repaired)} ({sum(one.repairs for one in repaired)})", ""),
        ("their longest pauses: median (95 %, longest)", f"{middle:.2f} ({most:.2f}, {pauses[-1]:.2f}) s", ""),
    ]


def _processes(found: SoakResult) -> list[tuple[str, str, str]]:
    left_over = sum(one.startswith("left over") for one in found.wrong)
    rows = [("programs started; processes left over", f"{found.programs}; {left_over}", "0 left over")]
    for kind, name in (("surviving nodes", "life"), ("clients", "client"), ("the bootstrap peer", "bootstrap")):
        slopes = " · ".join(f"{slope:.2f}" for one, slope in found.slopes.items() if name in one)
        rows.append((f"memory of {kind}, MB/min", slopes, f"≤ {MOST_MB_PER_MIN:g} each"))
    return rows


def _apart(found: SoakResult) -> list[tuple[str, str, str]]:
    waited, span = found.waited(), found.apart[0].name.split()[-1]
    pause_s = max((one.pause_s for one in waited), default=0.0)
    return [
        (
            f"apart: all holders of {span} killed at once, listed again after",
            f"{max(one.listed_s for one in found.apart):.1f} s",
            "",
        ),
        (
            "… texts in work then; lost or wrong; longest pause",
            f"{len(waited)}; {_bad(waited)}; {pause_s:.1f} s",
            "0 lost or wrong",
        ),
    ]


def _bad(texts: Sequence[SoakText]) -> int:
    return sum(not one.is_same for one in texts)


def main() -> None:
    """Soak, print, and say by the exit status whether all went well."""
    options = tyro.cli(Options)
    torch.set_num_threads(1)
    console = make_console()
    try:
        found = asyncio.run(soak(options, console))
    except SwarmError as error:
        sys.exit(f"soak: {error}")
    sheet(found, options).finish(console, record=options.record, path=options.json)
    for fault in found.faults():
        console.print(f"WRONG: {fault}", markup=False, highlight=False)
    sys.exit(bool(found.faults()))


if __name__ == "__main__":
    main()
