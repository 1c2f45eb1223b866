"""How fast are plain decoding, trees, a star and one machine over wide-area networks?

Every program runs on a host of its own of an emulated network. Per profile and pair, one prompt goes through every
method, in turns; the parts of a sweep's floor are timed bare between the pairs. Ratios are medians over pairs with 95 %
intervals.

    sudo python -m benchmarks wide_area --record
    sudo python -m benchmarks wide_area --own-layers --record
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import tyro
from rich.console import Console

from benchmarks.emulation.client_process import read, run_part, work
from benchmarks.emulation.network import NetworkKind, NetworkPlan, open_network
from benchmarks.emulation.network_check import check
from benchmarks.emulation.swarm import SPANS, covered, hosted_swarm
from benchmarks.sheet import RESULTS, Recording, Sheet
from benchmarks.simulation.acceptance import demo_prompts
from benchmarks.speed import own_layers
from benchmarks.speed.bare import BareTimer, BareTimes
from benchmarks.speed.decoding_methods import TREES, Case, Method, canopy_methods, one_machine_methods, star_methods
from benchmarks.speed.star import open_star
from client.library.aio import AsyncSwarm
from client.tools.bench.paired_ratio import Median, median_of, ratios
from client.tools.demo.link_shape import LinkShape
from swarm.base.cli import make_console
from swarm.base.errors import ConfigError
from swarm.base.layers import Span
from swarm.demo import DRAFT, TARGET

FIRST_SEED = 11
BARE_REPEATS = 8


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure.

    Attributes:
        star: Addresses of star servers; none if they are not compared.
        one_machine: Whether one machine with the whole model is measured too.
    """

    peer: str
    spans: tuple[str, ...]
    star: tuple[str, ...]
    one_machine: bool
    temperatures: tuple[float, ...]
    pairs: int
    new_tokens: int
    result: str


async def run_all(job: Job) -> dict[str, Any]:
    """All runs of every method, interleaved, and the bare parts of a sweep, timed between them."""
    rig = BareTimer([Span.parse(span) for span in job.spans])
    rig.load()
    rig.teach(job.temperatures)
    runs: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        connecting = AsyncSwarm.connect(TARGET, peers=[job.peer], draft=DRAFT, threads=1, calibration=None)
        swarm = await stack.enter_async_context(connecting)
        ways = canopy_methods(swarm)
        if job.star:
            ways += star_methods(await stack.enter_async_context(open_star(job.star)))
        ways += one_machine_methods() if job.one_machine else []
        await covered(swarm)
        prompts = [tuple(prompt) for prompt in demo_prompts(job.pairs)]
        for way in ways:
            await way.run(Case(prompts[0], 0.0, 1, 8))
        for number in range(job.pairs):
            prompt = prompts[number % len(prompts)]
            for temperature in job.temperatures:
                case = Case(prompt, temperature, FIRST_SEED + number, job.new_tokens)
                runs += [run async for run in _round(ways, case, number)]
                for nodes in (0, *TREES):
                    rig.sample(nodes, temperature, BARE_REPEATS)
    bare = [asdict(rig.result(nodes, temperature)) for nodes in (0, *TREES) for temperature in job.temperatures]
    return {"runs": runs, "bare": bare}


async def _round(ways: list[Method], case: Case, number: int) -> Any:  # noqa: ANN401
    """One case through every method, beginning with another one each time."""
    able = [way for way in ways if way.sampled or case.temperature == 0]
    start = number % len(able)
    for way in able[start:] + able[:start]:
        run = await way.run(case)
        said = f"pair {number}, temperature {case.temperature:g}, {way.name}: {run.tokens_per_s:.1f} tokens/s"
        print(said, flush=True)  # noqa: T201
        yield {"pair": number, "way": way.name, "nodes": way.nodes, "temperature": case.temperature, **asdict(run)}


PLAIN = "Canopy, plain"
COLUMNS = (
    "network, way", "T", "tokens/s", "× plain (95 %)", "accept.", "ms/sweep", "floor", "× floor", "over, ms/hop",
    "same text",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of network, and how much is measured on it."""

    shape: LinkShape
    new_tokens: int
    star: bool = True


PROFILES = {
    "1 ms, 1 Gbit/s": Profile(LinkShape(delay_ms=1, mbit=1_000), 40),
    "25 ms, 100 Mbit/s": Profile(LinkShape(delay_ms=25, mbit=100), 40),
    "100 ms, 100 Mbit/s": Profile(LinkShape(delay_ms=100, mbit=100), 32, star=False),
    "30 ms, 1 Mbit/s": Profile(LinkShape(delay_ms=30, mbit=1), 32, star=False),
    "22 … 28 ms, 20 Mbit/s, 0.2 % loss": Profile(LinkShape(22, 20, jitter_ms=6, loss=0.002), 32, star=False),
}


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure the wide-area table."""

    profiles: tuple[str, ...] = tuple(PROFILES)
    """Which networks, by name."""
    pairs: int = 10
    """Prompts that go through all methods."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Of sampling; 0 is greedy."""
    own_layers: bool = False
    """Measure what layers on own machines near by change, in place of all else."""
    kind: NetworkKind | None = None
    """tun needs root; left out: the best that this machine allows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Attributes:
        acceptance_length: Mean tokens per sweep.
        ms_per_hop: What a sweep takes beyond its floor, per hop.
        same_text: All texts are plain decoding's; None where that is not asked.
    """

    profile: str
    way: str
    temperature: float
    tokens_per_s: float
    acceptance_length: float | None
    sweep_ms: float | None
    floor_ms: float | None
    over_floor: float | None
    ms_per_hop: float | None
    against_plain: Median
    same_text: bool | None


async def measure(name: str, options: Options, console: Console) -> tuple[list[Row], dict[str, Any]]:
    profile = PROFILES[name]
    with tempfile.TemporaryDirectory(prefix="canopy-wide-") as temporary:
        folder = Path(temporary)
        async with open_network(NetworkPlan(len(SPANS) + 2, profile.shape), options.kind) as net:
            checked = await check(net, ((0, 1),))
            console.print(f"{name}: {net.kind} network ({net.reason}); one-way delays measured: {_delays(checked)} ms")
            async with hosted_swarm(net, folder, star=profile.star and net.kind is NetworkKind.TUN) as hosted:
                job = Job(
                    peer=hosted.peer,
                    spans=SPANS,
                    star=hosted.star,
                    one_machine=True,
                    temperatures=options.temperatures,
                    pairs=options.pairs,
                    new_tokens=profile.new_tokens,
                    result=str(folder / "result.json"),
                )
                found = await run_part("benchmarks.speed.wide_area", asdict(job), net, folder, console)
            lost = asdict(await net.load()) if hasattr(net, "load") else {}
    found |= {"profile": asdict(profile), "network": [asdict(value) for value in checked], "load": lost}
    return lines(name, found), found


def lines(name: str, found: dict[str, Any]) -> list[Row]:
    shape = LinkShape(**found["profile"]["shape"])
    bare = {
        (one.nodes, one.temperature): one
        for one in (BareTimes(**{**words, "message_bytes": tuple(words["message_bytes"])}) for words in found["bare"])
    }
    keys = dict.fromkeys((run["way"], run["temperature"]) for run in found["runs"])
    made = []
    for way, temperature in sorted(keys, key=lambda key: key[1]):
        runs, plain = (
            [run for run in found["runs"] if run["way"] == which and run["temperature"] == temperature]
            for which in (way, PLAIN)
        )
        nodes = runs[0]["nodes"]
        known = bare.get((nodes, temperature)) if nodes is not None else None
        made.append(_line(_named(name, way, temperature), runs, plain, (known, shape)))
    return made


def _named(profile: str, way: str, temperature: float) -> Row:
    """A row that has only its name yet."""
    return Row(profile, way, temperature, 0, None, None, None, None, None, Median(1.0, None, None), None)


def _line(
    named: Row,
    runs: Sequence[dict[str, Any]],
    plain: Sequence[dict[str, Any]],
    ground: tuple[BareTimes | None, LinkShape],
) -> Row:
    known, shape = ground
    sweeps = [ms for run in runs for ms in run["sweep_ms"]]
    accepted = [run["acceptance_length"] for run in runs if run["acceptance_length"] is not None]
    sweep_ms = median(sweeps) if sweeps else None
    floor_ms = known.floor_ms(shape) if known is not None else None
    over = sweep_ms - floor_ms if sweep_ms is not None and floor_ms is not None else None
    own_law = named.temperature == 0 or named.way.startswith("Canopy")
    return replace(
        named,
        tokens_per_s=median(run["tokens_per_s"] for run in runs),
        acceptance_length=mean(accepted) if accepted else None,
        sweep_ms=sweep_ms,
        floor_ms=floor_ms,
        over_floor=sweep_ms / floor_ms if sweep_ms is not None and floor_ms is not None else None,
        ms_per_hop=over / len(SPANS) if over is not None else None,
        against_plain=median_of(ratios([r["tokens_per_s"] for r in runs], [r["tokens_per_s"] for r in plain])),
        same_text=all(r["tokens"] == p["tokens"] for r, p in zip(runs, plain, strict=True)) if own_law else None,
    )


def sheet(found: Sequence[Row], measured: dict[str, Any], options: Options) -> Sheet:
    made = Sheet(
        "wide_area",
        f"Demo pair, 3 nodes with one thread each, fp32, prompts of 96 tokens; medians of {options.pairs} pairs",
        COLUMNS,
        measured=measured,
    )
    profile = ""
    for line in found:
        if line.profile != profile:
            profile = line.profile
            made.rows.append((f"**{profile}**", *[""] * 9))
        made.rows.append(
            (
                line.way,
                f"{line.temperature:g}",
                f"{line.tokens_per_s:.1f}",
                str(line.against_plain),
                *(_shown(line.acceptance_length, ".2f"), _shown(line.sweep_ms, ".1f"), _shown(line.floor_ms, ".1f")),
                *(_shown(line.over_floor, ".3f"), _shown(line.ms_per_hop, ".1f")),
                {None: "", True: "yes", False: "NO"}[line.same_text],
            )
        )
    return made


def _shown(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)


def _delays(checked: Sequence[Any]) -> str:
    return ", ".join(f"{value.measured:.2f}" for value in checked if value.unit == "ms")


async def run(options: Options, console: Console) -> Sheet:
    unknown = set(options.profiles) - PROFILES.keys()
    if unknown:
        raise ConfigError(f"no profile {sorted(unknown)[0]!r}; there are {', '.join(PROFILES)}")
    measured = _recorded() if options.record else {}
    for name in options.profiles:
        some, measured[name] = await measure(name, options, console)
        sheet(some, {}, options).show(console)
    ordered = {name: measured[name] for name in PROFILES if name in measured}
    found = [line for name, raw in ordered.items() for line in lines(name, raw)]
    return sheet(found, {"profiles": ordered, "lines": [asdict(line) for line in found]}, options)


def _recorded() -> dict[str, Any]:
    """The profiles that were measured and recorded before; what is measured now takes their place."""
    path = RESULTS / "wide_area.json"
    recorded: dict[str, Any] = read(str(path))["profiles"] if path.exists() else {}
    return recorded


def main() -> None:
    """Measure, print, and fail if a text differs where it must not; with a job, be the client's part."""
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        work(Job, run_all)
        return
    options = tyro.cli(Options)
    console = make_console()
    if options.own_layers:
        with tempfile.TemporaryDirectory(prefix="canopy-own-") as folder:
            runs = asyncio.run(own_layers.measure(options.pairs, options.kind, Path(folder), console))
        own_layers.sheet(runs, options.pairs).finish(console, options)
        return
    made = asyncio.run(run(options, console))
    made.finish(console, options)
    if any(row[-1] == "NO" for row in made.rows):
        sys.exit("wide_area: a text differs from plain decoding's")


if __name__ == "__main__":
    main()
