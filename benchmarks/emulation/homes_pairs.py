"""Does every machine find its best path to every other one, whatever routers are between them?

Real programs behind emulated routers, 25 ms between any two homes. Each machine dials each, as a client and as a node:
its path, its delay and the text must be right. `tests/e2e/homes/test_pairs.py` is the short form.

    sudo python -m benchmarks pairs
    sudo python -m benchmarks pairs --diallers cone symmetric
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tyro
from rich.console import Console

from benchmarks.emulation.home_router import RouterKind, UnaskedTraffic
from benchmarks.emulation.homes import HOME_LINK, Home, HomesNetwork, HomesPlan, obstacle
from benchmarks.emulation.homes_paths import HomesPath, path_between
from benchmarks.emulation.homes_swarm import HomesClient, HomesSwarm, open_homes_swarm
from benchmarks.sheet import Sheet
from swarm.errors import SwarmError
from swarm.runtime.console import make_console

HOMES: Final = (
    Home("open", RouterKind.OPEN),
    Home("open two", RouterKind.OPEN),
    Home("cone", machines=2),
    Home("cone two", unasked=UnaskedTraffic.REJECT),
    Home("symmetric", RouterKind.SYMMETRIC),
    Home("carrier", maps_ports=True, carrier=RouterKind.SYMMETRIC),
    Home("mapping", maps_ports=True),
)
MACHINES: Final = {name: home for home in HOMES for name in home.names}
PUBLIC_CLIENT: Final = "C"
WHOLE, FIRST, SECOND = "0-12", "0-6", "6-12"
TOKENS: Final = 6
ATTEMPTS: Final = 4
"""A better path than the relay's may come with a later connection."""
LISTED_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """Let every machine dial every other one."""

    diallers: tuple[str, ...] = ()
    """Only these machines dial."""
    logs: Path | None = None
    """Keep the programs' logs in this folder."""
    json: Path | None = None
    """Write the measurements into this file."""


@dataclass(frozen=True, slots=True)
class PairFinding:
    """What came of one pair.

    Attributes:
        near: Who dials.
        far: Whom.
        by: What dials: a client, or a node of the chain.
        expected: The best path between such homes.
        found: The path that the kernel knows.
        delay_ms: One way.
        is_same: Whether the text was the undisturbed one, token for token.
        error: Why it ended early.
    """

    near: str
    far: str
    by: str
    expected: str
    found: str
    delay_ms: float
    is_same: bool
    error: str | None

    @property
    def is_right(self) -> bool:
        """Whether path, delay and text are as they must be."""
        path = HomesPath(self.expected)
        fits = path.fits(self.delay_ms, HOME_LINK.delay_ms)
        # Behind a client's relayed link, the nodes of both machines may have a connection of their own.
        is_found = self.found == path.seen_as or (self.by == "client" and path is HomesPath.RELAYED)
        return self.is_same and fits and is_found


def is_dialled(home: Home) -> bool:
    """Whether others can dial a home's machine: it is public, or its router maps a port that is public."""
    return home.is_open or (home.maps_ports and home.carrier is None)


def best_path(near: Home, far: Home, by: str = "node") -> HomesPath:
    """The best path from a machine of one home to a machine of another one, or of the same.

    Args:
        near: whence.
        far: where to.
        by: what dials; a client has no port mapped.
    """
    if near is far:
        return HomesPath.LAN
    if is_dialled(far):
        return HomesPath.DIRECT
    if near.is_open or (by == "node" and is_dialled(near)):
        return HomesPath.CALLED_BACK
    draws_ports = {near.router, far.router, near.carrier, far.carrier} & {RouterKind.SYMMETRIC}
    return HomesPath.RELAYED if draws_ports else HomesPath.PUNCHED


class PairsBench:
    """A swarm in homes, whose machines all serve the whole model."""

    def __init__(self, swarm: HomesSwarm, peers: list[str], client: HomesClient, reference: list[int]) -> None:
        self._swarm = swarm
        self._peers = peers
        self._client = client
        self._reference = reference

    @property
    def listed_s(self) -> dict[str, float]:
        """From a machine's start until it was listed, the load of its layers with it."""
        at = {name: self._client.listed[self._swarm.peers[name]]["at"] for name in MACHINES}
        return {name: at[name] - self._swarm.started_at[name] for name in MACHINES}

    async def dial(self, near: str) -> AsyncIterator[PairFinding]:
        """Let a machine dial all others: a client there, then the node there."""
        others = [far for far in MACHINES if far != near]
        own = await self._swarm.client(near, self._peers)
        for far in others:
            yield await self._pair("client", own, near, far, [[far, WHOLE]])
        for far in others:
            yield await self._pair("node", self._client, near, far, [[near, FIRST], [far, SECOND]])

    async def _pair(self, by: str, client: HomesClient, near: str, far: str, hops: list[list[str]]) -> PairFinding:
        expected = best_path(MACHINES[near], MACHINES[far], by)
        chain = [[self._swarm.peers[name], layers] for name, layers in hops]
        for _ in range(ATTEMPTS):
            told: dict[str, Any] = await client.generate({"hops": chain, "new_tokens": TOKENS})
            found = await path_between(self._swarm.world, near, far)
            links = told.get("links_ms") or [0.0] * len(hops)
            is_same = told["tokens"] == self._reference[:TOKENS]
            finding = PairFinding(near, far, by, expected, found, links[len(hops) - 1], is_same, told["error"])
            if finding.is_right:
                break
        return finding


@asynccontextmanager
async def open_bench(folder: Path) -> AsyncIterator[PairsBench]:
    """Start all programs, and generate the undisturbed text.

    Raises:
        SwarmError: one did not start, or the text ended early.
    """
    async with HomesNetwork(HomesPlan(HOMES)) as world, open_homes_swarm(world, folder) as swarm:
        first = await swarm.bootstrap("P")
        peers = [first, await swarm.bootstrap("Q", join=[first])]
        for name in MACHINES:
            await swarm.serve(name, WHOLE, peers)
        client = await swarm.client(PUBLIC_CLIENT, peers)
        await client.wait_up(*(swarm.peers[name] for name in MACHINES))
        told = await client.generate({"hops": [[swarm.peers["open"], WHOLE]], "new_tokens": TOKENS})
        if told["error"] is not None:
            raise SwarmError(told["error"])
        yield PairsBench(swarm, peers, client, told["tokens"])


def rows(found: list[PairFinding]) -> Iterator[tuple[str, ...]]:
    """One per dialler, and what dials."""
    for near in dict.fromkeys(one.near for one in found):
        for by in ("client", "node"):
            own = [one for one in found if (one.near, one.by) == (near, by)]
            paths = [f"{path} {sum(one.expected == path for one in own)}" for path in HomesPath]
            right = sum(one.is_right for one in own)
            yield near, by, f"{right} / {len(own)}", ", ".join(text for text in paths if not text.endswith(" 0"))


def sheet(found: list[PairFinding], listed_s: dict[str, float]) -> Sheet:
    """The table."""
    worst = max(listed_s, key=lambda name: listed_s[name])
    return Sheet(
        "pairs",
        f"Each machine dials each other one: texts of {TOKENS} tokens",
        ("who dials", "as a", "right in path, delay and text", "paths"),
        list(rows(found)),
        notes=[f"Started at once, the last machine ({worst}) was listed after {listed_s[worst]:.0f} s."],
        measured={
            "listed_s": listed_s,
            "pairs": [{name: getattr(one, name) for name in PairFinding.__slots__} for one in found],
        },
    )


async def _run(options: Options, console: Console) -> tuple[list[PairFinding], dict[str, float]]:
    found: list[PairFinding] = []
    with tempfile.TemporaryDirectory(prefix="canopy-pairs-") as temporary:
        try:
            async with open_bench(Path(temporary)) as bench:
                for near in options.diallers or MACHINES:
                    began_s = time.monotonic()
                    async for one in bench.dial(near):
                        found.append(one)
                        if not one.is_right:
                            console.print(f"{one}", markup=False)
                    console.print(f"{near}: {time.monotonic() - began_s:.0f} s", markup=False)
                return found, bench.listed_s
        finally:
            if options.logs is not None:
                shutil.copytree(temporary, options.logs, dirs_exist_ok=True)


def main() -> None:
    """Entry point; fails if a pair is not as it must be, or a machine was listed late."""
    options = tyro.cli(Options)
    console = make_console()
    if unknown := set(options.diallers) - set(MACHINES):
        raise SystemExit(f"pairs: no machine {', '.join(sorted(unknown))}; there are {', '.join(MACHINES)}")
    if (missing := obstacle()) is not None:
        raise SystemExit(f"pairs: {missing}")
    try:
        found, listed_s = asyncio.run(_run(options, console))
    except SwarmError as error:
        raise SystemExit(f"pairs: {error}") from None
    sheet(found, listed_s).finish(console, record=False, path=options.json)
    wrong = [one for one in found if not one.is_right]
    late = [name for name, seconds in listed_s.items() if seconds > LISTED_S]
    if wrong or late:
        raise SystemExit(f"pairs: {len(wrong)} of {len(found)} are not right; late: {', '.join(late) or 'none'}")


if __name__ == "__main__":
    main()
