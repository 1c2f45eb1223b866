"""How a node reaches machines behind relays: through holes, and by being called where it can be dialled itself."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from ipaddress import ip_address

from node.reach.ladder import Whereabouts
from node.reach.lend import MapPort
from swarm.discovery.node_record import Reach, bracketed, split_address
from swarm.egress.ports import Egress
from swarm.gateway.ports import NoMapping
from swarm.runtime.counted_log import describe
from swarm.ways.call_back import CallBackListener, CallBackWay, ExpectedCalls
from swarm.ways.local_dialler import LocalDialler, open_ways

logger = logging.getLogger(__name__)


@asynccontextmanager
async def node_ways(
    host: str, whereabouts: Whereabouts, map_port: MapPort, egress: Egress | None = None
) -> AsyncIterator[LocalDialler | None]:
    """The ways of a node, while the block runs; None where the system has not what they need.

    Args:
        host: where the node listens.
        whereabouts: how it is reached, now.
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
        whereabouts: how its service is reached.
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
