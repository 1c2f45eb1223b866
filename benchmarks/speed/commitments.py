"""What do commitments cost a sweep, and how long is one hashed?

Three nodes with emulated links between them. Each text is generated twice, in turns: while nodes commit to all that
travels, and while they do not. Sweeps are compared: how many a text takes depends on when its draft was done.
Ratios are medians over pairs with 95 % intervals. Hashing is timed bare, on one thread.

    python -m benchmarks commitments --record
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import tyro
from rich.console import Console
from rich.progress import track

from benchmarks.emulation.swarm import SPANS, covered
from benchmarks.sheet import Recording, Sheet
from benchmarks.simulation.acceptance import demo_prompts
from client.library.aio import AsyncSwarm
from client.tools.bench.paired_ratio import median_of, ratios
from client.tools.demo.delay_proxy import free_ports
from client.tools.demo.link_shape import LinkShape
from client.tools.demo.programs import RunningProgram, start_program
from swarm.base.cli import make_console
from swarm.base.ids import SessionId, TreeNodeId
from swarm.base.library_logging import quiet_libraries
from swarm.demo import DRAFT, TARGET
from swarm.protocol.messages import Codec, Rows, Sweep
from swarm.protocol.session import Limits, SessionState
from swarm.trust.commitment import PlacedNode, commit_rows, placed

SWITCH_S = 0.1
"""In which nodes take a signal."""
SIZES = ((Codec.FP32, 192), (Codec.FP32, 576), (Codec.BF16, 8_192))
"""Rows whose hashing is timed: the demo's, SmolLM2's, and those of a model of 70 billion weights."""
HASHED_ROWS, REPEATS = 64, 200


@dataclass(frozen=True, slots=True)
class Options(Recording):
    """Measure what commitments cost."""

    delay_ms: float = 25.0
    """Of each link, one way."""
    pairs: int = 40
    """Texts, each of them twice."""
    nodes: tuple[int, ...] = (0, 32)
    """Tree nodes per sweep (K)."""
    new_tokens: int = 24
    """New tokens of each text."""


@asynccontextmanager
async def switched_swarm(delay_ms: float) -> AsyncIterator[tuple[str, list[RunningProgram]]]:
    """The demo's swarm, of nodes that can be switched; yields the peer's address and the nodes."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="canopy-commitments-")))
        boot = ["swarm.cli", "bootstrap", "--host", "127.0.0.1", "--port", "0", "--identity", str(folder / "boot.key")]
        bootstrap = await stack.enter_async_context(start_program("bootstrap", boot, folder))
        ports = free_ports(2 * len(SPANS))
        pairs = list(zip(ports[::2], ports[1::2], strict=True))
        shape = json.dumps(asdict(LinkShape(delay_ms=delay_ms)))
        links = ["client.tools.demo.delay_proxy", shape, *(f"{listen}:{target}" for listen, target in pairs)]
        await stack.enter_async_context(start_program("links", links, folder))
        peer = await bootstrap.wait_for(r"/ip4/\S+")
        nodes = []
        for span, (listen, target) in zip(SPANS, pairs, strict=True):
            serve = ["benchmarks.speed.switched_node", "serve", str(TARGET), "--layers", span, "--join", peer]
            serve += ["--host", "127.0.0.1", "--port", str(target), "--announce-address", f"127.0.0.1:{listen}"]
            serve += ["--threads", "1", "--identity", str(folder / f"{span}.key"), "--dtype", "float32"]
            nodes.append(await stack.enter_async_context(start_program(f"node {span}", serve, folder)))
        await asyncio.gather(*(node.wait_for("serving at") for node in nodes))
        yield peer, nodes


Found = dict[int, dict[str, list[float]]]
"""By tree size, and by whether nodes commit: milliseconds of each text's median sweep."""


async def measure(options: Options, console: Console) -> Found:
    """Sweeps of each text, with commitments and without."""
    found: Found = {size: {"on": [], "off": []} for size in options.nodes}
    async with (
        switched_swarm(options.delay_ms) as (peer, nodes),
        AsyncSwarm.connect(TARGET, peers=[peer], draft=DRAFT, threads=1, calibration=None, adapt=False) as swarm,
    ):
        await covered(swarm)
        prompts = demo_prompts(options.pairs + 1)
        await swarm.generate(prompts[0], max_new_tokens=16, nodes=max(options.nodes))
        for number, prompt in enumerate(track(prompts[1:], "pairs", console=console)):
            for way in ("on", "off") if number % 2 else ("off", "on"):
                for node in nodes:
                    os.kill(node.process.pid, signal.SIGUSR2 if way == "on" else signal.SIGUSR1)
                await asyncio.sleep(SWITCH_S)
                for size in options.nodes:
                    swarm.forget_texts()
                    result = await swarm.generate(prompt, max_new_tokens=options.new_tokens, nodes=size)
                    found[size][way].append(result.stats.ms_per_sweep)
    return found


def hash_ms(codec: Codec, width: int) -> float:
    """Median milliseconds of hashing one sweep's rows."""
    rows = Rows(codec, HASHED_ROWS, width, os.urandom(HASHED_ROWS * codec.row_bytes(width)))
    nodes = [PlacedNode(TreeNodeId(node), node, TreeNodeId(node - 1) if node else None) for node in range(HASHED_ROWS)]
    took = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        commit_rows(SessionId(bytes(16)), 1, nodes, rows, snapshot=False)
        took.append((time.perf_counter() - started) * 1e3)
    return median(took)


def place_ms() -> float:
    """Median milliseconds of noting where one sweep's nodes stand: what the event loop does for each side."""
    state = SessionState(Limits(1, 4_096, 8, 4_096))
    nodes = [TreeNodeId(node) for node in range(HASHED_ROWS)]
    parents = (None, *nodes[:-1])
    state.apply(Sweep(1, 0, nodes[0], (0,) * HASHED_ROWS, parents, nodes[0]))
    took = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        placed(state, nodes)
        took.append((time.perf_counter() - started) * 1e3)
    return median(took)


def sheet(found: Found, options: Options) -> Sheet:
    """The table of a run."""
    made = Sheet(
        "commitments",
        f"Three nodes, links of {options.delay_ms:g} ms, {options.pairs} pairs of texts of {options.new_tokens} tokens",
        ("what", "result"),
        measured={"ms_per_sweep": found},
    )
    for size, ways in found.items():
        what = f"a sweep with commitments, of one without, K = {size}"
        made.rows.append((what, str_of(ways)))
    made.rows.append((f"noting where a sweep's {HASHED_ROWS} nodes stand, ms", f"{place_ms():.3f}"))
    hashed = {f"{HASHED_ROWS} rows of {width} {codec.value}": hash_ms(codec, width) for codec, width in SIZES}
    made.rows += [(f"hashing a sweep's {name}, ms", f"{ms:.2f}") for name, ms in hashed.items()]
    made.measured["hash_ms"] = hashed
    made.notes.append(
        "Each hop does both for what it receives and for what it sends; it hashes on a thread of its own."
    )
    return made


def str_of(ways: dict[str, list[float]]) -> str:
    """The median ratio, to a tenth of a per cent."""
    ratio = median_of(ratios(ways["on"], ways["off"]))
    ends = "" if ratio.low is None or ratio.high is None else f" ({ratio.low:.3f} … {ratio.high:.3f})"
    return f"{ratio.value:.3f}{ends}"


def main() -> None:
    """Run the benchmark."""
    options = tyro.cli(Options)
    quiet_libraries()
    console = make_console()
    found = asyncio.run(measure(options, console))
    sheet(found, options).finish(console, options)
