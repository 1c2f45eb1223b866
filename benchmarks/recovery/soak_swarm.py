"""The swarm of the soak: nodes that die and come back, clients in processes of their own, and what happened to them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.emulation.process_monitor import ProcessMonitor
from benchmarks.emulation.swarm import SPANS
from benchmarks.recovery.soak_client import SoakText
from client.demo.delay_proxy import free_ports
from client.demo.programs import RunningProgram, start_program
from swarm.demo import TARGET
from swarm.discovery.dht.registry import DhtConfig, DhtRegistry
from swarm.discovery.node_record import NodeState
from swarm.discovery.registry import RECORD_TTL_S
from swarm.errors import RegistryError

LISTED_S = 90.0
"""A node that is not listed by then will not be."""
GONE_S = 10.0
"""How long the processes of a program that ended may take to end."""


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """What the clients do, over and over.

    Attributes:
        clients: How many clients.
        texts: Different texts of each client.
        new_tokens: New tokens of each text.
        nodes: Tree nodes per sweep (K).
    """

    clients: int
    texts: int
    new_tokens: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill. Times are seconds since the first kill could come.

    Attributes:
        name: Which node.
        at_s: When it was killed.
        listed_s: From the kill until it is listed again.
    """

    name: str
    at_s: float
    listed_s: float


@dataclass(slots=True)
class Replica:
    """A node that is killed and comes back as the same peer.

    Attributes:
        name: Its name.
        command: How it is started.
        folder: Where its logs lie.
        lives: How often it was started.
        peer: Its peer id, once it serves.
        running: Its program.
    """

    name: str
    command: Sequence[str]
    folder: Path
    lives: int = 0
    peer: str = ""
    running: RunningProgram | None = None
    _held: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def life(self) -> str:
        """Which of its runs this is, for a person."""
        return f"{self.name}, life {self.lives}"

    async def start(self) -> None:
        """Start it."""
        self.lives += 1
        program = start_program(f"{self.name}-{self.lives}", self.command, self.folder)
        self.running = await self._held.enter_async_context(program)

    async def serving(self) -> None:
        """Wait until it says that it serves.

        Raises:
            RegistryError: it does not.
        """
        assert self.running is not None
        self.peer = (await self.running.wait_for(r"serving at \S+ as \S+")).split()[-1]

    async def kill(self) -> bool:
        """End it as `kill -9` does; whether it still ran."""
        assert self.running is not None
        runs = self.running.process.returncode is None
        if runs:
            self.running.process.kill()
        await self.running.process.wait()
        return runs

    async def leave(self) -> None:
        """End it as Ctrl-C does."""
        await self._held.aclose()


@dataclass(slots=True)
class SoakSwarm:
    """A swarm that is up.

    Attributes:
        replicas: Its nodes, by name.
        bootstrap: The bootstrap peer's program.
        clients: The clients' programs, by name.
        results: The clients' measurements.
        registry: The directory, as a client sees it.
        watch: Memory and processes of all programs.
        began: Time of day when the first kill could come.
        kills: Kills so far.
        over: Runs of nodes that ended.
        wrong: What went wrong with programs.
    """

    replicas: dict[str, Replica]
    bootstrap: RunningProgram
    clients: dict[str, RunningProgram]
    results: Sequence[Path]
    registry: DhtRegistry
    watch: ProcessMonitor
    began: float = 0.0
    kills: list[Kill] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def elapsed_s(self) -> float:
        """Since the first kill could come."""
        return time.time() - self.began

    def texts(self) -> list[list[SoakText]]:
        """All texts so far, of each client."""
        return [_read(path) for path in self.results]

    def look(self) -> None:
        """Note the memory and the processes of all that runs."""
        nodes = {one.life: one.running for one in self.replicas.values() if one.running is not None}
        programs = {"bootstrap": self.bootstrap, **self.clients, **nodes}
        running = {name: one.process.pid for name, one in programs.items() if one.process.returncode is None}
        self.watch.look(running, self.elapsed_s)

    async def kill(self, names: Sequence[str]) -> None:
        """Kill these at once, start them again, and wait until they are listed again.

        Raises:
            RegistryError: one is not in time.
        """
        self.look()
        at_s, killed_at = self.elapsed_s, time.time()
        killed = [self.replicas[name] for name in names]
        lives = [replica.life for replica in killed]
        for replica in killed:
            if not await replica.kill():
                self.wrong.append(f"{replica.life} ended by itself")
        for replica in killed:
            await replica.start()
        for replica in killed:
            await replica.serving()
        await self.listed({replica.peer for replica in killed}, killed_at + RECORD_TTL_S)
        self.kills += [Kill(name, at_s, self.elapsed_s - at_s) for name in names]
        await self.gone(lives)

    async def listed(self, peers: Iterable[str], expiring_after: float = 0.0) -> None:
        """Wait until the directory has records of these peers that run out later than a time.

        Raises:
            RegistryError: it has not in time.
        """
        try:
            async with asyncio.timeout(LISTED_S):
                while True:
                    if (await self._listed(expiring_after)).issuperset(peers):
                        return
                    await asyncio.sleep(0.3)
        except TimeoutError:
            raise RegistryError(f"not listed within {LISTED_S:.0f} s: {', '.join(peers)}") from None

    async def _listed(self, expiring_after: float) -> set[str]:
        found = [
            record
            for model in await self.registry.models()
            for record in await self.registry.records(model.fingerprint, model.num_layers, within_s=0.0)
        ]
        return {one.peer for one in found if one.state is NodeState.SERVING and one.expires_at > expiring_after}

    async def wait_for_texts(self, since: float, texts: int = 1) -> None:
        """Wait until each client has generated so many texts that it began after this time of day.

        Raises:
            RegistryError: a client ended.
        """
        while any(sum(one.started_at > since and one.error is None for one in some) < texts for some in self.texts()):
            for name, client in self.clients.items():
                if client.process.returncode is not None:
                    raise RegistryError(f"{name} ended: {_last_line(client)}")
            await asyncio.sleep(0.3)

    async def gone(self, lives: Sequence[str]) -> None:
        """Programs ended: note which of their processes still run after a while."""
        self.over += lives
        until = time.monotonic() + GONE_S
        while left := self.watch.left_over(lives):
            if time.monotonic() > until:
                self.wrong += [f"left over of {one}" for one in left]
                return
            await asyncio.sleep(0.2)

    async def end(self) -> None:
        """Let the clients end their texts, then the nodes leave; note who did so by itself or does not go."""
        for name, client in self.clients.items():
            assert client.process.stdin is not None
            client.process.stdin.close()
            if await client.process.wait():
                self.wrong.append(f"{name} failed: {_last_line(client)}")
        for replica in self.replicas.values():
            if replica.running is None or replica.running.process.returncode is not None:
                self.wrong.append(f"{replica.life} ended by itself")
            await replica.leave()
        await self.gone([*self.clients, *(replica.life for replica in self.replicas.values())])


def _read(path: Path) -> list[SoakText]:
    """Whole lines only: the last one may still be written."""
    return [SoakText(**json.loads(line)) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def _last_line(program: RunningProgram) -> str:
    return (program.log.read_text().strip().splitlines() or ["it said nothing"])[-1]


@asynccontextmanager
async def open_soak_swarm(folder: Path, work: ClientLoad) -> AsyncIterator[SoakSwarm]:
    """Start the swarm, two replicas of each span, and its clients, which then generate every text once undisturbed.

    Raises:
        RegistryError: a program did not start.
    """
    watch = ProcessMonitor()
    async with AsyncExitStack() as stack:
        boot = ["swarm.cli", "bootstrap", "--host", "127.0.0.1", "--port", "0", "--identity", str(folder / "boot.key")]
        bootstrap = await stack.enter_async_context(start_program("bootstrap", boot, folder))
        peer = await bootstrap.wait_for(r"/ip4/\S+")
        replicas = _replicas(folder, peer)
        for replica in replicas.values():
            stack.push_async_callback(replica.leave)
            await replica.start()
        for replica in replicas.values():
            await replica.serving()
        registry = await stack.enter_async_context(DhtRegistry.open(DhtConfig(join=(peer,), client_mode=True)))
        results = [folder / f"client {number}.jsonl" for number in range(work.clients)]
        stage = SoakSwarm(replicas, bootstrap, {}, results, registry, watch)
        await stage.listed({replica.peer for replica in replicas.values()})
        for number, result in enumerate(results):
            job = {"peer": peer, "number": number, "result": str(result)}
            job |= {"texts": work.texts, "new_tokens": work.new_tokens, "nodes": work.nodes}
            started = start_program(f"client {number}", ["benchmarks.recovery.soak_client", json.dumps(job)], folder)
            stage.clients[f"client {number}"] = await stack.enter_async_context(started)
        await stage.wait_for_texts(0.0, work.texts)
        stage.began = time.time()
        yield stage


def _replicas(folder: Path, peer: str) -> dict[str, Replica]:
    replicas: dict[str, Replica] = {}
    names = [(f"{letter} {span}", span) for letter in "ab" for span in SPANS]
    for (name, span), port in zip(names, free_ports(len(names)), strict=True):
        serve = ["node.cli", "serve", str(TARGET), "--layers", span, "--join", peer, "--host", "127.0.0.1"]
        serve += ["--port", str(port), "--threads", "1", "--identity", str(folder / f"{name}.key")]
        replicas[name] = Replica(name, serve, folder)
    return replicas
