"""Ports mapped by routers that a test plays on loopback: by which protocol, renewed, lost, noticed, given back."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import cast

import pytest

from swarm.reach.gateway import ports
from swarm.reach.gateway.ports import CHECK_S, LIFETIME_S, Mapping, NoMapping, PcpRouter, PmpRouter, PortMapper, Router

PORT, NONCE = 4_242, b"twelve bytes"
OUTSIDE = "203.0.113.5"


@dataclass
class FakeRouter(asyncio.DatagramProtocol):
    """Speaks PCP and NAT-PMP for one port, as a test wishes."""

    speaks_pcp: bool = True
    speaks_pmp: bool = True
    pcp_result: int = 0
    outside: str = OUTSIDE
    external: int = PORT
    lifetime_s: int = 600
    epoch_s: int = 1_000
    mapped: bool = False
    heard: list[str] = field(default_factory=list)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = self._pcp(data) if data[0] == 2 else self._pmp(data)
        if answer is not None:
            self.transport.sendto(answer, addr)

    def _pcp(self, data: bytes) -> bytes | None:
        opcode = data[1]
        self.heard.append("PCP announce" if opcode == 0 else "PCP map")
        if not self.speaks_pcp:
            return None
        (lifetime_s,) = struct.unpack("!I", data[4:8])
        header = struct.pack(
            "!BBBBII12x", 2, 0x80 | opcode, 0, self.pcp_result, min(lifetime_s, self.lifetime_s), self.epoch_s
        )
        if opcode == 0:
            return header
        self.mapped = lifetime_s > 0 and not self.pcp_result
        inside = data[24:42]  # nonce, protocol, internal port
        address = bytes(10) + b"\xff\xff" + IPv4Address(self.outside).packed
        return header + inside + struct.pack("!H", self.external) + address

    def _pmp(self, data: bytes) -> bytes | None:
        self.heard.append("NAT-PMP address" if data[1] == 0 else "NAT-PMP map")
        if not self.speaks_pmp:
            return None
        if data[1] == 0:
            return struct.pack("!BBHI", 0, 128, 0, self.epoch_s) + IPv4Address(self.outside).packed
        internal, _, lifetime_s = struct.unpack("!HHI", data[4:12])
        self.mapped = lifetime_s > 0
        given = min(lifetime_s, self.lifetime_s)
        return struct.pack("!BBHIHHI", 0, 130, 0, self.epoch_s, internal, self.external, given)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Place:
    """A router, a mapper that asks it, and the time."""

    router: FakeRouter
    mapper: PortMapper
    clock: Clock

    async def pass_s(self, seconds: float) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now += CHECK_S
            self.router.epoch_s += int(CHECK_S)
            await self.mapper.look()


@asynccontextmanager
async def home(**traits: object) -> AsyncIterator[Place]:
    fake, clock = FakeRouter(**traits), Clock()  # type: ignore[arg-type]
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: fake, local_addr=("127.0.0.1", 0))
    at = transport.get_extra_info("sockname")[1]

    def routers() -> list[Router]:
        return [PcpRouter("127.0.0.1", PORT, NONCE, at, clock), PmpRouter("127.0.0.1", PORT, at, clock)]

    try:
        yield Place(fake, PortMapper(PORT, routers, clock), clock)
    finally:
        transport.close()


@pytest.mark.parametrize(
    ("traits", "protocol"), [({}, "PCP"), ({"speaks_pcp": False}, "NAT-PMP"), ({"pcp_result": 2}, "NAT-PMP")]
)
async def test_the_first_protocol_that_works_is_used(traits: dict[str, object], protocol: str) -> None:
    async with home(**traits) as place:
        mapping = await place.mapper.open()
        assert mapping == Mapping(OUTSIDE, PORT, 600, protocol)
        assert mapping.address == f"{OUTSIDE}:{PORT}"
        assert place.router.mapped
        await place.mapper.close()
        assert not place.router.mapped
        await place.mapper.close()


async def test_a_silent_router_costs_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "MAPPING_S", 0.2)
    async with home(speaks_pcp=False, speaks_pmp=False) as place:
        with pytest.raises(NoMapping, match="no router answers"):
            await place.mapper.open()
        assert place.mapper.mapping is None


async def test_no_router_at_all_is_known_at_once() -> None:
    async with home() as place:
        place.router.transport.close()
        await asyncio.sleep(0)
        with pytest.raises(NoMapping, match="PCP: nobody listens; NAT-PMP: nobody listens"):
            await place.mapper.open()


@pytest.mark.parametrize("traits", [{"outside": "0.0.0.0"}, {"external": 0}, {"lifetime_s": 0}])
async def test_a_mapping_to_nowhere_is_none(traits: dict[str, object]) -> None:
    async with home(**traits) as place:
        with pytest.raises(NoMapping, match="gives no address"):
            await place.mapper.open()


async def test_a_mapping_is_renewed_at_half_its_life() -> None:
    async with home(lifetime_s=600) as place:
        await place.mapper.open()
        await place.pass_s(290)
        assert place.router.heard.count("PCP map") == 1
        await place.pass_s(20)
        assert place.router.heard.count("PCP map") == 2
        await place.pass_s(600)
        assert place.router.heard.count("PCP map") == 4
        assert place.mapper.mapping is not None
    assert LIFETIME_S > 600, "the router's word counts, not what was asked for"


@pytest.mark.parametrize("traits", [{}, {"speaks_pcp": False}])
async def test_a_router_that_began_anew_is_asked_again(traits: dict[str, object]) -> None:
    """It has another address then, often, and the mapping is gone."""
    async with home(**traits) as place:
        await place.mapper.open()
        await place.pass_s(30)
        place.router.epoch_s, place.router.mapped, place.router.outside = 0, False, "203.0.113.77"
        await place.pass_s(CHECK_S)
        assert place.router.mapped
        assert place.mapper.mapping is not None
        assert place.mapper.mapping.host == "203.0.113.77"


async def test_a_router_that_maps_no_more_is_noticed() -> None:
    async with home() as place:
        await place.mapper.open()
        place.router.epoch_s, place.router.pcp_result = 0, 2
        await place.pass_s(CHECK_S)
        await place.pass_s(600)
        assert place.mapper.mapping is None


async def test_a_router_that_starts_is_waited_for() -> None:
    async with home() as place:
        mapping = await place.mapper.open()
        place.router.speaks_pcp = False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ports, "WAITS_S", (0.01,))
            await place.pass_s(30)
        assert place.mapper.mapping == mapping
        assert place.mapper.is_silent
        place.router.speaks_pcp = True
        await place.pass_s(30)
        assert place.mapper.mapping == mapping
        assert not place.mapper.is_silent
