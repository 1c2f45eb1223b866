"""The demo's swarm: a bootstrap peer, three nodes and a proxy for the links' delay, each a program of its own."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from client.tools.demo.delay_proxy import free_ports
from client.tools.demo.link_shape import LinkShape
from client.tools.demo.programs import start_program
from swarm.base.errors import RouteError
from swarm.demo import TARGET

if TYPE_CHECKING:
    from client.library.aio import AsyncSwarm

SPANS = ("0-4", "4-8", "8-12")
COVER_ATTEMPTS = 40


@asynccontextmanager
async def demo_swarm(
    delay_ms: float, console: Console, model: Path = TARGET, spans: tuple[str, ...] = SPANS
) -> AsyncIterator[str]:
    """Start the swarm; yields the bootstrap peer's address once every node serves.

    Meanwhile torch and transformers are imported, which takes seconds.

    Raises:
        SwarmError: a program did not start.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="canopy-demo-")))
        boot = ["swarm.cli", "bootstrap", "--host", "127.0.0.1", "--port", "0", "--identity", str(folder / "boot.key")]
        bootstrap = await stack.enter_async_context(start_program("bootstrap", boot, folder))
        ports = free_ports(2 * len(spans))
        pairs = list(zip(ports[::2], ports[1::2], strict=True))
        shape = json.dumps(asdict(LinkShape(delay_ms=delay_ms)))
        links = ["client.tools.demo.delay_proxy", shape, *(f"{listen}:{target}" for listen, target in pairs)]
        await stack.enter_async_context(start_program("links", links, folder))
        peer = await bootstrap.wait_for(r"/ip4/\S+")
        nodes = []
        for span, (listen, target) in zip(spans, pairs, strict=True):
            serve = ["node.cli", "serve", str(model), "--layers", span, "--join", peer, "--host", "127.0.0.1"]
            serve += ["--port", str(target), "--announce-address", f"127.0.0.1:{listen}", "--threads", "1"]
            serve += ["--identity", str(folder / f"{span}.key"), "--dtype", "float32"]
            nodes.append(await stack.enter_async_context(start_program(f"node {span}", serve, folder)))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(_load))
            for span, node in zip(spans, nodes, strict=True):
                await node.wait_for("serving at")
                console.print(f"  node serve {model.name} --layers {span}: up")
        yield peer


async def wait_covered(swarm: AsyncSwarm, console: Console) -> None:
    """Wait until the client finds a chain over all layers.

    Raises:
        RouteError: it finds none in 20 s.
    """
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


def _load() -> None:
    """Import torch and transformers, which takes seconds, while the nodes do the same."""
    import client.library.aio  # noqa: F401
    from swarm.base.library_logging import quiet_libraries

    quiet_libraries()
