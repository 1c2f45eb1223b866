"""Hosts joined by links with delay, rate, jitter, loss and cuts, on one machine; it measures itself before it is used.

    async with open_network(Plan(hosts=5, shape=LinkShape(delay_ms=25, mbit=100))) as net:
        await start(net.command(1, ["node", "serve", …, *net.node_options(1)]))
        await net.cut(1)

As root on Linux every host is a network namespace, and a process of its own carries the packets (TUN devices, no
netem). Elsewhere a shaping TCP proxy stands before every host; `net.kind` and `net.reason` say which it is and why.
Every call has taken effect when it returns. However this program ends, nothing is left behind.

    python -m benchmarks network --delay-ms 25 --mbit 100
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.emulation import packets
from benchmarks.emulation.namespaces import inside, obstacle
from client.tools.demo.delay_proxy import free_ports
from client.tools.demo.link_shape import Ends, LinkShape, matching_links
from swarm.base.errors import ConfigError, SwarmError

ROOT = Path(__file__).parents[2]
STOP_TIMEOUT_S = 5.0


class Emulator:
    """One process that answers each line `[number, verb, link, …]` with `[number, {…}]` once it has taken effect."""

    def __init__(self, process: asyncio.subprocess.Process, module: str) -> None:
        self._process = process
        self._module = module
        self._asking = asyncio.Lock()
        self._numbers = itertools.count()

    @classmethod
    async def start(cls, module: str, arguments: Sequence[str]) -> tuple[Emulator, dict[str, Any]]:
        """Run `python -m module`; the emulator and its first words.

        Raises:
            ConfigError: it says why it cannot.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C is this program's, whose end closes the pipe
        )
        emulator = cls(process, module)
        try:
            _, words = await emulator._hear()
            _refuse(words)
        except BaseException:
            await emulator.stop()
            raise
        return emulator, words

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, verb: str, link: Ends, *words: object) -> dict[str, Any]:
        """Have it do something; returns when that has taken effect.

        Raises:
            ConfigError: it says why it cannot.
        """
        assert self._process.stdin is not None, "piped"
        async with self._asking:
            number = next(self._numbers)
            self._process.stdin.write(json.dumps([number, verb, link, *words]).encode() + b"\n")
            answered: int | None = None
            while answered != number:  # the answer to a question that was cancelled may come first
                answered, answer = await self._hear()
        _refuse(answer)
        return answer

    async def stop(self) -> None:
        assert self._process.stdin is not None, "piped"
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _hear(self) -> tuple[int | None, dict[str, Any]]:
        assert self._process.stdout is not None, "piped"
        if line := await self._process.stdout.readline():
            number, answer = json.loads(line)
            return number, answer
        status = await self._process.wait()
        raise SwarmError(f"the network's process ({self._module}) has ended with exit status {status}: start it again")


def _refuse(answer: dict[str, Any]) -> None:
    if "error" in answer:
        raise ConfigError(answer["error"])


PORT = 4242
"""What a node listens on in its namespace."""
MAX_HOSTS = 254
MTU_BYTES = (576, 65_535)


class NetworkKind(StrEnum):
    """How the hosts are joined."""

    TUN = "tun"
    PROXY = "proxy"


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """What to build. Every link begins with the same shape.

    Attributes:
        mtu: Of every interface, in bytes.
        subnet: Of the hosts' IPv4 addresses.
        ipv6: Whether they have IPv6 addresses.
        inner: How many namespaces on no link there are.
    """

    hosts: int
    shape: LinkShape
    seed: int = 0
    """Of losses and jitter."""
    mtu: int = 1500
    """Bytes per packet: what the Internet has. 9,000 takes under half of the CPU per byte and makes losses coarser."""
    subnet: str = packets.SUBNET
    """The first three bytes of the hosts' IPv4 addresses. TUN alone."""
    ipv6: bool = False
    """Whether the hosts have IPv6 addresses too. TUN alone."""
    inner: int = 0
    """Namespaces to make besides, on no link, for machines behind the hosts. TUN alone."""

    def __post_init__(self) -> None:
        if not 2 <= self.hosts <= MAX_HOSTS:
            raise ConfigError(f"{self.hosts} hosts: a network has 2 to {MAX_HOSTS}")
        if not MTU_BYTES[0] <= self.mtu <= MTU_BYTES[1]:
            raise ConfigError(f"packets of {self.mtu} bytes: an MTU is {MTU_BYTES[0]} to {MTU_BYTES[1]}")


@dataclass(frozen=True, slots=True)
class CarriedTraffic:
    """What a TUN network has done so far.

    Attributes:
        dropped: Packets dropped by full queues, losses and cuts.
        cpu_s: CPU seconds of the process that carries them.
    """

    packets: int
    dropped: int
    cpu_s: float


class Network(ABC):
    """Hosts 0 … n-1. A link direction is `(source, target)`; None stands for every host."""

    kind: NetworkKind

    def __init__(self, plan: NetworkPlan, reason: str, links: Sequence[Ends]) -> None:
        self.plan = plan
        self.reason = reason
        self._shapes = dict.fromkeys(links, plan.shape)
        self._started: Emulator | None = None

    @abstractmethod
    def bind_address(self, host: int) -> tuple[str, int]:
        """Where a node on this host listens."""

    @abstractmethod
    def dial_address(self, host: int) -> tuple[str, int]:
        """Where the others reach it."""

    @abstractmethod
    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """The command line that runs another one on this host."""

    @abstractmethod
    def socket(self, host: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """A new socket of this process that is on that host."""

    @abstractmethod
    def shapes(self, near: int, far: int) -> tuple[LinkShape, LinkShape]:
        """What a connection that `near` opens to `far` goes through: there, back."""

    @abstractmethod
    async def _start(self) -> Emulator:
        """Start the process behind it."""

    def node_options(self, host: int) -> list[str]:
        """What `node serve` needs to be reached on this host."""
        (address, port), (dialled, dialled_port) = self.bind_address(host), self.dial_address(host)
        return ["--host", address, "--port", f"{port}", "--announce-address", f"{dialled}:{dialled_port}"]

    async def shape(self, source: int | None, target: int | None, shape: LinkShape) -> None:
        """Change one direction, for what is sent from now on.

        Raises:
            ConfigError: this kind of network has no such link, or cannot shape it so.
        """
        await self._order("shape", (source, target), asdict(shape))
        self._shapes.update(dict.fromkeys(matching_links((source, target), self._shapes), shape))

    async def cut_link(self, source: int | None, target: int | None) -> None:
        """Let nothing pass in this direction, nor what is on its way.

        Raises:
            ConfigError: this kind of network has no such link.
        """
        await self._order("cut", (source, target))

    async def restore_link(self, source: int | None, target: int | None) -> None:
        """Undo the `cut_link` of the same ends; another cut that names this link still holds.

        Raises:
            ConfigError: this kind of network has no such link.
        """
        await self._order("join", (source, target))

    async def cut(self, host: int) -> None:
        """Take a host off the network, both ways."""
        await self.cut_link(host, None)
        await self.cut_link(None, host)

    async def join(self, host: int) -> None:
        await self.restore_link(host, None)
        await self.restore_link(None, host)

    @property
    def emulator(self) -> Emulator:
        assert self._started is not None, "used within `async with`"
        return self._started

    async def __aenter__(self) -> Self:
        """Build it.

        Raises:
            ConfigError: the machine or the plan does not allow it.
        """
        self._started = await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.emulator.stop()

    async def _order(self, verb: str, ends: Ends, *words: object) -> None:
        if not matching_links(ends, self._shapes):
            source, target = ("any" if end is None else end for end in ends)
            raise ConfigError(f"this {self.kind} network of {self.plan.hosts} hosts has no link {source} → {target}")
        await self.emulator.ask(verb, ends, *words)


class TunNetwork(Network):
    """Every host is a network namespace with an address of its own; any pair has a link of its own."""

    kind = NetworkKind.TUN

    def __init__(self, plan: NetworkPlan, reason: str = "as asked") -> None:
        super().__init__(plan, reason, list(itertools.permutations(range(plan.hosts), 2)))
        self._namespaces: list[str] = []

    def address(self, host: int) -> str:
        """The host's IPv4 address; namespaces of other networks may have the same."""
        return packets.address(host, self.plan.subnet)

    def address6(self, host: int, network: int = 0) -> str:
        """The host's IPv6 address in its network 0, or the first one of the network 1 behind it. Needs IPv6."""
        return packets.address6(host, network)

    async def give(self, host: int, address: str) -> None:
        """Carry what is sent to this address to that host, which takes the address itself.

        Args:
            host: that had it or had it not.
            address: an IPv4 address outside the hosts' own, or an IPv6 one, for which all of its /64 stands.
        """
        await self.emulator.ask("give", (None, host), address)

    def bind_address(self, host: int) -> tuple[str, int]:
        return self.address(host), PORT

    def dial_address(self, host: int) -> tuple[str, int]:
        return self.address(host), PORT

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """In its namespace, or in an inner one, whose numbers follow the hosts'; the process id stays the same."""
        return ["nsenter", f"--net={self._namespaces[host]}", "--", *arguments]

    def socket(self, host: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        with inside(self._namespaces[host]):
            return socket.socket(socket.AF_INET, kind)

    def shapes(self, near: int, far: int) -> tuple[LinkShape, LinkShape]:
        return self._shapes[near, far], self._shapes[far, near]

    def namespace(self, host: int) -> str:
        """The path of a host's namespace, or of an inner one."""
        return self._namespaces[host]

    async def load(self) -> CarriedTraffic:
        """What it has done so far."""
        return CarriedTraffic(**await self.emulator.ask("load", (None, None)))

    async def _start(self) -> Emulator:
        plan = self.plan
        setup = packets.CarrierSetup(
            plan.hosts, plan.shape, plan.mtu, plan.seed, plan.subnet, ipv6=plan.ipv6, inner=plan.inner
        )
        emulator, words = await Emulator.start("benchmarks.emulation.packets", [json.dumps(asdict(setup))])
        self._namespaces = words["namespaces"]
        return emulator


class ProxyNetwork(Network):
    """Every host is a port of loopback behind a proxy, which cannot tell who dials.

    So its links are `(None, host)` and `(host, None)`. A host that dials passes through none of its own.
    """

    kind = NetworkKind.PROXY

    def __init__(self, plan: NetworkPlan, reason: str = "as asked") -> None:
        hosts = range(plan.hosts)
        super().__init__(plan, reason, [ends for host in hosts for ends in ((None, host), (host, None))])
        ports = free_ports(2 * plan.hosts)
        self._listen, self._target = ports[::2], ports[1::2]

    def bind_address(self, host: int) -> tuple[str, int]:
        return "127.0.0.1", self._target[host]

    def dial_address(self, host: int) -> tuple[str, int]:
        return "127.0.0.1", self._listen[host]

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        return list(arguments)

    def socket(self, host: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        return socket.socket(socket.AF_INET, kind)

    def shapes(self, near: int, far: int) -> tuple[LinkShape, LinkShape]:
        """Into and out of the host that is dialled."""
        return self._shapes[None, far], self._shapes[far, None]

    async def _start(self) -> Emulator:
        pairs = [f"{listen}:{target}" for listen, target in zip(self._listen, self._target, strict=True)]
        emulator, _ = await Emulator.start(
            "client.tools.demo.delay_proxy", [json.dumps(asdict(self.plan.shape)), *pairs]
        )
        return emulator


def open_network(plan: NetworkPlan, kind: NetworkKind | None = None) -> Network:
    """A network to use in `async with`: of the kind asked for, else the best that this machine allows.

    Raises:
        ConfigError: TUN devices are asked for and cannot be had.
    """
    if kind is NetworkKind.PROXY:
        return ProxyNetwork(plan)
    missing = obstacle()
    if missing is None:
        return TunNetwork(plan, "as asked" if kind else "network namespaces and TUN devices are allowed here")
    if kind is NetworkKind.TUN:
        raise ConfigError(f"no TUN network: {missing}; --kind proxy needs nothing")
    return ProxyNetwork(plan, missing)
