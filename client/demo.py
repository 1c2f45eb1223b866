"""`make demo`: a bootstrap peer, three nodes and a client on this machine; text streams, then a table compares.

Everything is started as a user would start it, and nothing is left running. DELAY_MS is each link's one-way delay.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from client.stats import Result
from swarm.demo import DRAFT, TARGET
from swarm.errors import RegistryError, RouteError, SwarmError

if TYPE_CHECKING:
    from client.aio import AsyncSwarm

SPANS = ("0-4", "4-8", "8-12")
PROMPT = "It was a dark night, and the old captain"
TOKENS = 64
NODES = 32
SEED = 11
TEMPERATURE = 0.7
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 8.0
COVER_ATTEMPTS = 40


@dataclass(frozen=True, slots=True)
class Running:
    """A started program and the file that its output goes to."""

    process: asyncio.subprocess.Process
    log: Path

    async def wait_for(self, pattern: str) -> str:
        """The first match in its output.

        Raises:
            RegistryError: it ended, or said nothing of the kind in time.
        """
        for _ in range(int(START_TIMEOUT_S / 0.1)):
            found = re.search(pattern, self.log.read_text())
            if found is not None:
                return found[0]
            if self.process.returncode is not None:
                break
            await asyncio.sleep(0.1)
        last = (self.log.read_text().strip().splitlines() or ["it said nothing"])[-1]
        raise RegistryError(f"{self.log.stem} did not start: {last}")


async def demo(delay_ms: float, console: Console) -> None:
    """Run it all.

    Raises:
        SwarmError: something did not start.
    """
    console.print(f"starting a bootstrap peer and {len(SPANS)} nodes; every link has {delay_ms:g} ms one-way delay")
    async with _swarm(delay_ms, console) as peer:
        from client.aio import AsyncSwarm  # loaded by now, see _load

        connecting = AsyncSwarm.connect(TARGET, peers=[peer], draft=DRAFT, nodes=NODES, threads=1)
        async with connecting as swarm:
            await _wait_covered(swarm, console)
            await swarm.generate(PROMPT, max_new_tokens=4, seed=SEED)  # opens the connections
            tree = await _stream(swarm, console, NODES)
            console.print("the same again without speculation …", style="dim")
            plain = await _stream(swarm, None, 0)
    console.print(_table(plain, tree, delay_ms))


async def _stream(swarm: AsyncSwarm, console: Console | None, nodes: int) -> Result:
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


def _table(plain: Result, tree: Result, delay_ms: float) -> Table:
    same = "yes" if plain.tokens == tree.tokens and plain.text == tree.text else "NO"
    speed = tree.stats.tokens_per_s / plain.stats.tokens_per_s
    table = Table(
        title=f"{len(SPANS)} nodes on this machine, links with {delay_ms:g} ms artificial one-way delay",
        caption=f"same text: {same} · {speed:.2f} × as fast · temperature {TEMPERATURE:g}, seed {SEED}, fp32",
    )
    for title in ("", "tokens/s", "sweeps", "acceptance length", "ms per sweep"):
        table.add_column(title, justify="right" if title else "left")
    for name, result in (("plain decoding", plain), (f"tree speculation, {NODES} nodes", tree)):
        stats = result.stats
        cells = (f"{stats.tokens_per_s:.1f}", f"{len(stats.sweeps)}", f"{stats.acceptance_length:.2f}")
        table.add_row(name, *cells, f"{stats.ms_per_sweep:.0f}")
    return table


@asynccontextmanager
async def _swarm(delay_ms: float, console: Console) -> AsyncIterator[str]:
    """Yields the bootstrap peer's address once three nodes are listed."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="canopy-demo-")))
        boot = ["swarm.cli", "bootstrap", "--host", "127.0.0.1", "--port", "0", "--identity", str(folder / "boot.key")]
        bootstrap = await stack.enter_async_context(_program("bootstrap", boot, folder))
        ports = _free_ports(2 * len(SPANS))
        pairs = list(zip(ports[::2], ports[1::2], strict=True))
        links = ["client.delay", str(delay_ms), *(f"{listen}:{target}" for listen, target in pairs)]
        await stack.enter_async_context(_program("links", links, folder))
        peer = await bootstrap.wait_for(r"/ip4/\S+")
        nodes = []
        for span, (listen, target) in zip(SPANS, pairs, strict=True):
            serve = ["node.cli", "serve", str(TARGET), "--layers", span, "--join", peer, "--host", "127.0.0.1"]
            serve += ["--port", str(target), "--announce-address", f"127.0.0.1:{listen}", "--threads", "1"]
            serve += ["--identity", str(folder / f"{span}.key")]
            nodes.append(await stack.enter_async_context(_program(f"node {span}", serve, folder)))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(_load))
            for span, node in zip(SPANS, nodes, strict=True):
                await node.wait_for("serving at")
                console.print(f"  node serve demo-target --layers {span}: up")
        yield peer


@asynccontextmanager
async def _program(name: str, arguments: Sequence[str], folder: Path) -> AsyncIterator[Running]:
    """Run one of Canopy's programs; leaving ends it, politely first."""
    log = folder / f"{name}.log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *arguments),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the demo alone, which ends them in order
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
    try:
        yield Running(process, log)
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _load() -> None:
    """Import torch and transformers, which takes seconds, while the nodes do the same."""
    import client.aio  # noqa: F401
    from swarm.quiet import quiet_libraries

    quiet_libraries()


def _end_with_parent() -> None:
    """In the child before exec: a SIGTERM when the demo dies, however it dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports


async def _until_ended(delay_ms: float, console: Console) -> None:
    """Run the demo; SIGTERM and a closed terminal end it in order, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None, "called within asyncio.run"
    for signum in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    await demo(delay_ms, console)


def main() -> None:
    """Entry point; DELAY_MS comes from the environment."""
    console = Console(highlight=False)
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
