"""A program's limit on what it sends: kept over any longer time, fair among links, and never in the way of a ping."""

from __future__ import annotations

import asyncio

import pytest

from swarm.link.link import BURST_S, PART_S, SMALL_BYTES, SMALLEST_PART_BYTES, Uplink
from swarm.protocol.wire import PART_BYTES

MBIT = 8.0
BYTES_PER_S = MBIT * 1e6 / 8
PART = 20_000


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleepers: list[tuple[float, asyncio.Event]] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        event = asyncio.Event()
        self.sleepers.append((self.now + seconds, event))
        await event.wait()

    async def run_until(self, end: float) -> None:
        """Wake everybody whose time comes, in order."""
        for _ in range(10_000):
            for _ in range(3):
                await asyncio.sleep(0)
            due = min(self.sleepers, default=(end, None), key=lambda one: one[0])
            if due[1] is None or due[0] >= end:
                break
            self.now = max(self.now, due[0])
            self.sleepers.remove(due)
            due[1].set()
        self.now = end


async def send_for_ever(uplink: Uplink, size: int, sent: list[int]) -> None:
    while True:
        await uplink.turn(size)
        sent.append(size)


@pytest.mark.parametrize("links", [1, 7])
async def test_no_more_than_the_limit_leaves_and_no_less(links: int) -> None:
    clock, sent = Clock(), [list[int]() for _ in range(links)]
    uplink = Uplink(mbit_per_s=MBIT, clock=clock, sleep=clock.sleep)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send_for_ever(uplink, PART, one)) for one in sent]
        await clock.run_until(110.0)
        for task in tasks:
            task.cancel()
    total = sum(map(sum, sent))
    allowed = BYTES_PER_S * (10.0 + BURST_S)
    assert allowed - links * PART <= total <= allowed + PART
    assert max(map(len, sent)) - min(map(len, sent)) <= BURST_S * BYTES_PER_S / PART + 2, "they take turns"


async def test_a_small_message_never_waits_and_is_charged() -> None:
    clock = Clock()
    uplink = Uplink(mbit_per_s=1.0, clock=clock, sleep=clock.sleep)
    for _ in range(1_000):
        await uplink.turn(SMALL_BYTES)
    assert clock.now == 100.0
    async with asyncio.TaskGroup() as group:
        large = group.create_task(uplink.turn(SMALL_BYTES + 1))
        owed_s = 1_000 * SMALL_BYTES * 8e-6 - BURST_S
        await clock.run_until(100.0 + owed_s * 0.99)
        assert not large.done()
        await clock.run_until(100.0 + owed_s * 1.01)
        await asyncio.sleep(0)
    assert large.done()


async def test_what_was_not_used_is_saved_for_a_moment_only() -> None:
    clock = Clock()
    uplink = Uplink(mbit_per_s=MBIT, clock=clock, sleep=clock.sleep)
    clock.now += 3_600.0
    await uplink.turn(int(BURST_S * BYTES_PER_S))
    async with asyncio.TaskGroup() as group:
        next_one = group.create_task(uplink.turn(PART))
        await clock.run_until(clock.now)
        assert next_one.done(), "the first part beyond it is the one that owes"
        second = group.create_task(uplink.turn(PART))
        await clock.run_until(clock.now)
        assert not second.done()
        await clock.run_until(clock.now + 1.0)


@pytest.mark.parametrize(
    ("limit", "part"),
    [
        (None, PART_BYTES),
        (1.0, SMALLEST_PART_BYTES),
        (MBIT, int(PART_S * BYTES_PER_S)),
        (100_000.0, PART_BYTES),
    ],
)
def test_frames_are_cut_so_that_links_can_take_turns(limit: float | None, part: int) -> None:
    assert Uplink(mbit_per_s=limit).part_bytes == part


async def test_without_a_limit_nothing_waits_and_everything_is_counted() -> None:
    counted: list[int] = []
    uplink = Uplink(counted.append)
    for size in (1, 10**9, 10**9):
        await uplink.turn(size)
        uplink.sent(size)
    assert sum(counted) == 2 * 10**9 + 1
    assert not uplink.is_limited
