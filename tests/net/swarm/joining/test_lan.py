"""Machines that find each other by mDNS, here over loopback."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from swarm.joining import lan
from swarm.joining.lan import MAX_SERVICES, LanSwarm, browse, keep_announced, txt_of
from swarm.runtime.tasks import TaskScope
from tests.lan_swarms import address_of

LOOPBACK = ["127.0.0.1"]
DEMO = LanSwarm((address_of(0),), "demo-target", "0123456789ab")


@pytest.fixture(autouse=True)
def service(monkeypatch: pytest.MonkeyPatch) -> str:
    """A kind of service of this test's own: others run at the same time."""
    name = f"_c{uuid.uuid4().hex[:12]}._tcp.local."
    monkeypatch.setattr(lan, "SERVICE", name)
    return name


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


async def test_swarms_are_told_apart_by_their_peers_and_shown_once(service: str) -> None:
    member = LanSwarm((address_of(1), address_of(0)), "demo-target", "0123456789ab")
    bare, other = LanSwarm((address_of(0),)), LanSwarm((address_of(2),))
    async with strangers(service, txt_of(bare), txt_of(member), txt_of(other)):
        assert await browse(LOOPBACK, limit_s=2.0) == [member, other]


async def test_malformed_announcements_hide_no_sound_one(service: str) -> None:
    broken: list[dict[str, str] | bytes] = [
        {"format": "1"},
        {"format": "9"},
        b"\xff" * 50,
        txt_of(DEMO) | {"model": "\x1b[2J"},
    ]
    async with strangers(service, *broken, txt_of(DEMO)):
        assert await browse(LOOPBACK, limit_s=2.0) == [DEMO]


async def test_of_a_flood_the_first_are_looked_at(service: str) -> None:
    made = [txt_of(LanSwarm((address_of(0).replace("31337", str(1_000 + number)),))) for number in range(40)]
    async with strangers(service, *made):
        found = await browse(LOOPBACK, limit_s=2.0)
    assert 0 < len(found) <= MAX_SERVICES


async def test_nobody_answers_and_nobody_can_be_asked() -> None:
    assert await browse(LOOPBACK, limit_s=0.2) == []
    assert await browse([]) == []
