"""Is a text still the same when home routers and relays fail in the middle of it?

Real programs behind emulated routers, 25 ms and 100 Mbit/s between any two homes. The second half of the layers is
served by one machine at home and by nobody else, so that a text goes on as soon as that machine is reached again.

    sudo python -m benchmarks homes --record
    sudo python -m benchmarks homes --only relay-cut --texts 1
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any, Final

import tyro
from rich.console import Console

from benchmarks.emulation.home_router import RouterKind
from benchmarks.emulation.homes import Home, HomesNetwork, HomesPlan, obstacle
from benchmarks.emulation.homes_swarm import HomesClient, HomesSwarm, open_homes_swarm
from benchmarks.sheet import Recording, Sheet
from swarm.base.cli import make_console
from swarm.base.errors import SwarmError

OPEN, CONE, SYMMETRIC, MAPPING = "open", "cone", "symmetric", "mapping"
HOMES: Final = (
    Home(OPEN, RouterKind.OPEN),
    Home(CONE),
    Home(SYMMETRIC, RouterKind.SYMMETRIC),
    Home(MAPPING, maps_ports=True),
)
RELAYS: Final = ("P", "Q")
NEW_TOKENS, FAULT_AFTER = 40, 8
WELL_TOKENS = 4
"""Of the text before each fault, which shows that all is well again."""
WHOLE, FIRST, SECOND = "0-12", "0-6", "6-12"


class HomesFault(StrEnum):
    """What happens in the middle of a text."""

    NONE = "none"
    RELAY_KILLED = "relay-killed"
    RELAY_CUT = "relay-cut"
    RELAY_LEAVES = "relay-leaves"
    ROUTER_FLUSHED = "router-flushed"
    ROUTER_RESTARTED = "router-restarted"
    ADDRESS_CHANGED = "address-changed"
    MAPPING_LOST = "mapping-lost"
    MAPPING_GONE = "mapping-gone"


WORDS: Final = {
    HomesFault.NONE: "nothing",
    HomesFault.RELAY_KILLED: "its relay is killed (-9)",
    HomesFault.RELAY_CUT: "its relay is cut off, without a reset",
    HomesFault.RELAY_LEAVES: "its relay leaves, so it moves to its second one",
    HomesFault.ROUTER_FLUSHED: "its router's table is flushed",
    HomesFault.ROUTER_RESTARTED: "its router restarts and knows no connection",
    HomesFault.ADDRESS_CHANGED: "its public address changes",
    HomesFault.MAPPING_LOST: "its mapping is lost, and can be had again",
    HomesFault.MAPPING_GONE: "its mapping is lost, and cannot be had again",
}
SUBJECTS: Final = {
    HomesFault.ROUTER_FLUSHED: CONE,
    HomesFault.ROUTER_RESTARTED: CONE,
    HomesFault.MAPPING_LOST: MAPPING,
    HomesFault.MAPPING_GONE: MAPPING,
}
"""Whom it happens to; else the machine behind the symmetric router."""


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Let routers and relays fail in the middle of texts."""

    only: tuple[HomesFault, ...] = ()
    """Only these faults."""
    texts: int = 3
    """Texts per fault."""
    logs: Path | None = None
    """Keep the programs' logs in this folder."""


@dataclass(slots=True)
class FaultFindings:
    """What became of the texts of one fault.

    Attributes:
        same: Whether each text was the undisturbed one, token for token.
    """

    same: list[bool] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def add(self, told: dict[str, Any], reference: list[int]) -> None:
        self.same.append(told["tokens"] == reference)
        self.pauses_s.append(told.get("pause_s", 0.0))
        if told["error"] is not None:
            self.errors.append(told["error"])


class HomesBench:
    """A swarm in homes, to which faults happen one after another."""

    def __init__(self, swarm: HomesSwarm, client: HomesClient, peers: list[str], reference: list[int]) -> None:
        self._swarm = swarm
        self._client = client
        self._peers = peers
        self._reference = reference

    async def text(self, fault: HomesFault, findings: FaultFindings) -> None:
        """One text with this fault in its middle; then the world is whole again."""
        subject = SUBJECTS.get(fault, SYMMETRIC)
        await self._client.generate(self._job(subject, WELL_TOKENS))
        relay = self._swarm.relay_of(self._client, subject) if fault.startswith("relay") else None
        await self._client.begin(self._job(subject, NEW_TOKENS), FAULT_AFTER)
        await self._inject(fault, subject, relay)
        findings.add(await self._client.finish(), self._reference)
        await self._mend(fault, subject, relay)

    def _job(self, subject: str, tokens: int) -> dict[str, Any]:
        return job(self._swarm, subject, tokens)

    async def _inject(self, fault: HomesFault, subject: str, relay: str | None) -> None:
        world = self._swarm.world
        match fault:
            case HomesFault.RELAY_KILLED if relay is not None:
                self._swarm.kill(relay)
            case HomesFault.RELAY_CUT if relay is not None:
                await world.cut(relay)
            case HomesFault.RELAY_LEAVES if relay is not None:
                self._swarm.programs[relay].process.send_signal(signal.SIGTERM)
            case HomesFault.ROUTER_FLUSHED:
                await world.flush(subject)
            case HomesFault.ROUTER_RESTARTED:
                await world.restart(subject)
            case HomesFault.ADDRESS_CHANGED:
                await world.move(subject)
            case HomesFault.MAPPING_LOST:
                await world.lose_mappings(subject)
            case HomesFault.MAPPING_GONE:
                await world.stop_mapping(subject)

    async def _mend(self, fault: HomesFault, subject: str, relay: str | None) -> None:
        match fault:
            case HomesFault.RELAY_CUT if relay is not None:
                await self._swarm.world.join(relay)
            case HomesFault.RELAY_KILLED | HomesFault.RELAY_LEAVES if relay is not None:
                await self._swarm.programs[relay].process.wait()
                others = [peer for peer in self._peers if f"/{self._swarm.world.address(relay)}/" not in peer]
                await self._swarm.bootstrap(relay, join=others)
            case HomesFault.MAPPING_GONE:
                await self._swarm.world.lose_mappings(subject)


def job(swarm: HomesSwarm, subject: str, tokens: int) -> dict[str, Any]:
    """A text whose second half of the layers one machine computes; a symmetric one is reached through a relay."""
    first = CONE if subject == SYMMETRIC else OPEN
    return {"hops": [[swarm.peers[first], FIRST], [swarm.peers[subject], SECOND]], "new_tokens": tokens}


@asynccontextmanager
async def open_bench(folder: Path) -> AsyncIterator[HomesBench]:
    """Start all programs, and generate the undisturbed text on the machine that nothing happens to.

    Raises:
        SwarmError: one did not start, or the text ended early.
    """
    async with HomesNetwork(HomesPlan(HOMES)) as world, open_homes_swarm(world, folder) as swarm:
        peers = [await swarm.bootstrap(RELAYS[0])]
        peers.append(await swarm.bootstrap(RELAYS[1], join=peers))
        for home in HOMES:
            await swarm.serve(home.name, WHOLE, peers, "--relay-mbit", "0")  # so that the relays are P and Q
        client = await swarm.client("C", peers)
        await client.wait_up(*(swarm.peers[home.name] for home in HOMES))
        told = await client.generate({"hops": [[swarm.peers[OPEN], WHOLE]], "new_tokens": NEW_TOKENS})
        if told["error"] is not None:
            raise SwarmError(told["error"])
        yield HomesBench(swarm, client, peers, told["tokens"])


def sheet(found: dict[HomesFault, FaultFindings], options: Options) -> Sheet:
    made = Sheet(
        "homes",
        f"Texts of {NEW_TOKENS} tokens over a machine at home, to which something happens",
        ("what happens to the machine", "texts the same", "longest pause, median", "worst"),
        notes=[
            "Nobody else serves its layers. In a swarm with a second machine for them, a text goes on there after a "
            "second or so.",
        ],
        measured={fault.value: asdict(findings) for fault, findings in found.items()},
    )
    for fault, findings in found.items():
        pauses = [f"{take(findings.pauses_s):.1f} s" for take in (median, max)]
        made.rows.append((WORDS[fault], f"{sum(findings.same)} / {len(findings.same)}", *pauses))
    made.measured["options"] = asdict(options) | {"json": None, "logs": None}
    return made


async def _run(options: Options, console: Console) -> dict[HomesFault, FaultFindings]:
    found: dict[HomesFault, FaultFindings] = {}
    with tempfile.TemporaryDirectory(prefix="canopy-homes-") as temporary:
        try:
            async with open_bench(Path(temporary)) as bench:
                for fault in options.only or HomesFault:
                    findings = found[fault] = FaultFindings()
                    for _ in range(options.texts):
                        began_s = time.monotonic()
                        await bench.text(fault, findings)
                        said = "same text" if findings.same[-1] else f"NOT THE SAME {findings.errors[-1:]}"
                        pause, took = findings.pauses_s[-1], time.monotonic() - began_s
                        console.print(f"{fault}: {said}, pause {pause:.1f} s, {took:.0f} s in all", markup=False)
        finally:
            if options.logs is not None:
                shutil.copytree(temporary, options.logs, dirs_exist_ok=True)
    return found


def main() -> None:
    """Entry point; fails if a text is another one."""
    options = tyro.cli(Options, config=(tyro.conf.EnumChoicesFromValues,))
    console = make_console()
    if (missing := obstacle()) is not None:
        raise SystemExit(f"homes: {missing}")
    try:
        found = asyncio.run(_run(options, console))
    except SwarmError as error:
        raise SystemExit(f"homes: {error}") from None
    sheet(found, options).finish(console, options)
    if not all(all(findings.same) for findings in found.values()):
        raise SystemExit("homes: a text is not the same")
