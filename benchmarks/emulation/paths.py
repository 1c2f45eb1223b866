"""What does each path to a machine at home cost, against TCP to a public one?

Every path is measured in turns with direct TCP in plain text, over links of the same shape: connecting, 8 KiB at once
and later, 512 KiB, and a bulk transfer. Both ends are made of the parts of nodes and clients, without a model.

    sudo python -m benchmarks paths --record
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import tyro
from rich.console import Console

from benchmarks.emulation.home_router import RouterKind
from benchmarks.emulation.homes import Home, HomesNetwork, HomesPlan, obstacle
from benchmarks.emulation.homes_paths import HomesPath
from benchmarks.emulation.json_program import JsonProgram, json_program
from benchmarks.sheet import Sheet
from client.demo.link_shape import LinkShape
from swarm.errors import SwarmError
from swarm.runtime.console import make_console

HOMES: Final = (
    Home("open", RouterKind.OPEN),
    Home("cone", machines=2),
    Home("cone two"),
    Home("symmetric", RouterKind.SYMMETRIC),
    Home("symmetric two", RouterKind.SYMMETRIC),
    Home("mapping", maps_ports=True),
)
PLAIN, PLAIN_LAN = "TCP, plain text", "TCP in a home, plain text"
BOUND: Final = 0.05
"""A path may be off by this share of direct TCP, and the relay's leg."""


@dataclass(frozen=True, slots=True)
class MeasuredPath:
    """One row.

    Attributes:
        name: for a person.
        near: who dials.
        far: whom.
        path: what must come about; None for plain TCP.
        base: the row with which it is compared.
    """

    name: str
    near: str
    far: str
    path: HomesPath | None = None
    base: str = PLAIN

    @property
    def legs(self) -> int:
        """How often it crosses the Internet more than its base does."""
        return 1 if self.path is HomesPath.RELAYED else 0


ROWS: Final = (
    MeasuredPath(PLAIN, "C", "open"),
    MeasuredPath("direct", "C", "open", HomesPath.DIRECT),
    MeasuredPath("mapped", "C", "mapping", HomesPath.MAPPED),
    MeasuredPath("called back", "C", "symmetric", HomesPath.CALLED_BACK),
    MeasuredPath("punched", "cone two", "cone", HomesPath.PUNCHED),
    MeasuredPath("relayed", "symmetric two", "symmetric", HomesPath.RELAYED),
    MeasuredPath(PLAIN_LAN, "cone.2", "cone", base=PLAIN_LAN),
    MeasuredPath("LAN", "cone.2", "cone", HomesPath.LAN, PLAIN_LAN),
)
VALUES: Final = ("connected_ms", "small_cold_ms", "small_warm_ms", "large_ms", "mbit_per_s")


@dataclass(frozen=True, slots=True)
class Options:
    """Measure each path to a machine at home."""

    rounds: int = 5
    """New connections on each path, in turns."""
    seconds: float = 4.0
    """Of each bulk transfer."""
    delay_ms: float = 25.0
    """One way, between any two homes."""
    mbit: float = 100.0
    """Of each home's connection, each way."""
    congestion: str = "cubic"
    """Congestion control of every machine."""
    only: tuple[str, ...] = ()
    """Only these rows, and those with which they are compared."""
    record: bool = False
    """Write the table into docs/benchmarks and the measurements beside it."""
    json: Path | None = None
    """Write the measurements into this file."""


@dataclass(slots=True)
class PathTimes:
    """What was measured on one path, a value per round.

    Attributes:
        values: by name, as `benchmarks.emulation.path_flow.FlowTimes` has them.
        paths: as the dialler says it.
    """

    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in VALUES})
    paths: list[str] = field(default_factory=list)

    def add(self, told: dict[str, Any]) -> None:
        """Take in a round."""
        for name, values in self.values.items():
            values.append(told[name])
        self.paths.append(told["path"])

    def median(self, name: str) -> float:
        """Over the rounds."""
        return median(self.values[name])


class PathsBench:
    """The programs, by the machines that they run on."""

    def __init__(self, world: HomesNetwork, relay: str) -> None:
        self._world = world
        self._relay = relay
        self._machines: dict[str, dict[str, Any]] = {}
        self._diallers: dict[str, JsonProgram] = {}

    async def start(self, rows: Sequence[MeasuredPath], folder: Path, stack: AsyncExitStack) -> None:
        """Start whoever serves and whoever dials."""
        module, world = "benchmarks.emulation.path_ends", self._world
        for name in sorted({row.far for row in rows}):
            words = [module, "machine", self._relay, *(["map"] if name == "mapping" else [])]
            program = await stack.enter_async_context(json_program(name, words, folder, world.command(name, [])))
            self._machines[name] = await program.hear("ready")
        for name in sorted({row.near for row in rows}):
            words = [module, "dialler", *([world.address(name)] if name == "C" else [])]
            running = json_program(f"{name} dials", words, folder, world.command(name, []))
            self._diallers[name] = await stack.enter_async_context(running)
            await self._diallers[name].hear("ready")

    async def measure(self, row: MeasuredPath, seconds: float) -> dict[str, Any]:
        """A new connection on a path.

        Raises:
            SwarmError: a program has ended, or the connection took another path.
        """
        far = self._machines[row.far]
        job: dict[str, Any] = {"seconds": seconds}
        match row.path:
            case None:
                job["plain"] = f"{self._world.address(row.far)}:{far['plain_port']}"
            case HomesPath.DIRECT:
                job["address"] = f"{self._world.address(row.far)}:{far['port']}"
            case HomesPath.MAPPED:
                job["address"] = far["mapped"]
            case _:
                job["address"] = f"{far['peer']}.via.{self._relay}"
        dialler = self._diallers[row.near]
        await dialler.send(job | {"peer": far["peer"], "certificate": far["certificate"]})
        told = await dialler.hear("measured")
        expected = HomesPath.DIRECT if row.path in (None, HomesPath.MAPPED) else row.path
        if told["path"] != expected:
            raise SwarmError(f"{row.name}: the connection is {told['path']}")
        return told


@asynccontextmanager
async def open_bench(options: Options, rows: Sequence[MeasuredPath], folder: Path) -> AsyncIterator[PathsBench]:
    """Start all programs."""
    shape = LinkShape(delay_ms=options.delay_ms, mbit=options.mbit)
    async with AsyncExitStack() as stack:
        plan = HomesPlan(HOMES, shape=shape, congestion=options.congestion)
        world = await stack.enter_async_context(HomesNetwork(plan))
        words = ["benchmarks.emulation.path_ends", "relay", world.address("P")]
        relay = await stack.enter_async_context(json_program("relay", words, folder, world.command("P", [])))
        bench = PathsBench(world, (await relay.hear("ready"))["address"])
        await bench.start(rows, folder, stack)
        yield bench


def chosen(options: Options) -> list[MeasuredPath]:
    """The rows to measure.

    Raises:
        SwarmError: there is no such row.
    """
    if unknown := set(options.only) - {row.name for row in ROWS}:
        raise SwarmError(f"no path is called {', '.join(sorted(unknown))}")
    wanted = [row for row in ROWS if not options.only or row.name in options.only]
    return [row for row in ROWS if row in wanted or row.name in {one.base for one in wanted}]


def is_near(row: MeasuredPath, times: PathTimes, base: PathTimes, delay_ms: float) -> bool:
    """Whether a path is within `BOUND` of its base, and the relay's leg, in what its messages and its rate are."""
    extra_ms = row.legs * delay_ms
    slow = any(
        times.median(name) > (1 + BOUND) * (base.median(name) + extra_ms) for name in ("small_warm_ms", "large_ms")
    )
    return not slow and times.median("mbit_per_s") >= (1 - BOUND) * base.median("mbit_per_s")


def sheet(found: dict[str, PathTimes], options: Options) -> Sheet:
    """The table."""
    made = Sheet(
        "paths",
        f"Paths between machines, {options.delay_ms:g} ms one way and {options.mbit:g} Mbit/s: "
        f"medians of {options.rounds} connections each",
        ("path", "connected", "8 KiB, first", "8 KiB, later", "512 KiB", "Mbit/s", "within 5 % of TCP"),
        notes=[
            "Times of messages are one way, in milliseconds. A relayed path is compared with TCP and one more leg; a "
            f"path within a home with TCP within it. TCP is {options.congestion}.",
        ],
        measured={"options": asdict(options) | {"json": None}},
    )
    for row in ROWS:
        if row.name not in found:
            continue
        times = found[row.name]
        cells = [
            f"{times.median(name):.1f}" if name != "connected_ms" else f"{times.median(name):.0f} ms" for name in VALUES
        ]
        near = "" if row.base == row.name else "yes" if is_near(row, times, found[row.base], options.delay_ms) else "no"
        made.rows.append((row.name, *cells, near))
        made.measured[row.name] = asdict(times)
    return made


async def _run(options: Options, console: Console) -> dict[str, PathTimes]:
    rows = chosen(options)
    found = {row.name: PathTimes() for row in rows}
    with tempfile.TemporaryDirectory(prefix="canopy-paths-") as temporary:
        async with open_bench(options, rows, Path(temporary)) as bench:
            for number in range(options.rounds):
                for row in rows if number % 2 == 0 else reversed(rows):
                    found[row.name].add(await bench.measure(row, options.seconds))
                console.print(f"round {number + 1} of {options.rounds}", style="dim")
    return found


def main() -> None:
    """Measure and print."""
    options = tyro.cli(Options)
    if (missing := obstacle()) is not None:
        sys.exit(f"paths: {missing}")
    console = make_console()
    try:
        found = asyncio.run(_run(options, console))
    except SwarmError as error:
        sys.exit(f"paths: {error}")
    sheet(found, options).finish(console, record=options.record, path=options.json)


if __name__ == "__main__":
    main()
