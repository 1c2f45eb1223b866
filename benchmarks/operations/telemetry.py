"""What does telemetry cost a node that serves?

Tokens/s and CPU time with and without it, by pair, and the publisher alone. Two nodes serve the whole demo model, each
to a swarm of its own, one of them with --mqtt and a real mosquitto (Debian package). Texts alternate between them, and
nodes are started anew several times, because no two processes are equally fast.

    python -m benchmarks telemetry --record
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
import tyro
from rich.console import Console
from rich.progress import track

from benchmarks.emulation.swarm import covered
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.acceptance import demo_prompts
from client.bench.paired_ratio import median_of, ratios
from client.demo.programs import start_program
from client.library.aio import AsyncSwarm
from node.model.device import Device
from node.session.counters import NodeCounters
from node.telemetry.publisher import Address, Outbox, TelemetryPublisher
from node.telemetry.report import NodeDescription, NodeReport, NodeSnapshot
from swarm.demo import DRAFT, TARGET
from swarm.discovery.identity import Identity
from swarm.discovery.node_record import NodeState
from swarm.ids import ModelIdentity
from swarm.layers import Span
from swarm.runtime.console import make_console
from swarm.runtime.library_logging import quiet_libraries
from swarm.telemetry.broker_address import parse_broker

WAYS = ("without", "with --mqtt")
ADDRESS = r"/ip4/\S+"


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure what telemetry costs."""

    starts: int = 4
    """How often both nodes are started."""
    rounds: int = 6
    """Pairs of texts per start."""
    nodes: int = 16
    """Tree nodes per sweep."""
    new_tokens: int = 96
    """New tokens of each text."""
    seconds: float = 60.0
    """How long the publisher alone is watched."""


@dataclass(frozen=True, slots=True)
class TextCost:
    """One generated text.

    Attributes:
        way: With or without telemetry.
        cpu_s: CPU seconds of the node's process for it.
        wall_s: Wall-clock seconds for it.
    """

    way: str
    tokens_per_s: float
    cpu_s: float
    wall_s: float


@asynccontextmanager
async def broker(folder: Path) -> AsyncIterator[str]:
    """A mosquitto on loopback; yields its URL."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    config = folder / "mosquitto.conf"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\n")
    with (folder / "mosquitto.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec("mosquitto", "-c", str(config), stdout=log, stderr=log)
    try:
        yield f"mqtt://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def measure_pairs(options: Options, url: str, folder: Path, console: Console) -> list[TextCost]:
    """Texts by both nodes in turns; each pair begins with the other one."""
    texts: list[TextCost] = []
    prompts = demo_prompts(options.rounds)
    for start in range(options.starts):
        async with AsyncExitStack() as stack:
            served = [await _serve(stack, way, url, folder) for way in (WAYS if start % 2 else reversed(WAYS))]
            for one in served:
                await one.text(options, prompts[0])
            for prompt in track(prompts, f"start {start + 1} of {options.starts}", console=console):
                texts += [await one.text(options, prompt) for one in served]
                served.reverse()
    return texts


@dataclass(frozen=True, slots=True)
class ServingNode:
    """A node, and the swarm of which it is the only one.

    Attributes:
        way: With or without telemetry.
    """

    way: str
    swarm: AsyncSwarm
    process: psutil.Process

    async def text(self, options: Options, prompt: Sequence[int]) -> TextCost:
        """Generate one, and look at the node's CPU time around it."""
        before, began = self.process.cpu_times(), time.perf_counter()
        result = await self.swarm.generate(prompt, max_new_tokens=options.new_tokens, nodes=options.nodes)
        wall_s, after = time.perf_counter() - began, self.process.cpu_times()
        cpu_s = after.user + after.system - before.user - before.system
        return TextCost(self.way, result.stats.tokens_per_s, cpu_s, wall_s)


async def _serve(stack: AsyncExitStack, way: str, url: str, folder: Path) -> ServingNode:
    serve = ["node.cli", "serve", str(TARGET), "--layers", "0-12", "--host", "127.0.0.1", "--threads", "1"]
    serve += ["--identity", str(folder / f"{way}.key"), *(["--mqtt", url] if way == WAYS[1] else [])]
    node = await stack.enter_async_context(start_program(way, serve, folder))
    await node.wait_for("serving at")
    peer = await node.wait_for(ADDRESS)
    connecting = AsyncSwarm.connect(TARGET, peers=[peer], draft=DRAFT, threads=1, calibration=None)
    swarm = await stack.enter_async_context(connecting)
    await covered(swarm)
    return ServingNode(way, swarm, psutil.Process(node.process.pid))


async def measure_publisher(url: str, seconds: float) -> float:
    """CPU seconds per second of a publisher that says what a serving node says, in a process that does nothing else."""
    identity, counters, outbox = Identity.ephemeral(), NodeCounters(), Outbox()
    model = ModelIdentity("demo-target", "0" * 64, "0" * 64, "0" * 64, "0" * 64, 12)
    snapshot = NodeSnapshot(
        Span(0, 12), NodeState.SERVING, "cpu-float32", ((1, 8.0), (8, 9.0), (64, 20.0)), 1, 1_000, 4_096, 1.0
    )
    description = NodeDescription(model, None, Device(torch.device("cpu")), counters, lambda: snapshot)
    connected = asyncio.Event()
    address = Address(parse_broker(url), "canopy", model.fingerprint, identity)
    async with TelemetryPublisher(address, NodeReport(description, outbox), outbox, lambda _: connected.set()):
        await connected.wait()
        began_s, cpu_s = time.monotonic(), time.process_time()
        await asyncio.sleep(seconds)
        return (time.process_time() - cpu_s) / (time.monotonic() - began_s)


def sheet(texts: list[TextCost], publisher: float, options: Options) -> Sheet:
    by_way = {way: [text for text in texts if text.way == way] for way in WAYS}
    speeds = {way: [text.tokens_per_s for text in some] for way, some in by_way.items()}
    spent = {way: [text.cpu_s for text in some] for way, some in by_way.items()}
    share = {way: sum(spent[way]) / sum(text.wall_s for text in by_way[way]) for way in WAYS}
    made = Sheet(
        "telemetry",
        f"One node with the whole demo model, tree of {options.nodes}, {options.starts} × {options.rounds} pairs",
        ("", "tokens/s", "× without (95 %)", "node's CPU, s per text", "× without (95 %)"),
        notes=[
            f"The publisher alone, {options.seconds:.0f} s at its usual pace: {publisher:.3%} of a core; a node that "
            f"serves takes {share[WAYS[0]]:.0%}, so it is {publisher / share[WAYS[0]]:.3%} of its serving CPU."
        ],
        measured={"texts": [asdict(text) for text in texts], "publisher_cpu": publisher},
    )
    for way in WAYS:
        cells = [str(median_of(ratios(some[way], some[WAYS[0]]))) for some in (speeds, spent)]
        tokens_per_s, cpu_s = median_of(speeds[way]).value, median_of(spent[way]).value
        made.rows.append((way, f"{tokens_per_s:.1f}", cells[0], f"{cpu_s:.2f}", cells[1]))
    return made


async def run(options: Options, console: Console) -> Sheet:
    with tempfile.TemporaryDirectory(prefix="canopy-telemetry-") as temporary:
        folder = Path(temporary)
        async with broker(folder) as url:
            texts = await measure_pairs(options, url, folder, console)
            publisher = await measure_publisher(url, options.seconds)
    return sheet(texts, publisher, options)


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(1)
    quiet_libraries()
    console = make_console()
    asyncio.run(run(options, console)).finish(console, options)
