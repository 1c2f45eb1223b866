"""A small Internet on one machine: public hosts, and homes whose machines are behind routers.

    async with HomesNetwork(HomesPlan((Home("A"), Home("B", RouterKind.SYMMETRIC)))) as world:
        await start(world.command("A", ["node", "serve", …]))
        await world.flush("A")

Public hosts and the homes' routers are hosts of a `TunNetwork`: 25 ms one way between any two and 100 Mbit/s each, by
default. Behind a router is a LAN without delay. Addresses look public, because programs treat private ones otherwise;
nothing leads out of the namespaces. They have no names: the kernel takes them when this program ends, however it ends.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks.emulation import home_router, namespaces
from benchmarks.emulation.home_router import (
    BEHIND_CARRIER,
    CARRIER_IPV4,
    FIRST_MACHINE,
    LAN_DEVICE,
    LAN_IPV4,
    MACHINE_DEVICE,
    PUBLIC_DEVICE,
    ROUTER,
    RouterKind,
    RouterSetup,
    UnaskedTraffic,
)
from benchmarks.emulation.network import NetworkPlan, TunNetwork
from client.tools.demo.link_shape import LinkShape
from client.tools.demo.programs import end_with_parent
from swarm.base.errors import ConfigError

SUBNET: Final = "11.88.0"
PROGRAMS: Final = {"nft": "nftables", "conntrack": "conntrack"}
MAPPER: Final = ("miniupnpd", "miniupnpd")
PMP_PORT, PMP_ADDRESS_REQUEST, PMP_ATTEMPTS = 5_351, bytes(2), 60
LAST_HOST: Final = 254
"""Routers that change their address get numbers from here downwards."""
HOME_LINK: Final = LinkShape(delay_ms=25.0, mbit=100.0)


@dataclass(frozen=True, slots=True)
class Home:
    """One home.

    Attributes:
        name: Of the home and of its first machine; the others are NAME.2, NAME.3 …
        machines: How many machines are in it; an open one is one machine.
        unasked: What the router does with unasked traffic.
        maps_ports: Whether the router maps ports when it is asked.
        carrier: Kind of the carrier's router before the home's own; None: the home's own is public.
        ipv4: Whether the machines have IPv4; without it they have IPv6 alone.
    """

    name: str
    router: RouterKind = RouterKind.CONE
    machines: int = 1
    unasked: UnaskedTraffic = UnaskedTraffic.DROP
    maps_ports: bool = False
    carrier: RouterKind | None = None
    ipv4: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *(f"{self.name}.{number}" for number in range(2, self.machines + 1)))

    @property
    def is_open(self) -> bool:
        """Whether its machine is a public host."""
        return self.router is RouterKind.OPEN


@dataclass(frozen=True, slots=True)
class HomesPlan:
    """What to build.

    Attributes:
        shape: Of every link between public hosts and homes.
        ipv6: Whether there is IPv6.
        congestion: The congestion control of every machine, such as cubic; None: the kernel's.
    """

    homes: tuple[Home, ...]
    public: tuple[str, ...] = ("P", "Q", "C")
    shape: LinkShape = HOME_LINK
    ipv6: bool = False
    seed: int = 0
    congestion: str | None = None


class HomesNetwork:
    """Entered, it stands; left, nothing of it is left. Public hosts and machines are known by their names."""

    def __init__(self, plan: HomesPlan) -> None:
        self.plan = plan
        self._homes = {home.name: home for home in plan.homes}
        self._home_of = {name: home for home in plan.homes for name in home.names}
        hosts = [*plan.public, *self._homes]
        inner = [
            *(name for home in plan.homes if not home.is_open for name in home.names),
            *(_router_of(home) for home in plan.homes if home.carrier is not None),
        ]
        machines = [name for home in plan.homes if home.is_open for name in (home.name,)]
        self._number = {name: hosts.index(name) for name in (*plan.public, *machines)}
        self._number |= {name: len(hosts) + place for place, name in enumerate(inner)}
        self._gate = {home.name: hosts.index(home.name) for home in plan.homes}
        network = NetworkPlan(len(hosts), plan.shape, plan.seed, subnet=SUBNET, ipv6=plan.ipv6, inner=len(inner))
        self.net = TunNetwork(network)
        self._public = {name: self.net.address(hosts.index(name)) for name in hosts}
        self._next_address = LAST_HOST
        self._mappers: dict[str, asyncio.subprocess.Process] = {}
        self._stack = AsyncExitStack()
        self._folder = Path()

    def host(self, name: str) -> int:
        """The host of `net` that a public host is, or the router by which a home is reached."""
        return self._gate[self._home_of[name].name] if name in self._home_of else self._number[name]

    def address(self, name: str) -> str:
        """The IPv4 address of a machine as it sees it itself: public, or in its LAN."""
        home = self._home_of.get(name)
        if home is None or home.is_open:
            return self.public_address(name)
        return f"{LAN_IPV4}.{FIRST_MACHINE + home.names.index(name)}"

    def public_address(self, name: str) -> str:
        """The IPv4 address as others see it: its own, or its outermost router's."""
        return self._public[self._home_of[name].name if name in self._home_of else name]

    def address6(self, name: str) -> str:
        """The IPv6 address of a machine, which is public everywhere."""
        home = self._home_of.get(name)
        if home is None or home.is_open:
            return self.net.address6(self.host(name))
        network = self.net.address6(self.host(name), network=1).removesuffix("1")
        return f"{network}{FIRST_MACHINE + home.names.index(name)}"

    def command(self, name: str, arguments: Sequence[str]) -> list[str]:
        """The command line that runs another one on this machine; the process id stays the same."""
        return self.net.command(self._number[name], arguments)

    def socket(
        self,
        name: str,
        kind: socket.SocketKind = socket.SOCK_STREAM,
        family: socket.AddressFamily = socket.AF_INET,
    ) -> socket.socket:
        """A new socket of this process that is on that machine."""
        with namespaces.inside(self._path(self._number[name])):
            return socket.socket(family, kind)

    async def run(self, name: str, *arguments: str, stdin: str = "") -> str:
        """Run a program on a machine to its end; its output.

        Raises:
            ConfigError: it failed; says why.
        """
        return await _run(self.command(name, arguments), stdin)

    async def connections(self, name: str) -> list[tuple[str, str]]:
        """The TCP connections of a machine that stand: its own end and the other, each `host:port`."""
        shown = await self.run(name, "ss", "-Htn", "state", "established")
        return [(fields[2], fields[3]) for line in shown.splitlines() if len(fields := line.split()) >= 4]

    async def flush(self, home: str) -> None:
        """Let a home's router, or its carrier's, forget all connections, and take them up again as they go on."""
        await self._route(home, "conntrack", "-F")

    async def restart(self, home: str) -> None:
        """Let a home's outermost router lose all connections: it carries nothing more of them, and says nothing."""
        await self._shell(self._gate[home], home_router.FORGET_CONNECTIONS)

    async def move(self, home: str) -> str:
        """Give a home's outermost router another public address, as a provider does; returns it."""
        old, new = self._public[home], f"{SUBNET}.{self._next_address}"
        self._next_address -= 1
        await self.net.give(self._gate[home], new)
        lines = [f"ip address del {old}/24 dev {PUBLIC_DEVICE}", f"ip address add {new}/24 dev {PUBLIC_DEVICE}"]
        await self._shell(self._gate[home], [*lines, f"ip route replace default dev {PUBLIC_DEVICE}"])
        self._public[home] = new
        return new

    async def lose_mappings(self, home: str) -> None:
        """Let a home's router lose the ports that it maps, and all connections; it maps anew when asked."""
        await self.stop_mapping(home)
        await self._start_mapper(self._homes[home])

    async def stop_mapping(self, home: str) -> None:
        """Let a home's router lose the ports that it maps, and all connections, and map none any more."""
        await self._stop_mapper(home)
        await self._on_router(home, ["nft", "-f", "-"], home_router.FORGET_MAPPINGS)
        await self._shell(self._router(self._homes[home]), home_router.FORGET_CONNECTIONS)

    async def silence(self, name: str, *ports: int) -> None:
        """Let TCP ports of a machine fall silent, without a reset; also for connections that stand."""
        listed = ", ".join(map(str, ports))
        rules = "".join(
            f" chain {chain} {{\n  type filter hook {chain} priority -10\n  tcp {end} {{ {listed} }} drop\n }}\n"
            for chain, end in (("input", "dport"), ("output", "sport"))
        )
        await self.run(name, "nft", "-f", "-", stdin=f"table inet silence {{\n{rules}}}\n")

    async def confine(self, home: str, *, hosts: Sequence[str], port: int) -> None:
        """Let a home's router pass nothing out but TCP to one port of these public hosts; the rest vanishes."""
        await self._on_router(home, ["nft", "-f", "-"], home_router.confinement(map(self._known, hosts), port))

    def _known(self, name: str) -> Sequence[str]:
        return [self.public_address(name), *([self.address6(name)] if self.plan.ipv6 else [])]

    async def narrow(self, home: str, mtu: int) -> None:
        """Let a home's router drop packets that are longer, both ways, and say nothing of it."""
        machines = self._homes[home].names
        line = f"ip link set {MACHINE_DEVICE} gso_max_segs 1"  # else longer ones pass here, which are cut later
        await asyncio.gather(*(self._shell(self._number[name], [line]) for name in machines))
        await self._on_router(home, ["nft", "-f", "-"], home_router.black_hole(mtu))

    async def unsilence(self, name: str) -> None:
        await self.run(name, "nft", "delete", "table", "inet", "silence")

    async def cut(self, name: str) -> None:
        """Take a public host or a whole home off the Internet, without a reset."""
        await self.net.cut(self.host(name))

    async def join(self, name: str) -> None:
        await self.net.join(self.host(name))

    async def __aenter__(self) -> Self:
        """Build it.

        Raises:
            ConfigError: the machine does not allow it.
        """
        async with AsyncExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="canopy-homes-")))
            await stack.enter_async_context(self.net)
            stack.push_async_callback(self._stop_mappers)
            await asyncio.gather(*map(self._open_host, (*self.plan.public, *self._homes)))
            await asyncio.gather(*(self._build(home) for home in self.plan.homes if not home.is_open))
            if self.plan.congestion is not None:
                await asyncio.gather(*(self._choose_congestion(number) for number in self._number.values()))
            await asyncio.gather(*(self._start_mapper(home) for home in self.plan.homes if home.maps_ports))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _open_host(self, name: str) -> None:
        """Let a host send to all the world: where nobody is, nobody answers."""
        lines = [f"ip route add default dev {PUBLIC_DEVICE}"]
        if self.plan.ipv6:
            lines.append(f"ip -6 route add default dev {PUBLIC_DEVICE}")
        await self._shell(self.host(name), lines)

    async def _build(self, home: Home) -> None:
        """The carrier's router if there is one, the home's, its LAN and machines."""
        cables = [f"lan{number}" for number in range(home.machines)]
        router = self._setup(home)
        lines = [
            home_router.wire(cable, MACHINE_DEVICE, self._path(self._number[name]))
            for cable, name in zip(cables, home.names, strict=True)
        ]
        if home.carrier is not None:
            await self._build_carrier(home)
        lines += [*home_router.lan(router, cables), *home_router.FORWARDING]
        if self.plan.ipv6 and home.carrier is None:
            lines.append(
                f"ip address add {self.net.address6(self.host(home.name), network=1)}/64 dev {LAN_DEVICE} nodad"
            )
        await self._shell(self._router(home), lines)
        rules = home_router.firewall(router) + (home_router.MAPPING_TABLE if home.maps_ports else "")
        await self._on_router(home.name, ["nft", "-f", "-"], rules)
        await asyncio.gather(*map(self._build_machine, home.names))

    async def _build_carrier(self, home: Home) -> None:
        """A router whose one machine is the home's router."""
        assert home.carrier is not None, "asked for"
        carrier = RouterSetup(home.carrier, home.unasked, PUBLIC_DEVICE, LAN_DEVICE)
        gate = self._gate[home.name]
        lines = [
            home_router.wire(LAN_DEVICE, BEHIND_CARRIER, self._path(self._router(home))),
            f"ip address add {CARRIER_IPV4}.{ROUTER}/24 dev {LAN_DEVICE}",
            f"ip link set {LAN_DEVICE} up",
            *home_router.FORWARDING,
        ]
        await self._shell(gate, lines)
        await _run(self.net.command(gate, ["nft", "-f", "-"]), home_router.firewall(carrier))
        lines = [
            f"ip address add {CARRIER_IPV4}.{FIRST_MACHINE}/24 dev {BEHIND_CARRIER}",
            f"ip link set {BEHIND_CARRIER} up",
            f"ip route add default via {CARRIER_IPV4}.{ROUTER}",
        ]
        await self._shell(self._router(home), lines)

    async def _build_machine(self, name: str) -> None:
        home = self._home_of[name]
        lines = [f"ip link set {MACHINE_DEVICE} up"]
        if home.ipv4:
            lines.append(f"ip address add {self.address(name)}/24 dev {MACHINE_DEVICE}")
            lines.append(f"ip route add default via {LAN_IPV4}.{ROUTER}")
        if self.plan.ipv6 and home.carrier is None:
            lines.append(f"ip address add {self.address6(name)}/64 dev {MACHINE_DEVICE} nodad")
            router = self.net.address6(self.host(name), network=1)
            lines.append(f"ip -6 route add default via {router} dev {MACHINE_DEVICE}")
        await self._shell(self._number[name], lines)

    async def _choose_congestion(self, number: int) -> None:
        """By route, because a namespace may not choose among all of the kernel's algorithms."""
        line = f"ip -o route | while read -r route; do ip route replace $route congctl {self.plan.congestion}; done"
        await self._shell(number, [line])

    def _setup(self, home: Home) -> RouterSetup:
        outside = PUBLIC_DEVICE if home.carrier is None else BEHIND_CARRIER
        return RouterSetup(home.router, home.unasked, outside, LAN_DEVICE)

    def _router(self, home: Home) -> int:
        """The namespace of the router that the home owns."""
        return self._gate[home.name] if home.carrier is None else self._number[_router_of(home)]

    def _path(self, number: int) -> str:
        return self.net.namespace(number)

    async def _shell(self, number: int, lines: Iterable[str]) -> None:
        await _run(self.net.command(number, ["sh", "-e"]), "\n".join(lines))

    async def _route(self, home: str, *arguments: str) -> None:
        """Run a program on a home's outermost router."""
        await _run(self.net.command(self._gate[home], arguments))

    async def _on_router(self, home: str, arguments: Sequence[str], stdin: str = "") -> None:
        """Run a program on the router that a home owns."""
        await _run(self.net.command(self._router(self._homes[home]), arguments), stdin)

    async def _start_mapper(self, home: Home) -> None:
        settings = self._folder / f"{home.name}.conf"
        external = None if home.carrier is None else self._public[home.name]
        settings.write_text(home_router.mapping_settings(self._setup(home), external), encoding="utf-8")
        arguments = ["miniupnpd", "-d", "-f", str(settings), "-P", str(self._folder / f"{home.name}.pid")]
        with (self._folder / f"{home.name}.log").open("wb") as log:
            self._mappers[home.name] = await asyncio.create_subprocess_exec(
                *self.net.command(self._router(home), arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        if not await self._maps(home):
            said = (self._folder / f"{home.name}.log").read_text(encoding="utf-8", errors="replace")
            raise ConfigError(f"miniupnpd does not answer: {(said.strip().splitlines() or ['it said nothing'])[-1]}")

    async def _maps(self, home: Home) -> bool:
        """Whether the router answers when its address is asked for (NAT-PMP)."""
        loop = asyncio.get_running_loop()
        for _ in range(PMP_ATTEMPTS):
            with self.socket(home.name, socket.SOCK_DGRAM) as asking:
                asking.setblocking(False)
                asking.connect((f"{LAN_IPV4}.{ROUTER}", PMP_PORT))
                with suppress(OSError, TimeoutError):
                    await loop.sock_sendall(asking, PMP_ADDRESS_REQUEST)
                    await asyncio.wait_for(loop.sock_recv(asking, 64), 0.5)
                    return True
            await asyncio.sleep(0.05)  # nobody listens yet
        return False

    async def _stop_mapper(self, home: str) -> None:
        mapper = self._mappers.pop(home, None)
        if mapper is not None and mapper.returncode is None:
            mapper.kill()
            await mapper.wait()

    async def _stop_mappers(self) -> None:
        for home in list(self._mappers):
            await self._stop_mapper(home)


def obstacle() -> str | None:
    """Why this machine cannot have homes behind routers; None if it can."""
    missing = namespaces.obstacle()
    if missing is not None:
        return missing
    for program, package in (*PROGRAMS.items(), MAPPER):
        if shutil.which(program) is None:
            return f"the program {program} is missing (Debian package {package})"
    rules = home_router.firewall(RouterSetup(RouterKind.SYMMETRIC, UnaskedTraffic.DROP, PUBLIC_DEVICE, LAN_DEVICE))
    command = ("unshare", "--net", "nft", "-f", "-")
    tried = subprocess.run(command, input=rules, capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no address translation: {tried.stderr.strip()}"


def _router_of(home: Home) -> str:
    return f"{home.name}'s router"


async def _run(command: Sequence[str], stdin: str = "") -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, errors = await process.communicate(stdin.encode())
    if process.returncode != 0:
        raise ConfigError(f"{' '.join(command[3:])} failed: {errors.decode(errors='replace').strip()}")
    return output.decode()
