"""`make demo`: a bootstrap peer, three nodes and a client on this machine; text streams, then a table compares.

The streamed text is a client's first one: how much it speculates, it chooses while it learns what this swarm is like.

Everything is started as a user would start it, and nothing is left running. DELAY_MS is each link's one-way delay.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from client.demo.delay_proxy import free_ports
from client.demo.link_shape import LinkShape
from client.demo.programs import start_program
from client.stats import Result
from swarm.demo import DRAFT, TARGET
from swarm.errors import RouteError, SwarmError
from swarm.runtime.console import make_console

if TYPE_CHECKING:
    from client.library.aio import AsyncSwarm

SPANS = ("0-4", "4-8", "8-12")
PROMPT = "It was a dark night, and the old captain"
TOKENS = 64
WAYS = {"as it comes": None, "a tree of 32 at a time": 32, "plain decoding": 0}
"""Tree nodes per sweep; None: what goodput chooses, in as many sweeps at once as it chooses."""
SEED = 11
TEMPERATURE = 0.7
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 8.0
COVER_ATTEMPTS = 40


async def demo(delay_ms: float, console: Console) -> None:
    """Run it all.

    Raises:
        SwarmError: something did not start.
    """
    console.print(f"starting a bootstrap peer and {len(SPANS)} nodes; every link has {delay_ms:g} ms one-way delay")
    async with _swarm(delay_ms, console) as peer:
        from client.library.aio import AsyncSwarm  # loaded by now, see _load

        connecting = AsyncSwarm.connect(TARGET, peers=[peer], draft=DRAFT, threads=1, calibration=None)
        async with connecting as swarm:
            await _wait_covered(swarm, console)
            await swarm.generate(PROMPT, max_new_tokens=4, seed=SEED)  # opens the connections
            results = {}
            for number, (name, nodes) in enumerate(WAYS.items()):
                if number:
                    console.print(f"the same again, {name} …", style="dim")
                results[name] = await _stream(swarm, None if number else console, nodes)
    console.print(_table(results, delay_ms))


async def _stream(swarm: AsyncSwarm, console: Console | None, nodes: int | None) -> Result:
    """The text once more, by a client that does not remember it."""
    swarm.forget_texts()
    if console is not None:
        console.print(f"\n{PROMPT}", end="", style="bold")
    result = None
    pieces = swarm.stream(PROMPT, max_new_tokens=TOKENS, temperature=TEMPERATURE, seed=SEED, nodes=nodes)
    async for piece in pieces:
        if console is not None:
            console.print(piece.text, end="", markup=False)
        result = piece.result
    if console is not None:
        console.print("\n")
    assert result is not None, "a stream ends with a result or an error"
    return result


async def _wait_covered(swarm: AsyncSwarm, console: Console) -> None:
    """Until the directory that the client sees has a chain over all layers."""
    for attempt in range(COVER_ATTEMPTS):
        try:
            route = await swarm.route()
            break
        except RouteError:
            if attempt + 1 == COVER_ATTEMPTS:
                raise
            await asyncio.sleep(0.5)
    hops = " → ".join(f"{hop.peer[-6:]} ({hop.span})" for hop in route.hops)
    console.print(f"every layer is served: client → {hops} → client", soft_wrap=True)


def _table(results: dict[str, Result], delay_ms: float) -> Table:
    first, *_, plain = results.values()
    same = "yes" if all((one.tokens, one.text) == (plain.tokens, plain.text) for one in results.values()) else "NO"
    speed = first.stats.tokens_per_s / plain.stats.tokens_per_s
    table = Table(
        title=f"{len(SPANS)} nodes on this machine, links with {delay_ms:g} ms artificial one-way delay",
        caption=f"same text: {same} · {speed:.2f} × as fast · temperature {TEMPERATURE:g}, seed {SEED}, fp32",
    )
    for title in ("", "tokens/s", "trees", "acceptance length", "ms per sweep"):
        table.add_column(title, justify="right" if title else "left")
    for name, result in results.items():
        stats = result.stats
        cells = (f"{stats.tokens_per_s:.1f}", f"{stats.trees}", f"{stats.acceptance_length:.2f}")
        table.add_row(name, *cells, f"{stats.ms_per_sweep:.0f}")
    return table


@asynccontextmanager
async def _swarm(delay_ms: float, console: Console) -> AsyncIterator[str]:
    """Yields the bootstrap peer's address once three nodes are listed."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="canopy-demo-")))
        boot = ["swarm.cli", "bootstrap", "--host", "127.0.0.1", "--port", "0", "--identity", str(folder / "boot.key")]
        bootstrap = await stack.enter_async_context(start_program("bootstrap", boot, folder))
        ports = free_ports(2 * len(SPANS))
        pairs = list(zip(ports[::2], ports[1::2], strict=True))
        shape = json.dumps(asdict(LinkShape(delay_ms=delay_ms)))
        links = ["client.demo.delay_proxy", shape, *(f"{listen}:{target}" for listen, target in pairs)]
        await stack.enter_async_context(start_program("links", links, folder))
        peer = await bootstrap.wait_for(r"/ip4/\S+")
        nodes = []
        for span, (listen, target) in zip(SPANS, pairs, strict=True):
            serve = ["node.cli", "serve", str(TARGET), "--layers", span, "--join", peer, "--host", "127.0.0.1"]
            serve += ["--port", str(target), "--announce-address", f"127.0.0.1:{listen}", "--threads", "1"]
            serve += ["--identity", str(folder / f"{span}.key"), "--dtype", "float32"]
            nodes.append(await stack.enter_async_context(start_program(f"node {span}", serve, folder)))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(_load))
            for span, node in zip(SPANS, nodes, strict=True):
                await node.wait_for("serving at")
                console.print(f"  node serve demo-target --layers {span}: up")
        yield peer


def _load() -> None:
    """Import torch and transformers, which takes seconds, while the nodes do the same."""
    import client.library.aio  # noqa: F401
    from swarm.runtime.library_logging import quiet_libraries

    quiet_libraries()


async def _until_ended(delay_ms: float, console: Console) -> None:
    """Run the demo; SIGTERM and a closed terminal end it in order, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None, "called within asyncio.run"
    for signum in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    await demo(delay_ms, console)


def main() -> None:
    """Entry point; DELAY_MS comes from the environment."""
    console = make_console()
    try:
        asyncio.run(_until_ended(float(os.environ.get("DELAY_MS", "25")), console))
    except asyncio.CancelledError:
        sys.exit(143)
    except (SwarmError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)  # noqa: T201 - the command line's own output
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
