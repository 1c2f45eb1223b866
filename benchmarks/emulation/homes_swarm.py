"""A swarm whose machines are at home: programs as a user starts them, each with a home folder of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.emulation.homes import HomesNetwork
from benchmarks.emulation.json_program import ANSWER_S, JsonProgram, json_program
from client.tools.demo.programs import RunningProgram, start_program
from swarm.demo import TARGET
from swarm.directory.identity import Identity
from swarm.link.endpoint import first_stop

DHT_PORT: Final = 31_337


class HomesClient:
    """A client's program.

    Attributes:
        listed: what the directory says of each peer: `address`, `reach`, and `at`, when that was first seen.
    """

    def __init__(self, program: JsonProgram) -> None:
        self.listed: dict[str, dict[str, Any]] = {}
        self._program = program

    async def generate(self, job: dict[str, Any]) -> dict[str, Any]:
        """One text; what the program tells of it at its end.

        Args:
            job: see `benchmarks.emulation.homes_client`.

        Raises:
            SwarmError: the program has ended.
            TimeoutError: it takes too long.
        """
        await self._program.send(job)
        return await self.finish()

    async def begin(self, job: dict[str, Any], pieces: int) -> None:
        """Begin a text, and return once so many pieces of it came; errors as of `generate`."""
        await self._program.send(job)
        await self._hear(lambda told: told.get("pieces") == pieces or told["event"] == "told")

    async def finish(self) -> dict[str, Any]:
        """The end of a text that was begun; errors as of `generate`."""
        return await self._hear(lambda told: told["event"] == "told")

    async def wait_up(self, *peers: str) -> None:
        """Wait until the model is there and these peers are listed; errors as of `generate`."""
        await self._hear(lambda told: told["event"] == "up")
        while not set(peers) <= set(self.listed):
            await self._hear(lambda told: told["event"] == "listed")

    async def _hear(self, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async with asyncio.timeout(ANSWER_S):
            while True:
                told = await self._program.next()
                if told["event"] == "listed":
                    self.listed[told["peer"]] = told
                if is_it(told):
                    return told


@dataclass(slots=True)
class HomesSwarm:
    """The programs of a swarm in homes, by the machines that they run on.

    Attributes:
        peers: Peer ids by machine.
        started_at: When each program was started, on this machine's monotonic clock.
        settings: Further variables of all programs' environments, each `NAME=VALUE`.
    """

    world: HomesNetwork
    folder: Path
    stack: AsyncExitStack
    programs: dict[str, RunningProgram] = field(default_factory=dict)
    peers: dict[str, str] = field(default_factory=dict)
    started_at: dict[str, float] = field(default_factory=dict)
    settings: tuple[str, ...] = ()

    def inside(self, machine: str) -> list[str]:
        """What a program on a machine is run by: its network, and a configuration folder of its own."""
        home = self.folder / machine
        settings = [f"XDG_CONFIG_HOME={home / 'config'}", f"XDG_CACHE_HOME={self.folder / 'cache'}"]
        return self.world.command(machine, ["env", *settings, *self.settings])

    async def bootstrap(self, machine: str, *options: str, join: Sequence[str] = (), ipv6: bool = False) -> str:
        """Run `swarm bootstrap` on a public host; its multiaddress.

        Args:
            ipv6: whether it is reached by IPv6.

        Raises:
            RegistryError: it did not start.
        """
        host = self.world.address6(machine) if ipv6 else self.world.address(machine)
        arguments = ["swarm.cli", "bootstrap", "--host", host, "--port", str(DHT_PORT), *options]
        arguments += [word for peer in join for word in ("--join", peer)]
        program = await self._start(machine, arguments)
        return await program.wait_for(r"/ip[46]/\S+")

    async def serve(self, machine: str, layers: str, peers: Sequence[str], *options: str) -> RunningProgram:
        """Run `node serve` with no options of the network; returns at once."""
        arguments = ["node.cli", "serve", str(TARGET), "--layers", layers, *options]
        return await self._start(machine, [*arguments, *(word for peer in peers for word in ("--join", peer))])

    async def client(self, machine: str, peers: Sequence[str]) -> HomesClient:
        """Run a client; returns once it has joined."""
        arguments = ["benchmarks.emulation.homes_client", *peers]
        running = json_program(f"client on {machine}", arguments, self.folder, self.inside(machine))
        program = await self.stack.enter_async_context(running)
        await program.hear("joined")
        return HomesClient(program)

    def relay_of(self, client: HomesClient, machine: str) -> str:
        """The machine that lends the relay through which another one is reached, as the client's directory says."""
        address = client.listed[self.peers[machine]]["address"]
        relay = first_stop(address).rpartition(":")[0]
        return next(name for name in self.programs if self.world.public_address(name) == relay)

    def kill(self, machine: str) -> None:
        """End a machine's program, and what it started, without a word (SIGKILL)."""
        process = self.programs[machine].process
        if process.returncode is None:
            root = psutil.Process(process.pid)
            for member in [root, *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    member.kill()

    def dismiss(self) -> None:
        """Ask all programs to end (SIGTERM), so that each need not wait for the one before."""
        for program in self.programs.values():
            if program.process.returncode is None:
                program.process.terminate()

    async def _start(self, machine: str, arguments: Sequence[str]) -> RunningProgram:
        key = self.folder / machine / "config" / "canopy" / "identity.key"
        key.parent.mkdir(parents=True, exist_ok=True)
        self.peers[machine] = (await asyncio.to_thread(Identity.load_or_create, key)).peer_id
        self.started_at[machine] = time.monotonic()
        starting = start_program(machine, arguments, self.folder, self.inside(machine))
        self.programs[machine] = await self.stack.enter_async_context(starting)
        return self.programs[machine]


@asynccontextmanager
async def open_homes_swarm(world: HomesNetwork, folder: Path) -> AsyncIterator[HomesSwarm]:
    """A swarm without programs yet; leaving ends those that were started."""
    async with AsyncExitStack() as stack:
        swarm = HomesSwarm(world, folder, stack)
        try:
            yield swarm
        finally:
            swarm.dismiss()
