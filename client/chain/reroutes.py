"""Routes around machines, from what the directory said lately: it may be slow just when one is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Protocol

from client.chain.repair_plan import Freshness, RouteSearch
from swarm.discovery.registry import KNOWN_S
from swarm.errors import RegistryError, RouteError
from swarm.protocol.messages import RouteHop
from swarm.routing.route import Route
from swarm.runtime.tasks import TaskScope

FRESH_S = 1.0
"""How long a repair waits for the directory: a DHT that has lost peers as well may take ten seconds."""


class FindRoute(Protocol):
    """Finds routes around machines."""

    async def __call__(self, avoid: Collection[str], keep: Sequence[RouteHop], *, within_s: float) -> Route:
        """Find the best route that there is.

        Args:
            avoid: peers that must not be in it.
            keep: hops that stay where they are if that is possible.
            within_s: how old the records that it is made from may be.

        Raises:
            RouteError: nobody serves some layers.
            RegistryError: the directory does not answer.
        """


class Rerouter:
    """Searches for one chain; at most one question to the directory is open."""

    def __init__(self, find_route: FindRoute) -> None:
        self._find_route = find_route
        self._question: asyncio.Task[None] | None = None

    async def find(self, scope: TaskScope, search: RouteSearch) -> Route:
        """Carry out a search; what the directory says too late is known to the next one.

        Args:
            scope: owns the question to the directory.
            search: the search.

        Raises:
            RouteError: nobody that is known serves some layers.
        """
        match search.freshness:
            case Freshness.KNOWN_AND_ASK:
                self._ask(scope, search)
            case Freshness.ASKED:
                await asyncio.wait({self._ask(scope, search)}, timeout=FRESH_S)
            case Freshness.KNOWN:
                pass
        try:
            return await self._find_route(search.avoid, search.keep, within_s=KNOWN_S)
        except RegistryError as error:
            raise RouteError(str(error), ()) from error

    def _ask(self, scope: TaskScope, search: RouteSearch) -> asyncio.Task[None]:
        if self._question is None or self._question.done():
            self._question = scope.spawn(self._ask_directory(search))
        return self._question

    async def _ask_directory(self, search: RouteSearch) -> None:
        with suppress(RouteError, RegistryError):  # what it says is remembered by whoever is asked
            await self._find_route(search.avoid, search.keep, within_s=0.0)
