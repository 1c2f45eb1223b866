"""Shares of a rate, in a time of their own: the rate is kept, and nobody is starved."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

from swarm.reach.relay.server import CHUNK_BYTES, MIN_CHUNK_BYTES, FairShare, Flow

RATE = 1_000_000.0
CHUNK = 10_000


class Clock:
    """Time that passes when nobody has anything to do."""

    def __init__(self) -> None:
        self.now = 0.0
        self._turns = itertools.count()
        self._later: list[tuple[float, int, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._later, (self.now + delay_s, next(self._turns), call))

    async def pause(self, seconds: float) -> None:
        over = asyncio.Event()
        self.call_later(seconds, over.set)
        await over.wait()

    async def pass_until(self, end: float) -> None:
        while True:
            for _ in range(50):
                await asyncio.sleep(0)
            if not self._later or self._later[0][0] > end:
                break
            self.now, _, call = heapq.heappop(self._later)
            call()
        self.now = end


async def carried(flows: list[tuple[Flow, int]], seconds: float) -> list[int]:
    """What flows carry that always have something to say, in pieces of their sizes."""
    clock = Clock()
    share = FairShare(RATE, clock=clock, call_later=clock.call_later)
    totals = [0] * len(flows)

    async def carry(number: int, flow: Flow, size: int) -> None:
        while True:
            totals[number] += size
            await share.pay(flow, size)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(carry(number, *flow)) for number, flow in enumerate(flows)]
        await clock.pass_until(seconds)
        for task in running:
            task.cancel()
    return totals


def flow(crowd: float = 1.0) -> Flow:
    return Flow(lambda: crowd)


async def test_the_rate_is_kept_and_shared_alike() -> None:
    totals = await carried([(flow(), CHUNK) for _ in range(5)], 10.0)
    assert sum(totals) < RATE * 10.5 + 5 * CHUNK
    assert sum(totals) > RATE * 9.5
    assert max(totals) - min(totals) <= 2 * CHUNK


async def test_large_pieces_bring_no_more_than_small_ones() -> None:
    large, small = await carried([(flow(), 20 * CHUNK), (flow(), CHUNK)], 10.0)
    assert abs(large - small) <= 40 * CHUNK


async def test_many_circuits_of_one_address_share_its_share() -> None:
    *many, alone = await carried([(flow(9.0), CHUNK) for _ in range(9)] + [(flow(), CHUNK)], 10.0)
    assert alone > 0.9 * sum(many)


async def test_who_says_little_waits_for_nobodys_backlog() -> None:
    clock = Clock()
    share = FairShare(RATE, clock=clock, call_later=clock.call_later)
    waits: list[float] = []

    async def hog(own: Flow) -> None:
        while True:
            await share.pay(own, CHUNK)

    async def talk(own: Flow) -> None:
        for _ in range(20):
            await clock.pause(0.2)
            began = clock()
            await share.pay(own, 500)
            waits.append(clock() - began)

    async with asyncio.TaskGroup() as tasks:
        hogs = [tasks.create_task(hog(flow())) for _ in range(50)]
        await clock.pass_until(2.0)
        talking = tasks.create_task(talk(flow()))
        await clock.pass_until(8.0)
        for task in (*hogs, talking):
            task.cancel()
    assert len(waits) == 20
    assert max(waits) < 3 * CHUNK / RATE, "and not fifty chunks"


async def test_a_cancelled_payment_is_nobodys() -> None:
    clock = Clock()
    share = FairShare(RATE, clock=clock, call_later=clock.call_later)
    await share.pay(flow(), int(RATE))
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(share.pay(flow(), CHUNK)) for _ in range(3)]
        await clock.pass_until(0.1)
        waiting[0].cancel()
        await clock.pass_until(2.0)
    assert [task.cancelled() for task in waiting] == [True, False, False]
    assert 0 < share.bytes_per_s < RATE


def test_pieces_take_ten_milliseconds_and_fit_a_buffer() -> None:
    assert FairShare(RATE).chunk_bytes == CHUNK
    assert FairShare(1e9).chunk_bytes == CHUNK_BYTES
    assert FairShare(1.0).chunk_bytes == MIN_CHUNK_BYTES
