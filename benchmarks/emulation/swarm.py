"""A whole swarm, on the hosts of an emulated network or on loopback: a bootstrap peer, then a node per span."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.emulation.network import Network
from client.library.aio import AsyncSwarm
from client.library.session import SessionOpener
from client.tools.demo.programs import RunningProgram, start_program
from swarm.base.errors import RouteError
from swarm.demo import TARGET

SPANS = ("0-4", "4-8", "8-12")
STAR_PORT = 4_300
COVER_ATTEMPTS = 60


@dataclass(frozen=True, slots=True)
class RunningSwarm:
    """A swarm that is up.

    Attributes:
        nodes: Its programs, one per span.
        star: Addresses of star servers, if there are any.
    """

    peer: str
    nodes: tuple[RunningProgram, ...]
    star: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What nodes serve, one per span.

    Attributes:
        options: Further options of every `node serve`.
    """

    model: Path = TARGET
    spans: tuple[str, ...] = SPANS
    options: tuple[str, ...] = ("--device", "cpu")


DEMO = ServeOptions()


@asynccontextmanager
async def hosted_swarm(
    net: Network, folder: Path, served: ServeOptions = DEMO, *, star: bool = False
) -> AsyncIterator[RunningSwarm]:
    """Start it; leaving ends every program.

    Raises:
        RegistryError: a program did not start.
    """
    async with AsyncExitStack() as stack:
        boot = ["swarm.cli", "bootstrap", "--host", net.bind_address(0)[0], "--port", "0"]
        boot += ["--identity", str(folder / "bootstrap.key")]
        bootstrap = await stack.enter_async_context(start_program("bootstrap", boot, folder, net.command(0, [])))
        peer = await bootstrap.wait_for(r"/ip4/\S+")
        nodes, stars = [], []
        for host, span in enumerate(served.spans, 1):
            serve = ["node.cli", "serve", str(served.model), "--layers", span, "--join", peer, "--threads", "1"]
            name = f"{span} on host {host}"
            serve += ["--identity", str(folder / f"{name}.key"), *net.node_options(host), *served.options]
            nodes.append(await stack.enter_async_context(start_program(name, serve, folder, net.command(host, []))))
        for host, span in enumerate(served.spans if star else (), 1):
            listen = ["--host", net.bind_address(host)[0], "--port", str(STAR_PORT)]
            serve = ["benchmarks.speed.star", "--layers", span, *listen]
            stars.append(
                await stack.enter_async_context(start_program(f"star {span}", serve, folder, net.command(host, [])))
            )
        await asyncio.gather(
            *(node.wait_for("serving at") for node in nodes), *(one.wait_for("star at") for one in stars)
        )
        addresses = tuple(f"{net.bind_address(host)[0]}:{STAR_PORT}" for host in range(1, len(stars) + 1))
        yield RunningSwarm(peer, tuple(nodes), addresses)


@asynccontextmanager
async def local_swarm(folder: Path, served: ServeOptions = DEMO) -> AsyncIterator[tuple[str, list[RunningProgram]]]:
    """A bootstrap peer and three nodes on loopback; yields the peer's address and the nodes, which may still load."""
    async with AsyncExitStack() as stack:
        boot = ["swarm.cli", "bootstrap", "--host", "127.0.0.1", "--port", "0", "--identity", str(folder / "boot.key")]
        bootstrap = await stack.enter_async_context(start_program("bootstrap", boot, folder))
        peer = await bootstrap.wait_for(r"/ip4/\S+")
        nodes = []
        for span in served.spans:
            serve = ["node.cli", "serve", str(served.model), "--layers", span, "--join", peer, "--host", "127.0.0.1"]
            serve += ["--threads", "1", "--identity", str(folder / f"{span}.key"), *served.options]
            nodes.append(await stack.enter_async_context(start_program(span, serve, folder)))
        yield peer, nodes


async def covered(swarm: AsyncSwarm | SessionOpener) -> None:
    """Wait until the directory that the client sees has a chain over all layers."""
    for attempt in range(COVER_ATTEMPTS):
        try:
            await swarm.route()
            return
        except RouteError:
            if attempt + 1 == COVER_ATTEMPTS:
                raise
            await asyncio.sleep(0.5)
