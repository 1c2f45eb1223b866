"""What a node lends: a relay for machines that nobody can dial, while others reach this one without help."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from ipaddress import ip_address
from typing import Final

from node.life.reach.ladder import Whereabouts
from node.model.config import ServeConfig
from swarm.base.logs import describe
from swarm.directory.dht.registry import DhtRegistry
from swarm.directory.dialable import interface_addresses, is_public
from swarm.directory.node_record import Reach, split_address
from swarm.directory.registry import Registry
from swarm.link.egress.ports import Egress
from swarm.link.egress.streams import bracketed
from swarm.reach.gateway.ports import NoMapping
from swarm.reach.paths.call_back import CallBackListener, CallBackWay, ExpectedCalls
from swarm.reach.paths.local_dialler import LocalDialler, open_ways
from swarm.reach.paths.tls_offer import TlsOffer
from swarm.reach.relay.child import RelaySettings
from swarm.reach.relay.lending import lend, lent_settings

logger = logging.getLogger(__name__)

LOOK_S: Final = 3.0
"""How often it is looked whether this machine is still reached without a relay."""
UNMEASURED_MBIT: Final = 10.0
"""Lent while the uplink was not measured."""
SHARE: Final = 0.25
"""Of the measured uplink."""


MapPort = Callable[[int], Awaitable[str]]
"""Has the router map another port; its external `host:port`. Raises NoMapping."""


class RelayLender:
    """Lends while it can."""

    def __init__(self, registry: Registry, config: ServeConfig, whereabouts: Whereabouts, map_port: MapPort) -> None:
        """Lend nothing yet.

        Args:
            map_port: for the relay's port, where the router maps the node's.
        """
        self._registry = registry
        self._config = config
        self._whereabouts = whereabouts
        self._map_port = map_port

    async def run(self, uplink_mbit_per_s: Callable[[], float | None]) -> None:
        """Lend for ever, or return where the options say that nothing is lent.

        Args:
            uplink_mbit_per_s: as measured; None before that.

        Raises:
            SwarmError: the relay does not start.
        """
        config = self._config

        def mbit_per_s() -> float:
            if config.relay_mbit is not None:
                return config.relay_mbit
            return usual_mbit(uplink_mbit_per_s(), config.max_mbit)

        settings = lent_settings(self._registry.peer_id, mbit_per_s(), host=config.host, port=config.relay_port)
        network = config.membership.network
        if settings is not None and network is not None:
            settings = replace(settings, members=network.presence.hex())
        async with AsyncExitStack() as stack:
            is_lent = False
            while settings is not None:
                is_reached = self._whereabouts.now.reach is not Reach.RELAYED
                if is_reached and not is_lent:
                    settings = await self._lend(stack, settings, mbit_per_s)
                elif is_lent and not is_reached:
                    await stack.aclose()
                is_lent = is_reached
                await asyncio.sleep(LOOK_S)

    async def _lend(
        self, stack: AsyncExitStack, settings: RelaySettings, mbit_per_s: Callable[[], float]
    ) -> RelaySettings:
        """Lend, in TLS too where that was asked for; the settings with the port that was taken."""
        config, registry = self._config, self._registry
        lending = lend(registry, settings, self._reached_at, mbit_per_s)
        is_direct = self._whereabouts.now.reach is Reach.DIRECT
        if config.tls_port is not None and is_direct and isinstance(registry, DhtRegistry):
            offer = TlsOffer(config.tls_port, config.host, config.membership.network, config.allow_private)
            lending = offer.lend(registry, settings, self._reached_at, mbit_per_s)
        lent = await stack.enter_async_context(lending)
        return replace(settings, port=lent.port)

    async def _reached_at(self, port: int) -> list[str]:
        """Under which addresses others may reach the relay: as the node, and by its other family."""
        reached = self._whereabouts.now
        match reached.reach:
            case Reach.DIRECT:
                best = f"{split_address(reached.address)[0]}:{port}"
            case Reach.MAPPED:
                try:
                    best = await self._map_port(port)
                except NoMapping as none:
                    logger.info("the relay's port is not mapped: %s", none)
                    return []
            case _:
                return []
        if self._config.host != "0.0.0.0":
            return [best]
        version = 4 if best.startswith("[") else 6
        others = [ip for ip in interface_addresses() if ip.version == version and is_public(ip)]
        return [best, *(f"{bracketed(str(ip))}:{port}" for ip in others[:1])]


def usual_mbit(uplink_mbit_per_s: float | None, limit_mbit_per_s: float | None = None) -> float:
    """What is lent where no option says it: a quarter of the uplink, or of what its owner lets sessions send.

    Args:
        uplink_mbit_per_s: as measured; None before that.
        limit_mbit_per_s: the owner's limit; None without one.
    """
    usual = UNMEASURED_MBIT if uplink_mbit_per_s is None else round(SHARE * uplink_mbit_per_s, 1)
    return usual if limit_mbit_per_s is None else min(usual, round(SHARE * limit_mbit_per_s, 2))


# How a node reaches machines behind relays: through holes, and by being called where it can be dialled itself.


@asynccontextmanager
async def node_ways(
    host: str, whereabouts: Whereabouts, map_port: MapPort, egress: Egress | None = None
) -> AsyncIterator[LocalDialler | None]:
    """The ways of a node, while the block runs; None where the system has not what they need.

    Args:
        map_port: asked once, if a router maps the node's own port.
        egress: of a machine whose network lets little out; nobody calls it.
    """
    async with AsyncExitStack() as stack:
        ways = await stack.enter_async_context(open_ways(egress=egress))
        if ways is not None and egress is None:
            calls = ExpectedCalls()
            try:
                port = await stack.enter_async_context(CallBackListener.listen(calls, host))
            except OSError as error:
                logger.debug("nobody will call this machine: %s", describe(error))
            else:
                mapped = None
                if whereabouts.now.reach is Reach.MAPPED:
                    with suppress(NoMapping):
                        mapped = await map_port(port)
                ways.choice.add(CallBackWay(calls, lambda: call_address(whereabouts, port, mapped)))
        yield ways


def call_address(whereabouts: Whereabouts, port: int, mapped: str | None) -> str | None:
    """Where machines may call a node now; None where nobody can.

    Args:
        port: at which it listens for calls.
        mapped: `host:port` of the router that leads there.
    """
    now = whereabouts.now
    match now.reach:
        case Reach.DIRECT:
            host = split_address(now.address)[0].strip("[]")
            try:
                return f"{bracketed(str(ip_address(host)))}:{port}"
            except ValueError:  # a name: machines look up nobody's names
                return None
        case Reach.MAPPED:
            return mapped
        case _:
            return None
