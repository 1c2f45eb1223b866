"""Routes around machines, from what the directory said lately: it may be slow just when one is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Protocol

from swarm.discovery.registry import KNOWN_S
from swarm.errors import RegistryError, RouteError
from swarm.protocol.messages import RouteHop
from swarm.routing.route import Route
from swarm.runtime.tasks import TaskScope

FRESH_S = 1.0
"""How long a repair waits for the directory: a DHT that has lost peers as well took up to ten seconds."""


class FindDetour(Protocol):
    """Finds routes around machines."""

    async def __call__(self, avoid: Collection[str], keep: Sequence[RouteHop], *, within_s: float) -> Route:
        """A route without the machines in `avoid`, which leaves the hops in `keep` where they are if it can.

        within_s: how old the records that it is made from may be.

        Raises:
            RouteError: nobody serves some layers.
            RegistryError: the directory does not answer.
        """


class Rerouter:
    """Detours for one chain; at most one question to the directory is open."""

    def __init__(self, detour: FindDetour) -> None:
        self._detour = detour
        self._asking: asyncio.Task[None] | None = None

    async def known(self, avoid: Collection[str], keep: Sequence[RouteHop]) -> Route:
        """From what is known already.

        Raises:
            RouteError: nobody that is known serves some layers.
        """
        try:
            return await self._detour(avoid, keep, within_s=KNOWN_S)
        except RegistryError as error:
            raise RouteError(str(error), ()) from error

    async def fresh(self, scope: TaskScope, avoid: Collection[str], keep: Sequence[RouteHop]) -> Route:
        """From what the directory says now, if it says it soon; if not, its answer is known when it comes.

        scope: owns the question.

        Raises:
            RouteError: nobody that is known serves some layers.
        """
        await asyncio.wait({self._question(scope, avoid, keep)}, timeout=FRESH_S)
        return await self.known(avoid, keep)

    async def again(self, scope: TaskScope, avoid: Collection[str], keep: Sequence[RouteHop]) -> Route:
        """From what is known already, for one more try; the directory is asked meanwhile.

        scope: owns the question.

        Raises:
            RouteError: nobody that is known serves some layers.
        """
        self._question(scope, avoid, keep)
        return await self.known(avoid, keep)

    def _question(self, scope: TaskScope, avoid: Collection[str], keep: Sequence[RouteHop]) -> asyncio.Task[None]:
        if self._asking is None or self._asking.done():
            self._asking = scope.spawn(self._ask(avoid, keep))
        return self._asking

    async def _ask(self, avoid: Collection[str], keep: Sequence[RouteHop]) -> None:
        with suppress(RouteError, RegistryError):  # what it says is remembered by whoever is asked
            await self._detour(avoid, keep, within_s=0.0)
