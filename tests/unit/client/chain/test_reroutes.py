"""A repair does not wait for a directory that does not answer, and asks it one question at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import cast

import pytest

import client.chain.repair_plan
from client.chain.repair_plan import Freshness, Rerouter, RouteSearch
from swarm.base.errors import RegistryError, RouteError
from swarm.base.tasks import TaskScope
from swarm.protocol.messages import RouteHop
from swarm.routing.route import Route

NEW = cast("Route", "the new route")
KNOWN, KNOWN_AND_ASK, ASKED = (RouteSearch(freshness, frozenset(), ()) for freshness in Freshness)


class Directory:
    """Knows nothing until it has answered. answer: set to let it."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()
        self.asked = 0
        self.is_down = False

    async def __call__(self, avoid: Collection[str], keep: Sequence[RouteHop], *, within_s: float = 30.0) -> Route:
        if within_s == 0.0:
            self.asked += 1
            await self.answer.wait()
        if self.is_down:
            raise RegistryError("the DHT did not answer")
        if not self.answer.is_set():
            raise RouteError("nobody serves layers 4…7", ((4, 8),))
        return NEW


async def test_a_slow_directory_is_waited_for_briefly_and_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.chain.repair_plan, "FRESH_S", 0.02)
    directory = Directory()
    async with TaskScope() as scope:
        rerouter = Rerouter(directory)
        for _ in range(3):
            with pytest.raises(RouteError, match="nobody serves layers 4…7"):
                await rerouter.find(scope, ASKED)
        assert directory.asked == 1
        directory.answer.set()
        assert await rerouter.find(scope, ASKED) == NEW, "it was still being asked"
        assert directory.asked == 1
        assert await rerouter.find(scope, ASKED) == NEW
        assert directory.asked == 2


async def test_one_more_try_does_not_wait_for_the_directory_which_is_asked_meanwhile() -> None:
    directory = Directory()
    async with TaskScope() as scope:
        rerouter = Rerouter(directory)
        for _ in range(2):
            with pytest.raises(RouteError, match="nobody serves layers 4…7"):
                await rerouter.find(scope, KNOWN_AND_ASK)
            await asyncio.sleep(0)
        assert directory.asked == 1
        directory.answer.set()
        assert await rerouter.find(scope, ASKED) == NEW
        assert directory.asked == 1, "it was still being asked"


async def test_a_directory_that_is_down_ends_no_session() -> None:
    directory = Directory()
    directory.is_down = True
    directory.answer.set()
    async with TaskScope() as scope:
        rerouter = Rerouter(directory)
        for look in (rerouter.find(scope, KNOWN), rerouter.find(scope, ASKED)):
            with pytest.raises(RouteError, match="did not answer"):
                await look
