"""The embedded broker reads no faster than an address may send, and no node ever waits."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from swarm.health.broker.process import LIMITS, PACKETS, BoundedReader, PacketBoundary, PacketQuota

STRANGER, NEAR = "9.9.9.7", "127.0.0.1"
PUBLISH, PUBACK, PING = 0x30, 0x40, 0xC0


def packet(first: int, body: int) -> bytes:
    length = bytes([body]) if body < 128 else bytes([body & 0x7F | 0x80, body >> 7])
    return bytes([first]) + length + bytes(body)


def costs(*packets: bytes) -> list[float]:
    """Of packets, read as amqtt reads them."""
    boundary, found = PacketBoundary(), []
    for one in packets:
        head = 2 if len(one) < 130 else 3
        parts = [one[at : at + 1] for at in range(head)]
        parts += [one[head : head + 2], one[head + 2 :]]
        found.append(sum(boundary.take(part) for part in parts))
    return found


def test_a_packet_costs_one_and_each_kibibyte_of_it() -> None:
    assert costs(packet(PING, 0), packet(PUBLISH, 64), packet(PUBLISH, 2_048), packet(PUBACK, 2)) == [
        1.0,
        1.0625,
        3.0,
        0.0,
    ]


def test_a_thousand_messages_a_second_become_a_few_and_other_addresses_do_not_wait() -> None:
    now = 0.0
    quota, read, other = PacketQuota(lambda: now), 0, 0.0
    while now < 60.0:
        now += max(quota.charge(STRANGER, 1.5), 0.001)
        read += 1
        if read % 100 == 0:
            other = max(other, quota.charge("9.9.9.8", 1.5))
    rate = LIMITS.rates[PACKETS]
    assert read <= (rate.burst + 60 * rate.per_key) / 1.5 + 2
    assert other == 0.0


def test_a_thousand_nodes_behind_the_page_s_own_network_do_not_wait() -> None:
    now = 0.0
    quota = PacketQuota(lambda: now)
    waits = []
    for _ in range(1_000 * 60 // 5):  # metrics of a minute
        now += 5.0 / 1_000
        waits.append(quota.charge(NEAR, 2.0))
    assert max(waits) == 0.0


async def test_what_an_address_has_in_excess_stays_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    stream = asyncio.StreamReader()
    count = 600
    stream.feed_data(packet(PUBLISH, 100) * count)
    reader = BoundedReader(stream, PacketQuota(lambda: 0.0), STRANGER)
    for _ in range(count):
        for part in (1, 1, 100):
            assert len(await reader.read(part)) == part
    per_packet = 1.0 + 100 / 1_024
    free = int(LIMITS.rates[PACKETS].burst / per_packet)
    assert count - free - 2 <= len(slept) <= count - free
    assert all(before < after for before, after in pairwise(slept)), "the more it owes, the longer it waits"
