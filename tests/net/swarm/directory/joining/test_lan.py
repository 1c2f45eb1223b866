"""Machines that find each other by mDNS, here over loopback."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from swarm.base.ids import SwarmId
from swarm.base.tasks import TaskScope
from swarm.directory.joining import lan
from swarm.directory.joining.lan import MAX_SERVICES, LanSwarm, browse, keep_announced, txt_of
from tests.lan_swarms import address_of

LOOPBACK = ["127.0.0.1"]
DEMO = LanSwarm((address_of(0),), "demo-target", "0123456789ab")


@pytest.fixture(autouse=True)
def service(monkeypatch: pytest.MonkeyPatch) -> str:
    """A kind of service of this test's own: others run at the same time."""
    name = f"_c{uuid.uuid4().hex[:12]}._tcp.local."
    monkeypatch.setattr(lan, "SERVICE", name)
    return name


@pytest.fixture(autouse=True)
def honest(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The addresses at which the peers that they name answer."""
    there = {address_of(number) for number in range(3)}

    async def prove(addresses: Sequence[str]) -> dict[str, bool]:
        return {one: one in there for one in addresses}

    monkeypatch.setattr(lan, "prove", prove)
    return there


@asynccontextmanager
async def strangers(service: str, *properties: dict[str, str] | bytes) -> AsyncIterator[None]:
    """Services of somebody else in the network."""
    mdns = AsyncZeroconf(interfaces=LOOPBACK)
    for number, txt in enumerate(properties):
        info = AsyncServiceInfo(service, f"s{number}.{service}", port=1, properties=txt, parsed_addresses=LOOPBACK)
        await mdns.async_register_service(info, cooperating_responders=True)  # no probing: at once
    try:
        yield
    finally:
        await mdns.async_close()


async def heard_until(wanted: LanSwarm) -> list[LanSwarm]:
    """What is heard as soon as one swarm is among it."""
    while True:
        if wanted in (found := await browse(LOOPBACK)):
            return found


async def test_a_machine_finds_another_one_until_it_leaves() -> None:
    asked: list[float] = []

    async def wait(seconds: float) -> None:
        asked.append(seconds)
        await asyncio.Event().wait()

    async with TaskScope() as scope:
        announcing = scope.spawn(keep_announced(DEMO, lambda: LOOPBACK, wait))
        assert await heard_until(DEMO) == [DEMO]
        announcing.cancel()
        await asyncio.wait([announcing])
        assert await browse(LOOPBACK, limit_s=0.3) == []
    assert asked == [lan.LOOK_S]


async def test_swarms_are_told_apart_by_their_ids_and_shown_once(service: str) -> None:
    one, two = SwarmId(bytes(16)), SwarmId(bytes([1] * 16))
    member = LanSwarm((address_of(1), address_of(0)), "demo-target", "0123456789ab", swarm=one)
    bare, other = LanSwarm((address_of(0),), swarm=one), LanSwarm((address_of(2),), swarm=two)
    async with strangers(service, txt_of(bare), txt_of(member), txt_of(other)):
        assert await browse(LOOPBACK, limit_s=2.0) == [replace(member, join=member.join[:1]), other]


async def test_whoever_announces_the_id_of_another_peer_is_not_heard(service: str, honest: set[str]) -> None:
    """A remembered peer's id with the attacker's address, or beside it, joined the attacker without a question."""
    far = address_of(0).replace("192.168.1.7", "192.168.1.66")
    fake = LanSwarm((far, address_of(2)), "demo-target", "0123456789ab")
    beside = LanSwarm((address_of(1), far), "other", "0123456789ab")
    async with strangers(service, txt_of(fake), txt_of(beside)):
        assert await browse(LOOPBACK, limit_s=2.0) == [replace(beside, join=(address_of(1),))]
    honest.clear()
    async with strangers(service, txt_of(beside)):
        assert await browse(LOOPBACK, limit_s=1.0) == []


async def test_malformed_announcements_hide_no_sound_one(service: str) -> None:
    broken: list[dict[str, str] | bytes] = [
        {"format": "1"},
        {"format": "9"},
        b"\xff" * 50,
        txt_of(DEMO) | {"model": "\x1b[2J"},
    ]
    async with strangers(service, *broken, txt_of(DEMO)):
        assert await browse(LOOPBACK, limit_s=2.0) == [DEMO]


async def test_of_a_flood_the_first_are_looked_at(service: str, honest: set[str]) -> None:
    addresses = [address_of(0).replace("31337", str(1_000 + number)) for number in range(40)]
    honest |= set(addresses)
    made = [txt_of(LanSwarm((one,), swarm=SwarmId(number.to_bytes(16)))) for number, one in enumerate(addresses)]
    async with strangers(service, *made):
        found = await browse(LOOPBACK, limit_s=2.0)
    assert 0 < len(found) <= MAX_SERVICES


async def test_nobody_answers_and_nobody_can_be_asked() -> None:
    assert await browse(LOOPBACK, limit_s=0.2) == []
    assert await browse([]) == []
