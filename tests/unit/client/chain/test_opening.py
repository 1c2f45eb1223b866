"""A route that is late is not waited for alone; a chain that fails is not waited for at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from client.chain.chain import Chain
from client.chain.opening import LATE_S, LATE_TIMES, LATEST_S, ChainOpening, OpeningTimes, first_open
from swarm.base.errors import Busy, HopError, SwarmError
from swarm.base.tasks import TaskScope
from swarm.routing.costs import RouteForecast


class HeldChain:
    """A chain that opens, fails and closes when the test says so."""

    def __init__(self, *, stands: bool = False, error: HopError | None = None, slow_close: bool = False) -> None:
        self.may_open = asyncio.Event()
        self.is_closed = False
        self._error = error
        self._may_close = asyncio.Event()
        if stands or error is not None:
            self.may_open.set()
        if not slow_close:
            self._may_close.set()

    async def open(self, scope: TaskScope) -> None:
        await self.may_open.wait()
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        await self._may_close.wait()
        self.is_closed = True


class Race:
    """Routes in the order in which they are tried."""

    def __init__(
        self, scope: TaskScope, *chains: HeldChain, others: tuple[HeldChain, ...] = (), ends: bool = False
    ) -> None:
        self._scope, self._chains, self._others, self._ends = scope, list(chains), list(others), ends
        self.most, self.begun, self.failed = 0, list[ChainOpening](), list[ChainOpening]()

    async def run(self, late_s: float = 0.0) -> tuple[ChainOpening, ChainOpening | None]:
        return await first_open(self._first, self._beside, self._fails, lambda one: late_s)

    async def _first(self) -> ChainOpening:
        return self._begin(self._chains.pop(0))

    async def _beside(self, late: ChainOpening) -> ChainOpening | None:
        return self._begin(self._others.pop(0)) if self._others else None

    def _begin(self, chain: HeldChain) -> ChainOpening:
        self.begun.append(ChainOpening(self._scope, cast("Chain", chain)))
        self.most = max(self.most, sum(not one.settled.done() for one in self.begun))
        return self.begun[-1]

    def _fails(self, one: ChainOpening) -> SwarmError | None:
        self.failed.append(one)
        return one.error if self._ends else None


@pytest.fixture
async def scope() -> AsyncIterator[TaskScope]:
    async with asyncio.timeout(10), TaskScope() as scope:
        yield scope


def refusal() -> Busy:
    return Busy("a", "0-4", "full")


async def test_a_route_that_stands_in_time_costs_no_second_one(scope: TaskScope) -> None:
    race = Race(scope, HeldChain(stands=True), others=(HeldChain(),))
    won, left = await race.run(late_s=5.0)
    assert [won] == race.begun
    assert left is None


async def test_beside_a_machine_that_is_never_ready_another_route_is_opened(scope: TaskScope) -> None:
    never = HeldChain()
    race = Race(scope, never, others=(HeldChain(stands=True),))
    won, left = await race.run()
    assert (won, left) == (race.begun[1], race.begun[0])
    assert not never.is_closed
    assert left is not None
    await asyncio.wait([left._task])
    assert never.is_closed


async def test_who_was_only_late_is_used_where_it_stands_first(scope: TaskScope) -> None:
    first, other = HeldChain(), HeldChain()
    race = Race(scope, first, others=(other,))
    asyncio.get_running_loop().call_later(0.01, first.may_open.set)
    won, left = await race.run()
    assert (won, left) == (race.begun[0], race.begun[1])


async def test_no_more_than_two_are_opened_at_once(scope: TaskScope) -> None:
    late, late_too = HeldChain(), HeldChain(error=refusal())
    race = Race(scope, late, others=(late_too, HeldChain(), HeldChain()))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await race.run()
    assert race.most == 2
    assert len(race.begun) == 3, "one took the place of the one that failed"
    await asyncio.wait([one._task for one in race.begun])
    assert late.is_closed, "what was given up is closed"


async def test_the_next_route_does_not_wait_until_one_that_failed_is_closed(scope: TaskScope) -> None:
    deaf = HeldChain(error=refusal(), slow_close=True)
    race = Race(scope, deaf, HeldChain(stands=True))
    won, left = await race.run(late_s=5.0)
    assert [race.begun[0]] == race.failed
    assert (won, left) == (race.begun[1], None)
    assert not deaf.is_closed


async def test_a_refusal_that_settles_it_ends_the_search_and_closes_the_other(scope: TaskScope) -> None:
    late = HeldChain()
    race = Race(scope, late, others=(HeldChain(error=refusal()),), ends=True)
    with pytest.raises(Busy):
        await race.run()
    await asyncio.wait([race.begun[0]._task])
    assert late.is_closed


def test_what_is_late_follows_from_links_and_from_other_openings() -> None:
    times = OpeningTimes()
    near, far = RouteForecast(2.0, 1.0, 1.0), RouteForecast(200.0, 1.0, 1.0)
    assert times.late_s(near) == LATE_S
    assert LATE_S < times.late_s(far) < LATEST_S
    for seconds in (0.3, 0.4, 50.0):
        times.note(seconds)
    assert times.late_s(near) == pytest.approx(LATE_TIMES * 0.4)
    for _ in range(4):
        times.note(50.0)
    assert times.late_s(near) == LATEST_S
