"""Lending a relay: keeps one running and offers it in the directory for as long as others reach it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from swarm.discovery.registry import Registry
from swarm.errors import RegistryError, SwarmError
from swarm.relay.child import RelaySettings
from swarm.relay.process import RelayProcess, relay_process
from swarm.relay.server import RelayLoad
from swarm.runtime.counted_log import describe
from swarm.runtime.tasks import TaskScope

CHECK_S = 60.0
"""How often peers are asked whether they reach the relay."""
UNSURE_S = 5.0
"""The same while nobody could be asked yet."""
RESTART_S = 5.0
"""Pause before a relay that died is started again."""

logger = logging.getLogger(__name__)

ReachedAt = Callable[[int], Awaitable[str | None]]
"""`host:port` under which others reach a local TCP port; None where they do not."""


@dataclass(slots=True)
class LentRelay:
    """A relay that this machine lends.

    Attributes:
        port: where it listens.
        address: `host:port` under which it is offered; None while it is not.
        load: what it carries; None before it said so.
    """

    port: int
    address: str | None = None
    load: RelayLoad | None = None


@asynccontextmanager
async def lend(registry: Registry, settings: RelaySettings, reached_at: ReachedAt) -> AsyncIterator[LentRelay]:
    """Run a relay and offer it; leaving takes the offer back and ends it.

    It is offered once a peer has reached it and it has proved whose it is, and where nobody could be asked yet: the
    first machine of a swarm lends to the second. A relay that nobody reaches any more is offered no more.

    Args:
        registry: the directory.
        settings: whose it is, where it listens and what it carries.
        reached_at: under which address others reach its port; asked again before each check.

    Raises:
        SwarmError: it does not start.
    """
    async with TaskScope() as scope:
        started: asyncio.Future[LentRelay] = asyncio.get_running_loop().create_future()
        scope.spawn(_keep_lending(registry, settings, reached_at, started))
        lent = await started
        try:
            yield lent
        finally:
            if lent.address is not None:
                with suppress(RegistryError):
                    await registry.offer_relay(None)


async def _keep_lending(
    registry: Registry, settings: RelaySettings, reached_at: ReachedAt, started: asyncio.Future[LentRelay]
) -> None:
    """Run a relay, and another one at the same port where it dies."""
    lent: LentRelay | None = None
    while True:
        try:
            async with relay_process(registry.identity, settings) as relay, TaskScope() as scope:
                if lent is None:
                    lent = LentRelay(relay.port)
                    settings = replace(settings, port=relay.port, takes_any_port=False)
                    started.set_result(lent)
                scope.spawn(_keep_offering(registry, lent, reached_at))
                scope.spawn(_keep_load(relay, lent))
                await relay.wait_ended()
                logger.warning("the relay that this machine lends has died; it is started again")
        except SwarmError as error:
            if lent is None:
                started.set_exception(error)
                return
            logger.warning("the relay that this machine lends is down: %s", describe(error))
        await _offer(registry, lent, None)
        await asyncio.sleep(RESTART_S)


async def _keep_load(relay: RelayProcess, lent: LentRelay) -> None:
    while True:
        lent.load = relay.load
        await asyncio.sleep(1.0)


async def _keep_offering(registry: Registry, lent: LentRelay, reached_at: ReachedAt) -> None:
    """Offer the relay while others reach it."""
    while True:
        verdict: bool | None = False
        address = None
        try:
            address = await reached_at(lent.port)
            verdict = False if address is None else await registry.dial_back_relay(address)
        except RegistryError as error:
            logger.info("nobody could be asked whether this machine's relay is reached: %s", describe(error))
            verdict = None
        if verdict is not None or lent.address is None:
            await _offer(registry, lent, address if verdict is not False else None)
        await asyncio.sleep(UNSURE_S if verdict is None else CHECK_S)


async def _offer(registry: Registry, lent: LentRelay | None, address: str | None) -> None:
    if lent is None or lent.address == address:
        return
    try:
        await registry.offer_relay(address)
    except RegistryError as error:
        logger.info("the relay's offer was not taken: %s", describe(error))
        return
    lent.address = address
    logger.info("lends a relay at %s", address) if address else logger.info("lends no relay now: nobody reaches it")
