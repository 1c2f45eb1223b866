"""The programs of the paths benchmark: a relay, a machine at home that serves, and whoever dials it.

    python -m benchmarks.emulation.path_ends relay HOST
    python -m benchmarks.emulation.path_ends machine RELAY [map]
    python -m benchmarks.emulation.path_ends dialler [HOST]

They are made of the parts that nodes and clients are made of; what is left out is the model. A dialler with a HOST can
be called there.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from typing import Any, Final

import grpc.aio

from benchmarks.emulation.json_program import jobs, tell
from benchmarks.emulation.path_flow import flow_server, measure_flow
from node.reach.circuits import Circuits, LocalServer
from node.reach.punch import PunchAnswerer
from node.reach.standing import PunchRequest, Standing, StandingOptions
from swarm.discovery.address_proof import who_answer
from swarm.discovery.dialable import DialPolicy
from swarm.discovery.identity import Identity
from swarm.discovery.interfaces import interface_addresses
from swarm.gateway.messages import PCP_NONCE_BYTES
from swarm.gateway.ports import PcpRouter, PortMapper
from swarm.gateway.routes import default_gateways
from swarm.ids import PeerId
from swarm.relay.server import RelayServer
from swarm.runtime.tasks import TaskScope
from swarm.transport.certificate import ServerCertificate
from swarm.transport.dial import CHANNEL_OPTIONS, Dialer
from swarm.transport.endpoint import Endpoint
from swarm.ways.call_back import CallBackListener, CallBackWay, ExpectedCalls
from swarm.ways.local_dialler import LocalDialler, open_ways

LENT_MBIT: Final = 10_000.0
"""Above every link: what the relay itself costs is measured, not its limit."""
STAND_S: Final = 20.0


async def be_relay(host: str) -> None:
    """Lend a relay until standard input closes."""
    owner = Identity.ephemeral()

    async def sign(nonce: bytes) -> bytes:
        return who_answer(owner, nonce)

    async with RelayServer(owner.peer_id, sign, LENT_MBIT).listening(host, 0) as port:
        tell("ready", address=f"{host}:{port}")
        async for _ in jobs():
            pass


async def be_machine(relay: str, *, maps: bool) -> None:
    """Serve, in plain text too, and stand at a relay until standard input closes."""
    identity = Identity.ephemeral()
    certificate = ServerCertificate.fresh(identity.peer_id)
    server, port = flow_server("0.0.0.0", certificate)
    plain, plain_port = flow_server("0.0.0.0", None)
    await server.start()
    await plain.start()
    async with AsyncExitStack() as stack:
        scope = await stack.enter_async_context(TaskScope())
        circuits = Circuits(LocalServer("0.0.0.0", port), scope)
        punches = PunchAnswerer(circuits.adopt)

        async def punch(request: PunchRequest) -> None:
            await punches.answer(request.relay, request.token, request.addresses)

        async def none() -> tuple[()]:
            return ()

        options = StandingOptions(DialPolicy(only_public=False), only=relay, on_punch=punch)
        standing = Standing(identity, circuits, none, options)
        scope.spawn(standing.run())
        if not await standing.stands(STAND_S):
            sys.exit(f"no relay: {'; '.join(standing.troubles)}")
        mapped = await _map(port, stack) if maps else None
        shown = certificate.der.hex()
        tell("ready", peer=identity.peer_id, certificate=shown, port=port, plain_port=plain_port, mapped=mapped)
        async for _ in jobs():
            pass
    await server.stop(None)
    await plain.stop(None)


async def _map(port: int, stack: AsyncExitStack) -> str:
    """Have the router map a port; `host:port` outside."""
    gateways = default_gateways(interface_addresses())
    mapper = PortMapper(port, lambda: [PcpRouter(str(one), port, os.urandom(PCP_NONCE_BYTES)) for one in gateways])
    stack.push_async_callback(mapper.close)
    return (await mapper.open()).address


async def be_dialler(host: str | None = None) -> None:
    """Measure what it is asked to, until standard input closes."""
    async with dialler_ways(host) as ways:
        tell("ready")
        async for job in jobs():
            tell("measured", **await measure(job, ways))


@asynccontextmanager
async def dialler_ways(host: str | None) -> AsyncIterator[LocalDialler | None]:
    """Ways past relays; who can be called at a host is called."""
    async with AsyncExitStack() as stack:
        ways = await stack.enter_async_context(open_ways())
        if ways is not None and host is not None:
            calls = ExpectedCalls()
            port = await stack.enter_async_context(CallBackListener.listen(calls, host))
            ways.choice.add(CallBackWay(calls, lambda: f"{host}:{port}"))
        yield ways


async def measure(job: dict[str, Any], ways: LocalDialler | None) -> dict[str, Any]:
    """One new connection: its times and its path."""
    if "plain" in job:
        async with grpc.aio.insecure_channel(job["plain"], options=CHANNEL_OPTIONS) as channel:
            return {**asdict(await measure_flow(channel, job["seconds"])), "path": "direct"}
    endpoint = Endpoint(PeerId(job["peer"]), job["address"], bytes.fromhex(job["certificate"]))
    async with Dialer(ways=ways) as dialer:
        times = await measure_flow(dialer.channel(endpoint), job["seconds"])
        path = dialer.path(endpoint)
        return {**asdict(times), "path": None if path is None else path.value}


def main() -> None:
    """Entry point."""
    match sys.argv[1:]:
        case ["relay", host]:
            asyncio.run(be_relay(host))
        case ["machine", relay, *more]:
            asyncio.run(be_machine(relay, maps=more == ["map"]))
        case ["dialler", *hosts]:
            asyncio.run(be_dialler(hosts[0] if hosts else None))
        case _:
            sys.exit(f"no such part: {sys.argv[1:]}")


if __name__ == "__main__":
    main()
