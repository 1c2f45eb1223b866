"""How long does start-up take, and how much memory and idle CPU does Canopy need?

Programs are started as a user would start them, on loopback. Memory is the proportional set size (PSS) summed over a
program and all its descendants; the nodes beside it share pages with it and so lower that, hence the second figure,
which is what the same processes would occupy if nobody else shared anything.

    python -m benchmarks footprint --record
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil
import tyro

from benchmarks.emulation.swarm import local_swarm
from benchmarks.sheet import Recording, Sheet
from client.tools.demo.programs import RunningProgram, start_program
from swarm.base.cli import make_console
from swarm.demo import DRAFT, TARGET

PROMPT = "It was a dark night, and the old captain"
MIB = 2**20
LONG_TOKENS = 900
"""So that a client still generates while it is looked at."""
SETTLE_S = 10.0


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure start-up, memory and idle CPU on this machine."""

    repeats: int = 5
    """Of starting a whole swarm."""
    idle_s: float = 60.0
    """Seconds of idling."""


@dataclass(frozen=True, slots=True)
class StartUp:
    """Seconds since the first program was started.

    Attributes:
        first_token_s: Until a client's first token.
    """

    nodes_listed_s: float
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a program and its descendants, in MiB.

    Attributes:
        alone: The same if nobody else shared pages.
        parts: The proportional set size of each process, by name.
    """

    pss: float
    alone: float
    parts: dict[str, float]


def memory(program: RunningProgram) -> Memory:
    """The memory of a program and all its descendants, now."""
    root = psutil.Process(program.process.pid)
    members = [root, *root.children(recursive=True)]
    parts = {f"{member.name()} {member.pid}": _rollup(member.pid) / MIB for member in members}
    return Memory(sum(parts.values()), _alone([member.pid for member in members]) / MIB, parts)


def _rollup(pid: int) -> int:
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None, "the kernel sums it up"
    return int(found[1]) * 1024


def _alone(pids: list[int]) -> int:
    """Private pages of every process, and each shared piece of a file once, at the size of its largest user."""
    private = 0
    shared: dict[str, int] = {}
    for pid in pids:
        here: Counter[str] = Counter()
        piece = ""
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if head := re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ ([0-9a-f]+) \S+ \d+ *(.*)", line):
                piece = f"{head[2]} {head[1]}"
            elif size := re.match(r"(Private|Shared)_(?:Clean|Dirty):\s+(\d+) kB", line):
                is_private, count = size[1] == "Private", int(size[2]) * 1024
                private += count if is_private else 0
                here[piece] += 0 if is_private else count
        shared |= {piece: max(count, shared.get(piece, 0)) for piece, count in here.items()}
    return private + sum(shared.values())


def cpu_s(program: RunningProgram) -> float:
    """CPU seconds of a program and all its descendants so far."""
    root = psutil.Process(program.process.pid)
    return sum(sum(member.cpu_times()[:2]) for member in [root, *root.children(recursive=True)])


async def start_up() -> StartUp:
    """Start everything, one after the other as a person would, until a client shows its first word."""
    with tempfile.TemporaryDirectory(prefix="canopy-start-") as temporary:
        folder, started = Path(temporary), time.perf_counter()
        async with local_swarm(folder) as (peer, nodes):
            await asyncio.gather(*(node.wait_for("serving at") for node in nodes))
            listed = time.perf_counter()
            async with client(folder, peer, 4) as generating:
                await generating.wait_for(r"\w+")
                return StartUp(listed - started, time.perf_counter() - started)


@asynccontextmanager
async def client(folder: Path, peer: str, tokens: int, draft: str = "none") -> AsyncIterator[RunningProgram]:
    """`client generate` with its output in a file."""
    arguments = ["client.cli", "generate", str(TARGET), "--prompt", PROMPT, "--join", peer, "--threads", "1"]
    arguments += ["--max-new-tokens", str(tokens), "--draft", draft]
    async with start_program("client", arguments, folder) as generating:
        yield generating


async def at_work(options: Options) -> tuple[dict[str, Memory], list[float]]:
    """Memory of clients that generate and of an idle node, and the CPU of each idle node in percent of a core."""
    memories: dict[str, Memory] = {}
    with tempfile.TemporaryDirectory(prefix="canopy-idle-") as temporary:
        folder = Path(temporary)
        async with local_swarm(folder) as (peer, nodes):
            await asyncio.gather(*(node.wait_for("serving at") for node in nodes))
            for name, draft in (("client without a draft", "none"), ("client with the demo draft", str(DRAFT))):
                async with client(folder, peer, LONG_TOKENS, draft) as generating:
                    await generating.wait_for(r"(\w+\W+){40}")
                    memories[name] = memory(generating)
            await asyncio.sleep(SETTLE_S)
            before = [cpu_s(node) for node in nodes]
            await asyncio.sleep(options.idle_s)
            spent = [100 * (cpu_s(node) - begun) / options.idle_s for node, begun in zip(nodes, before, strict=True)]
            memories["idle node, a third of the demo model"] = memory(nodes[1])
    return memories, spent


async def measure(options: Options) -> Sheet:
    memories, idle = await at_work(options)
    starts = [await start_up() for _ in range(options.repeats)]
    made = Sheet(
        "footprint",
        f"One machine, loopback; start-up: median of {options.repeats}; idle CPU over {options.idle_s:g} s",
        ("what", "measured", "asked for"),
        measured={
            "starts": [asdict(start) for start in starts],
            "memories": {name: asdict(found) for name, found in memories.items()},
            "idle_cpu_percent": idle,
        },
    )
    listed, first = (median(getattr(start, name) for start in starts) for name in ("nodes_listed_s", "first_token_s"))
    made.rows += [
        ("bootstrap peer and three nodes started, until all are listed", f"{listed:.1f} s", ""),
        ("… then a client started, until its first word", f"{first:.1f} s", "≤ 30 s"),
    ]
    for name, found in memories.items():
        asked = "≤ 450 MB" if name == "client without a draft" else ""
        made.rows.append((f"{name}: PSS (alone on its machine)", f"{found.pss:.0f} ({found.alone:.0f}) MiB", asked))
    made.rows.append(
        ("idle node, CPU of one core: median (most) of three", f"{median(idle):.2f} ({max(idle):.2f}) %", "≤ 2 %")
    )
    return made


def main() -> None:
    options = tyro.cli(Options)
    asyncio.run(measure(options)).finish(make_console(), options)
