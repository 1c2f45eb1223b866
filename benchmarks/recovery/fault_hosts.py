"""The swarm of a fault benchmark: three replicas per span on emulated hosts, which fail and come back.

A node that failed comes back with the same identity, layers and address. It is started again between texts and never
during one, because its start costs seconds of CPU that the others would miss.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.emulation.json_program import JsonProgram, json_program
from benchmarks.emulation.network import Network, TunNetwork
from benchmarks.emulation.swarm import SPANS
from benchmarks.recovery.fault_plan import Fault
from client.tools.demo.link_shape import LinkShape
from client.tools.demo.programs import RunningProgram, start_program
from swarm.base.errors import RegistryError
from swarm.demo import TARGET

REPLICAS = 3
START_ATTEMPTS = 3
SLOW = LinkShape(delay_ms=1_000, mbit=1)


@dataclass(slots=True)
class Host:
    """One node's machine.

    Attributes:
        peer: Its peer id, once it serves.
        is_dead: It was killed, or will be after this text.
    """

    number: int
    span: str
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    program: RunningProgram | None = None
    peer: str = ""
    is_dead: bool = False

    @property
    def name(self) -> str:
        return f"{self.span} {'abcdef'[(self.number - 1) // len(SPANS)]}"


class Hosts:
    """All of them, a bootstrap peer on host 0 and the client on the last one."""

    def __init__(self, net: Network, folder: Path) -> None:
        self._net = net
        self._folder = folder
        self._cuts: list[tuple[int | None, int | None]] = []
        self._slow: set[int] = set()
        self.peer = ""
        self.failed_starts = 0
        self.all = [Host(number, span) for number, span in enumerate(SPANS * REPLICAS, 1)]

    @property
    def client(self) -> int:
        return len(self.all) + 1

    @property
    def addresses(self) -> dict[str, str]:
        """Where each node listens, by its name."""
        return {host.name: "{}:{}".format(*self._net.dial_address(host.number)) for host in self.all}

    @property
    def dead(self) -> list[str]:
        """Peers that were killed and not started again."""
        return [host.peer for host in self.all if host.is_dead]

    def replicas(self, span: str) -> int:
        return sum(host.span == span and not host.is_dead for host in self.all)

    def of(self, peer: str) -> Host:
        return next(host for host in self.all if host.peer == peer)

    async def start(self, host: Host) -> None:
        """Start its node and wait until it is listed."""
        serve = ["benchmarks.recovery.faulty_node", "serve", str(TARGET), "--layers", host.span, "--join", self.peer]
        serve += ["--threads", "1", "--identity", str(self._folder / f"{host.name}.key")]
        serve += self._net.node_options(host.number)
        inside = self._net.command(host.number, [])
        for attempt in range(START_ATTEMPTS):
            host.program = await host.stack.enter_async_context(start_program(host.name, serve, self._folder, inside))
            try:
                said = await host.program.wait_for(r"serving at \S+ as \S+")
                break
            except RegistryError:  # counted, and shown by the table
                self.failed_starts += 1
                if attempt + 1 == START_ATTEMPTS:
                    raise
        host.peer, host.is_dead = said.split()[-1], False

    async def revive(self) -> None:
        async with asyncio.TaskGroup() as group:
            for host in self.all:
                if host.is_dead:
                    group.create_task(self._again(host))

    async def _again(self, host: Host) -> None:
        await host.stack.aclose()
        await self.start(host)

    async def inject(self, fault: Fault, host: Host, before: int) -> None:
        """Let a fault happen now; `before` is the host that sends to this one."""
        assert host.program is not None
        match fault:
            case Fault.KILL:
                self.signal(host, signal.SIGKILL)
                host.is_dead = True
            case Fault.HANG:
                self.signal(host, signal.SIGSTOP)
                host.is_dead = True
            case Fault.CUT:
                await self._cut(host.number, None)
                await self._cut(None, host.number)
            case Fault.ONE_WAY:
                await self._cut(before if isinstance(self._net, TunNetwork) else None, host.number)
            case Fault.SLOW:
                self._slow.add(host.number)
                await self._net.shape(None, host.number, SLOW)
                await self._net.shape(host.number, None, SLOW)
            case Fault.CORRUPT:
                self.signal(host, signal.SIGUSR2)

    def signal(self, host: Host, number: int) -> None:
        """Send a signal to a node's process; a stopped one stops with all its descendants."""
        assert host.program is not None
        process = host.program.process
        if process.returncode is not None:
            return
        if number == signal.SIGSTOP:
            for member in psutil.Process(process.pid).children(recursive=True):
                member.suspend()
        os.kill(process.pid, number)

    async def leave(self, host: Host) -> None:
        """Ask a node to leave politely."""
        self.signal(host, signal.SIGTERM)
        host.is_dead = True

    async def restore(self) -> None:
        """Between texts: the network is whole again, and whoever was stopped or is leaving is killed."""
        for ends in self._cuts:
            await self._net.restore_link(*ends)
        for number in self._slow:
            await self._net.shape(None, number, self._net.plan.shape)
            await self._net.shape(number, None, self._net.plan.shape)
        self._cuts, self._slow = [], set()
        for host in self.all:
            if host.is_dead and host.program is not None and host.program.process.returncode is None:
                for member in psutil.Process(host.program.process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        member.kill()
                self.signal(host, signal.SIGKILL)
                await host.program.process.wait()

    async def _cut(self, source: int | None, target: int | None) -> None:
        self._cuts.append((source, target))
        await self._net.cut_link(source, target)


@asynccontextmanager
async def open_hosts(net: Network, folder: Path) -> AsyncIterator[Hosts]:
    hosts = Hosts(net, folder)
    async with AsyncExitStack() as stack:
        boot = ["swarm.cli", "bootstrap", "--host", net.bind_address(0)[0], "--port", "0"]
        boot += ["--identity", str(folder / "bootstrap.key")]
        bootstrap = await stack.enter_async_context(start_program("bootstrap", boot, folder, net.command(0, [])))
        hosts.peer = await bootstrap.wait_for(r"/ip4/\S+")
        try:
            for first in range(0, len(hosts.all), len(SPANS)):  # a few at a time: each takes seconds of CPU
                async with asyncio.TaskGroup() as group:
                    for host in hosts.all[first : first + len(SPANS)]:
                        group.create_task(hosts.start(host))
            yield hosts
        finally:
            await hosts.restore()
            for host in hosts.all:
                await host.stack.aclose()


@asynccontextmanager
async def open_client(hosts: Hosts, net: Network, folder: Path) -> AsyncIterator[JsonProgram]:
    """Start the client's program and wait until it sees a whole chain."""
    arguments = ["benchmarks.recovery.fault_client", hosts.peer]
    async with json_program("client", arguments, folder, net.command(hosts.client, [])) as client:
        await client.hear("up")
        yield client
