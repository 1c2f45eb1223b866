"""The small Internet with homes: each kind of router does what it is said to do, and so does every fault."""

from __future__ import annotations

import asyncio
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.emulation.home_router import LAN_IPV4, ROUTER, RouterKind, UnaskedTraffic
from benchmarks.emulation.homes import PMP_PORT, Home, HomesNetwork, HomesPlan, obstacle

ROOT = Path(__file__).parents[4]
PORT = 4_242
WAIT_S = 10.0
SILENCE_S = 0.4
"""Eight round trips without an answer are taken for silence."""
OPEN, CONE, SYMMETRIC = RouterKind.OPEN, RouterKind.CONE, RouterKind.SYMMETRIC
OWNER = """
import asyncio
from benchmarks.emulation.homes import Home, HomesNetwork, HomesPlan

async def own():
    async with HomesNetwork(HomesPlan((Home("A", maps_ports=True),))) as world:
        print(world.net.emulator.pid, next(iter(world._mappers.values())).pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(own())
"""
MAP_TCP, LIFETIME_S = 2, 3_600

pytestmark = [
    pytest.mark.needs_root,
    pytest.mark.needs_program("ip", "iproute2"),
    pytest.mark.needs_program("nft", "nftables"),
    pytest.mark.needs_program("conntrack", "conntrack"),
    pytest.mark.needs_program("miniupnpd", "miniupnpd"),
]


class Wire:
    """Both ends of a TCP connection."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near, self.far = near, far
        self._loop = asyncio.get_running_loop()

    async def carries(self, data: bytes = b"there and back") -> bool:
        """Whether data passes both ways; silence is no."""
        for one, other in ((self.near, self.far), (self.far, self.near)):
            await self._loop.sock_sendall(one, data)
            try:
                if await asyncio.wait_for(self._loop.sock_recv(other, 64), SILENCE_S) != data:
                    return False
            except TimeoutError:
                return False
        return True

    async def round_trip_ms(self) -> float:
        began_s = time.monotonic()
        assert await self.carries()
        return (time.monotonic() - began_s) * 1e3


def listener(
    world: HomesNetwork, name: str, port: int = PORT, family: socket.AddressFamily = socket.AF_INET
) -> socket.socket:
    made = world.socket(name, family=family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
    made.listen()
    made.setblocking(False)
    return made


async def dial(
    world: HomesNetwork, name: str, at: tuple[str, int], *, own_port: int = 0, wait_s: float = WAIT_S
) -> socket.socket:
    """A connection. Raises what the kernel says, and TimeoutError for silence."""
    made = world.socket(name, family=socket.AF_INET6 if ":" in at[0] else socket.AF_INET)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(("::" if ":" in at[0] else "0.0.0.0", own_port))
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(made, at), wait_s)
    except BaseException:
        made.close()
        raise
    return made


@asynccontextmanager
async def connected(
    world: HomesNetwork, near: str, far: str, address: str | None = None, *, port: int = PORT
) -> AsyncIterator[Wire]:
    """`near` connects, from that port, to a listener of `far` at that address or its own."""
    address = world.address(far) if address is None else address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with listener(world, far, port, family) as listening:
        near_end = await dial(world, near, (address, port), own_port=port)
        far_end, _ = await asyncio.get_running_loop().sock_accept(listening)
    far_end.setblocking(False)
    with near_end, far_end:
        yield Wire(near_end, far_end)


async def get_in(world: HomesNetwork, name: str, address: str | None = None) -> str:
    """What becomes of a connection that a public host opens to a machine unasked."""
    with listener(world, name):
        try:
            reached = address or world.public_address(name)
            (await dial(world, "C", (reached, PORT), wait_s=SILENCE_S)).close()
        except TimeoutError:
            return "silence"
        except OSError as error:
            return type(error).__name__
        return "connected"


async def map_port(world: HomesNetwork, name: str, port: int = PORT) -> tuple[int, int]:
    """Ask the router by NAT-PMP; its result and the port outside."""
    loop = asyncio.get_running_loop()
    with world.socket(name, socket.SOCK_DGRAM) as asking:
        asking.setblocking(False)
        asking.connect((f"{LAN_IPV4}.{ROUTER}", PMP_PORT))
        await loop.sock_sendall(asking, struct.pack("!BBHHHI", 0, MAP_TCP, 0, port, port, LIFETIME_S))
        answer = await asyncio.wait_for(loop.sock_recv(asking, 64), WAIT_S)
    _, _, result, _, _, external, _ = struct.unpack("!BBHIHHI", answer)
    return result, external


async def seen_port(world: HomesNetwork, near: str, far: str) -> int:
    """The port that a public host sees a connection come from, whose own is `PORT`."""
    async with connected(world, near, far) as wire:
        host, port = wire.far.getpeername()
        assert host == world.public_address(near)
        return int(port)


async def test_only_an_open_home_lets_unasked_traffic_in() -> None:
    rejecting = Home("R", unasked=UnaskedTraffic.REJECT)
    plan = HomesPlan((Home("O", OPEN), Home("A"), Home("S", SYMMETRIC), rejecting))
    async with HomesNetwork(plan) as world:
        found = await asyncio.gather(*(get_in(world, name) for name in ("P", "O", "A", "S", "R")))
    assert found == ["connected", "connected", "silence", "silence", "ConnectionRefusedError"]


async def test_a_cone_router_keeps_ports_and_a_symmetric_one_draws_them() -> None:
    async with HomesNetwork(HomesPlan((Home("A"), Home("S", SYMMETRIC)))) as world:
        assert [await seen_port(world, "A", far) for far in ("P", "Q")] == [PORT, PORT]
        first, second = [await seen_port(world, "S", far) for far in ("P", "Q")]
    assert len({PORT, first, second}) == 3, "one run in 20,000 draws one of them again"


async def test_delays_are_those_outside_and_none_in_a_home() -> None:
    async with HomesNetwork(HomesPlan((Home("A", machines=2), Home("S", SYMMETRIC)))) as world:
        async with connected(world, "A", "A.2") as wire:
            lan_ms = min([await wire.round_trip_ms() for _ in range(5)])
        async with connected(world, "S", "P") as wire:
            outside_ms = min([await wire.round_trip_ms() for _ in range(3)])
        ends = await world.connections("C")
    assert lan_ms < 10
    assert 50 <= outside_ms < 100
    assert ends == []


async def test_a_router_maps_a_port_until_it_loses_it() -> None:
    async with HomesNetwork(HomesPlan((Home("A", machines=2, maps_ports=True), Home("B")))) as world:
        assert await get_in(world, "A") == "silence"
        assert await map_port(world, "A") == (0, PORT)
        assert await get_in(world, "A") == "connected"
        async with connected(world, "C", "A", world.public_address("A")) as wire:
            assert await wire.carries()
            assert [far.split(":")[0] for _, far in await world.connections("A")] == [world.address("C")]
            await world.lose_mappings("A")
            assert not await wire.carries()
        assert await get_in(world, "A") == "silence"
        assert await map_port(world, "A") == (0, PORT)
        assert await get_in(world, "A") == "connected"
        await world.stop_mapping("A")
        with pytest.raises(OSError, match="refused"):
            await map_port(world, "A")


async def test_a_router_behind_a_carriers_maps_in_vain() -> None:
    async with HomesNetwork(HomesPlan((Home("V", carrier=SYMMETRIC, maps_ports=True),))) as world:
        assert await map_port(world, "V") == (0, PORT)
        assert await get_in(world, "V") == "silence"
        async with connected(world, "V", "P") as wire:
            assert wire.far.getpeername()[0] == world.public_address("V")
            assert await wire.carries()


async def test_a_connection_outlives_a_flush_of_the_table_but_not_a_restart() -> None:
    async with HomesNetwork(HomesPlan((Home("A"),))) as world:
        async with connected(world, "A", "P") as wire:
            await world.flush("A")
            assert await wire.carries()
            await world.restart("A")
            assert not await wire.carries()
        async with connected(world, "A", "P", port=PORT + 1) as wire:
            assert await wire.carries()


async def test_a_home_gets_another_public_address() -> None:
    async with HomesNetwork(HomesPlan((Home("A", maps_ports=True), Home("S", SYMMETRIC)))) as world:
        for name in ("A", "S"):
            old = world.public_address(name)
            async with connected(world, name, "P") as wire:
                new = await world.move(name)
                assert new != old
                with suppress(OSError):  # it may be reset
                    assert not await wire.carries()
            async with connected(world, name, "P", port=PORT + 1) as wire:
                assert wire.far.getpeername()[0] == new == world.public_address(name)
                assert await wire.carries()
        await map_port(world, "A")
        assert await get_in(world, "A") == "connected"


async def test_ports_fall_silent_without_a_reset() -> None:
    async with (
        HomesNetwork(HomesPlan((Home("A"),))) as world,
        connected(world, "A", "P") as wire,
        connected(world, "A", "P", port=PORT + 1) as other,
    ):
        await world.silence("P", PORT)
        assert not await wire.carries()
        assert await other.carries()
        await world.unsilence("P")
        await world.cut("A")
        assert not await other.carries()


async def test_ipv6_passes_and_is_guarded_too() -> None:
    alone = Home("Y", ipv4=False)
    async with HomesNetwork(HomesPlan((Home("A", machines=2), Home("O", OPEN), alone), ipv6=True)) as world:
        for near, far in (("A", "P"), ("Y", "O"), ("A.2", "A")):
            async with connected(world, near, far, world.address6(far)) as wire:
                assert wire.far.getpeername()[0] == world.address6(near), "nothing is translated"
                assert await wire.carries()
        with listener(world, "Y", family=socket.AF_INET6), pytest.raises(TimeoutError):
            await dial(world, "C", (world.address6("Y"), PORT), wait_s=SILENCE_S)
        with pytest.raises(OSError, match="unreachable"):
            await dial(world, "Y", (world.address("P"), PORT))


def test_nothing_stays_when_the_owner_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        started = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(started) == 2
        owner.kill()
    _, alive = psutil.wait_procs(started, WAIT_S)
    assert not alive


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert obstacle() is None
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "conntrack" else which(name))
    assert obstacle() == "the program conntrack is missing (Debian package conntrack)"
