"""What does encryption cost?

Two swarms of the same machines stand side by side on loopback, with the same delay on each link: one as everybody
runs it, one in plain text (`--insecure`). The same texts go over both in turns. Then each first token over new
connections is measured against the next one over the same connections: that is what a new link costs.

    python -m benchmarks tls --record
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from rich.console import Console

from benchmarks.emulation.swarm import SPANS, covered
from benchmarks.sheet import Sheet
from benchmarks.simulation.acceptance import demo_prompts
from client.bench.paired_ratio import median_of, ratios
from client.demo.delay_proxy import free_ports
from client.demo.link_shape import LinkShape
from client.demo.programs import start_program
from client.library.aio import AsyncSwarm
from client.stats import Result
from swarm.demo import DRAFT, TARGET
from swarm.errors import RegistryError
from swarm.runtime.console import make_console
from swarm.runtime.library_logging import quiet_libraries

SECURE, PLAIN = "TLS", "plain text"


@dataclass(frozen=True, slots=True)
class Options:
    """Measure what encryption costs."""

    delays_ms: tuple[float, ...] = (1.0, 25.0)
    """One way, on each link."""
    pairs: int = 24
    """Texts over each swarm, at each delay."""
    new_tokens: int = 192
    """New tokens of each text."""
    nodes: int = 16
    """Tree nodes of each sweep: the same for both, since a controller that chooses measures itself."""
    first_links: int = 12
    """First tokens over new connections, over each swarm, at each delay."""
    record: bool = False
    """Write the table into docs/benchmarks and the measurements beside it."""
    json: Path | None = None
    """Write the measurements into this file."""


@dataclass(slots=True)
class DelayMeasurement:
    """All that was measured at one delay.

    Attributes:
        tokens_per_s: Of each text, by swarm, in the order in which they were made.
        new_link_ms: First token over new connections less the first token over old ones, by swarm.
        is_same: Whether all texts were the same over both.
    """

    tokens_per_s: dict[str, list[float]] = field(default_factory=lambda: {SECURE: [], PLAIN: []})
    new_link_ms: dict[str, list[float]] = field(default_factory=lambda: {SECURE: [], PLAIN: []})
    is_same: bool = True

    @property
    def extra_ms(self) -> float:
        """What TLS adds to a chain of new connections, in the median."""
        return median(self.new_link_ms[SECURE]) - median(self.new_link_ms[PLAIN])


@asynccontextmanager
async def delayed_swarm(folder: Path, way: str, delay_ms: float) -> AsyncIterator[str]:
    """A bootstrap peer and three nodes behind links of this delay; yields the peer's address.

    Raises:
        RegistryError: a program did not start.
    """
    async with AsyncExitStack() as stack:

        async def start(name: str, *arguments: str) -> Any:  # noqa: ANN401 (a program)
            return await stack.enter_async_context(start_program(f"{way} {name}", arguments, folder))

        key = ("--identity", str(folder / f"{way} bootstrap.key"))
        bootstrap = await start("bootstrap", "swarm.cli", "bootstrap", "--host", "127.0.0.1", "--port", "0", *key)
        peer = await bootstrap.wait_for(r"/ip4/\S+")
        ports = free_ports(2 * len(SPANS))
        pairs = list(zip(ports[::2], ports[1::2], strict=True))
        shape = json.dumps(asdict(LinkShape(delay_ms=delay_ms)))
        proxy = await start("links", "client.demo.delay_proxy", shape, *(f"{near}:{far}" for near, far in pairs))
        await proxy.wait_for(r"\[null")
        nodes = []
        for span, (near, far) in zip(SPANS, pairs, strict=True):
            serve = ["node.cli", "serve", str(TARGET), "--layers", span, "--join", peer, "--host", "127.0.0.1"]
            serve += ["--port", str(far), "--announce-address", f"127.0.0.1:{near}", "--threads", "1"]
            serve += ["--identity", str(folder / f"{way} {span}.key"), "--device", "cpu"]
            nodes.append(await start(span, *serve, *(["--insecure"] if way == PLAIN else [])))
        for node in nodes:
            await node.wait_for("serving at")
        yield peer


@asynccontextmanager
async def connected(way: str, peer: str) -> AsyncIterator[AsyncSwarm]:
    """A client with connections of its own."""
    options: dict[str, Any] = {"peers": [peer], "draft": DRAFT, "threads": 1, "calibration": None}
    async with AsyncSwarm.connect(TARGET, insecure=way == PLAIN, **options) as swarm:
        await covered(swarm)
        yield swarm


async def text(swarm: AsyncSwarm, prompt: Sequence[int], new_tokens: int, nodes: int) -> Result:
    """One greedy text, drafted as if it were the first one."""
    swarm.forget_texts()
    return await swarm.generate(prompt, max_new_tokens=new_tokens, temperature=0.0, nodes=nodes)


async def measure(delay_ms: float, options: Options, console: Console) -> DelayMeasurement:
    """Both swarms at one delay."""
    found = DelayMeasurement()
    prompts = demo_prompts(max(options.pairs, options.first_links))
    with tempfile.TemporaryDirectory(prefix="canopy-tls-") as temporary:
        async with AsyncExitStack() as stack:
            peers = {
                way: await stack.enter_async_context(delayed_swarm(Path(temporary), way, delay_ms))
                for way in (SECURE, PLAIN)
            }
            await measure_texts(found, peers, prompts[: options.pairs], options)
            await measure_links(found, peers, prompts[: options.first_links], options.nodes)
    console.print(f"{delay_ms:g} ms: {median_of(ratios(*found.tokens_per_s.values()))}, {found.extra_ms:+.1f} ms")
    return found


async def measure_texts(
    found: DelayMeasurement, peers: dict[str, str], prompts: Sequence[Sequence[int]], options: Options
) -> None:
    """The same texts over both in turns; each pair begins with the other one."""
    async with AsyncExitStack() as stack:
        swarms = {way: await stack.enter_async_context(connected(way, peer)) for way, peer in peers.items()}
        for swarm in swarms.values():
            await text(swarm, prompts[0], options.new_tokens, options.nodes)
        for number, prompt in enumerate(prompts):
            results = {}
            for way in sorted(swarms, reverse=bool(number % 2)):
                results[way] = await text(swarms[way], prompt, options.new_tokens, options.nodes)
                found.tokens_per_s[way].append(results[way].stats.tokens_per_s)
            found.is_same = found.is_same and results[SECURE].tokens == results[PLAIN].tokens


async def measure_links(
    found: DelayMeasurement, peers: dict[str, str], prompts: Sequence[Sequence[int]], nodes: int
) -> None:
    """Time to the first token over new connections, less that over the same ones a moment later."""
    for number, prompt in enumerate(prompts):
        for way in sorted(peers, reverse=bool(number % 2)):
            async with connected(way, peers[way]) as swarm:
                moments = [time.perf_counter()]
                for _ in range(2):
                    await text(swarm, prompt, 1, nodes)
                    moments.append(time.perf_counter())
            began, first, second = moments
            found.new_link_ms[way].append(((first - began) - (second - first)) * 1e3)


def sheet(found: dict[float, DelayMeasurement], options: Options) -> Sheet:
    """The table."""
    made = Sheet(
        "tls",
        f"TLS against plain text: {options.pairs} pairs of texts, three hops, greedy, trees of {options.nodes}",
        (
            "delay, one way",
            "TLS, tokens/s",
            "plain, tokens/s",
            "TLS / plain (95 %)",
            "new links, extra ms",
            "same text",
        ),
        measured={"options": asdict(options) | {"json": None}},
    )
    for delay_ms, one in found.items():
        speeds = [f"{median(one.tokens_per_s[way]):.1f}" for way in (SECURE, PLAIN)]
        ratio = median_of(ratios(one.tokens_per_s[SECURE], one.tokens_per_s[PLAIN]))
        same = "yes" if one.is_same else "no"
        made.rows.append((f"{delay_ms:g} ms", *speeds, str(ratio), f"{one.extra_ms:+.1f}", same))
        made.measured[f"{delay_ms:g}"] = asdict(one)
    made.notes.append(
        "Ratios: medians over pairs. New links: the first token over new connections less the next one over the same "
        "connections, in the median, TLS less plain text. A handshake takes one round trip of each link that is new."
    )
    return made


async def _run(options: Options, console: Console) -> dict[float, DelayMeasurement]:
    return {delay_ms: await measure(delay_ms, options, console) for delay_ms in options.delays_ms}


def main() -> None:
    """Measure and print."""
    options = tyro.cli(Options)
    torch.set_num_threads(1)
    quiet_libraries()
    console = make_console()
    try:
        found = asyncio.run(_run(options, console))
    except RegistryError as error:
        raise SystemExit(f"tls: {error}") from None
    sheet(found, options).finish(console, record=options.record, path=options.json)


if __name__ == "__main__":
    main()
