"""Opens one session over the first route that stands: beside one that is late, a second one is tried.

A machine may take a session and never be ready for it. Whoever knows nobody yet would wait for it in each session. So
at most two routes are opened at once, each in a task of its own; the first that stands is used, and the other one is
left. Chooses no routes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from statistics import median

from client.chain.chain import Chain
from swarm.errors import HopError, SwarmError
from swarm.routing.costs import RouteForecast
from swarm.runtime.tasks import TaskScope

LATE_S, LATEST_S = 0.2, 2.0
"""A route that does not stand is late after so long at least, and at most."""
LATE_TIMES = 3.0
"""Of what routes of this client took to stand."""
DIALLED_LINKS = 4.0
"""All delays of a route together, so many times: each link is dialled, taken and ready, in several round trips."""
OPENINGS_KEPT = 16

logger = logging.getLogger(__name__)


class OpeningTimes:
    """How long routes of one client took to stand."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=OPENINGS_KEPT)

    def note(self, seconds: float) -> None:
        """One more stands."""
        self._seconds.append(seconds)

    def late_s(self, forecast: RouteForecast) -> float:
        """After how many seconds such a route is late."""
        usual_s = median(self._seconds) if self._seconds else 0.0
        return min(max(LATE_S, LATE_TIMES * usual_s, DIALLED_LINKS * forecast.links_ms / 1e3), LATEST_S)


class ChainOpening:
    """One chain that opens, and then stays open until it is left.

    Attributes:
        chain: may be used once `stands`.
        seconds: how long it took.
        error: why it cannot be opened.
        settled: done once one of both is known.
    """

    def __init__(self, scope: TaskScope, chain: Chain) -> None:
        """Begin to open; the scope owns the chain, and leaving the scope closes it."""
        self.chain = chain
        self.seconds = 0.0
        self.error: HopError | None = None
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._began_s = time.monotonic()
        self._left = False
        self._task = scope.spawn(self._hold())

    @property
    def stands(self) -> bool:
        """Whether it is open."""
        return self.settled.done() and self.error is None

    @property
    def waited_s(self) -> float:
        """How long it has been opening."""
        return time.monotonic() - self._began_s

    @property
    def peers(self) -> frozenset[str]:
        """The machines of its route."""
        route = self.chain.route
        return frozenset(hop.peer for hop in (*route.hops, *route.replicas))

    def leave(self) -> None:
        """Close it everywhere, and wait for nobody."""
        self._left = True
        self._task.cancel()

    async def _hold(self) -> None:
        try:
            async with open_chain(self.chain, self._failed):
                self.seconds = self.waited_s
                self.settled.set_result(None)
                await asyncio.Event().wait()
        except SwarmError as error:
            if self.error is None and not self._left:
                raise
            logger.debug("an opening ended", exc_info=error)

    def _failed(self, error: HopError) -> None:
        self.error = error
        self.settled.set_result(None)


async def first_open(
    begin: Callable[[], Awaitable[ChainOpening]],
    beside: Callable[[ChainOpening], Awaitable[ChainOpening | None]],
    failed: Callable[[ChainOpening], SwarmError | None],
    late_s: Callable[[ChainOpening], float],
) -> tuple[ChainOpening, ChainOpening | None]:
    """Open routes until one stands; returns it, and the late one that was left for it.

    Args:
        begin: opens the best route.
        beside: opens another one beside a late one; None: there is none.
        failed: called with an opening that failed; the error that ends the search, if one does.
        late_s: after how long an opening is late.

    Raises:
        SwarmError: what ended the search.
    """
    running: list[ChainOpening] = []
    is_alone = False
    try:
        while True:
            if not running:
                running, is_alone = [await begin()], False
            may_add = not is_alone and len(running) == 1
            limit_s = max(late_s(running[0]) - running[0].waited_s, 0.0) if may_add else None
            await asyncio.wait([one.settled for one in running], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if won := next((one for one in running if one.stands), None):
                running.remove(won)
                return won, next(iter(running), None)
            broken = [one for one in running if one.settled.done()]
            running = [one for one in running if not one.settled.done()]
            for one in broken:
                if (error := failed(one)) is not None:
                    raise error from one.error
            if not broken and not is_alone:
                another = await beside(running[0])
                is_alone = another is None
                running += [] if another is None else [another]
    finally:
        for one in running:
            one.leave()


@asynccontextmanager
async def open_chain(chain: Chain, failed: Callable[[HopError], None] = lambda error: None) -> AsyncIterator[Chain]:
    """Attach every hop of the chain's route; leaving closes the session everywhere.

    Args:
        chain: to open.
        failed: told why it cannot be, before it is closed: that may take a second.

    Raises:
        SwarmError: a hop refused, or did not answer in time.
    """
    async with TaskScope() as scope:
        try:
            try:
                await chain.open(scope)
            except HopError as error:
                failed(error)
                raise
            yield chain
        finally:
            await chain.close()  # also when the generation is left or breaks: KV elsewhere is not ours to keep
