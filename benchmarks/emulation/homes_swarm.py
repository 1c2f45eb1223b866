"""A swarm whose machines are at home: programs as a user starts them, each with a home folder of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.emulation.homes import HomesNetwork
from client.demo.programs import STOP_TIMEOUT_S, RunningProgram, end_with_parent, start_program
from swarm.demo import TARGET
from swarm.discovery.identity import Identity
from swarm.errors import SwarmError

DHT_PORT: Final = 31_337
CLIENT_S: Final = 120.0
"""How long a client may take to do anything that it is asked."""


class MachineTexts:
    """A client's program: jobs go in, events come out."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self.listed: dict[str, dict[str, Any]] = {}
        """What the directory says of each peer: `address`, `reach`, and `at`, when that was first seen."""

    async def generate(self, job: dict[str, Any], after_pieces: int | None = None) -> dict[str, Any]:
        """One text; what the program told of it.

        Args:
            job: see `benchmarks.emulation.homes_client`.
            after_pieces: None; else return as soon as so many pieces of the text came, and `finish` it later.
        """
        assert self._process.stdin is not None, "piped"
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        await self._process.stdin.drain()
        return await self.hear("told", after_pieces)

    async def finish(self) -> dict[str, Any]:
        """The end of a text that was begun."""
        return await self.hear("told")

    async def hear(self, event: str, after_pieces: int | None = None) -> dict[str, Any]:
        """The next event of this kind, or that many pieces of a text.

        Raises:
            SwarmError: the program ended, or took too long.
        """
        async with asyncio.timeout(CLIENT_S):
            while True:
                told = await self._next()
                if told["event"] == event or (after_pieces is not None and told.get("pieces") == after_pieces):
                    return told

    async def wait_listed(self, *peers: str) -> None:
        """Wait until the directory lists these.

        Raises:
            SwarmError: the program ended, or took too long.
        """
        async with asyncio.timeout(CLIENT_S):
            while not set(peers) <= set(self.listed):
                await self._next()

    async def _next(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "piped"
        line = await self._process.stdout.readline()
        if not line:
            last = (self._log.read_text(encoding="utf-8").strip().splitlines() or ["it said nothing"])[-1]
            raise SwarmError(f"the client has ended: {last}")
        told: dict[str, Any] = json.loads(line)
        if told["event"] == "listed":
            self.listed[told["peer"]] = told
        return told


@dataclass(slots=True)
class HomesSwarm:
    """The programs of a swarm in homes, by the machines that they run on.

    Attributes:
        world: The network.
        folder: Where keys and logs go.
        stack: Ends the programs.
        programs: By machine.
        peers: Peer ids by machine.
        started_at: When each program was started, on this machine's monotonic clock.
    """

    world: HomesNetwork
    folder: Path
    stack: AsyncExitStack
    programs: dict[str, RunningProgram] = field(default_factory=dict)
    peers: dict[str, str] = field(default_factory=dict)
    started_at: dict[str, float] = field(default_factory=dict)

    def inside(self, machine: str) -> list[str]:
        """What a program on a machine is run by: its network, and a configuration folder of its own."""
        home = self.folder / machine
        settings = [f"XDG_CONFIG_HOME={home / 'config'}", f"XDG_CACHE_HOME={self.folder / 'cache'}"]
        return self.world.command(machine, ["env", *settings])

    async def bootstrap(self, machine: str, *options: str, join: Sequence[str] = ()) -> str:
        """Run `swarm bootstrap` on a public host; its multiaddress.

        Raises:
            RegistryError: it did not start.
        """
        arguments = ["swarm.cli", "bootstrap", "--host", self.world.address(machine), "--port", str(DHT_PORT), *options]
        arguments += [word for peer in join for word in ("--join", peer)]
        program = await self._start(machine, arguments)
        return await program.wait_for(r"/ip4/\S+")

    async def serve(self, machine: str, layers: str, peers: Sequence[str], *options: str) -> RunningProgram:
        """Run `node serve` with no options of the network; returns at once."""
        arguments = ["node.cli", "serve", str(TARGET), "--layers", layers, *options]
        return await self._start(machine, [*arguments, *(word for peer in peers for word in ("--join", peer))])

    async def client(self, machine: str, peers: Sequence[str]) -> MachineTexts:
        """Run a client; returns once it has joined."""
        log = self.folder / f"client on {machine}.log"
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(*self.inside(machine), sys.executable, "-m", "benchmarks.emulation.homes_client", *peers),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self.stack.push_async_callback(_end, process)
        made = MachineTexts(process, log)
        await made.hear("joined")
        return made

    def kill(self, machine: str) -> None:
        """End a machine's program, and what it started, without a word (SIGKILL)."""
        process = self.programs[machine].process
        if process.returncode is None:
            root = psutil.Process(process.pid)
            for member in [root, *root.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    member.kill()

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
        yield HomesSwarm(world, folder, stack)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close a client's standard input, after which it ends."""
    assert process.stdin is not None, "piped"
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
