"""A running node: starts, moves where it is needed, and leaves in order.

`async with Node(config, say) as node:` enters when the node is listed and exits when nothing of it is left.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from node.config import ServeConfig
from node.lifecycle.startup import RunningNode, StartUp
from node.model.loading import Say
from node.session.table import SessionTable
from swarm.discovery.coverage import serve_line
from swarm.discovery.node_record import NodeRecord, NodeState
from swarm.discovery.registry import Registry
from swarm.errors import RegistryError
from swarm.ids import ModelIdentity, PeerId
from swarm.layers import Span
from swarm.telemetry.messages import EventKind
from swarm.transport.endpoint import Endpoint

logger = logging.getLogger(__name__)


class Node:
    """One machine's service."""

    def __init__(self, config: ServeConfig, say: Say, registry: Registry | None = None) -> None:
        """Prepare a node.

        Args:
            config: what it will serve, and how.
            say: takes lines for the user.
            registry: replaces joining the DHT.
        """
        self._config = config
        self._say = say
        self._stack = AsyncExitStack()
        self._start_up = StartUp(config, say, registry, self._stack)
        self._running: RunningNode | None = None
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start serving; returns once the node is listed.

        Raises:
            SwarmError: what stood in the way.
        """
        try:
            self._running = running = await self._start_up.run()
        except BaseException:
            await self._stack.aclose()
            raise
        resources = running.resources
        if running.reservation is not None:
            self._looking = resources.scope.spawn(resources.rebalance.keep_looking(running.reservation, self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave: announce it, end sessions, close everything."""
        running, outbox, announcer = self.running, self.running.resources.outbox, self.running.announcer
        if running.host.service is not None:
            running.host.sessions.draining = True
        if self._looking is not None:
            self._looking.cancel()
        is_listed = running.announcing.cancel()  # or it would list this node again; False: another has its identity
        try:
            if is_listed:
                await announcer.announce(NodeState.DRAINING)
            outbox.add_event(EventKind.DRAINING, "takes no new sessions: it leaves")
            await running.host.drain("the node leaves the swarm")
            if is_listed:
                await self.registry.withdraw(announcer.record(NodeState.DRAINING))
        except RegistryError as trouble:
            logger.warning("left without saying so: %s", trouble)  # the record runs out by itself
        finally:
            outbox.add_event(EventKind.LEFT, "left the swarm")
            await self._stack.aclose()

    @property
    def running(self) -> RunningNode:
        """What exists while the node runs."""
        assert self._running is not None, "the node was not started"
        return self._running

    @property
    def registry(self) -> Registry:
        """Where it is listed."""
        return self.running.resources.registry

    @property
    def identity(self) -> ModelIdentity:
        """The model that it serves layers of."""
        return self.running.resources.identity

    @property
    def sessions(self) -> SessionTable:
        """The sessions of the layers that it serves now."""
        return self.running.host.sessions

    @property
    def peer_id(self) -> PeerId:
        """This node's name in the swarm."""
        return self.registry.peer_id

    @property
    def address(self) -> str:
        """Under which others reach the gRPC service now."""
        return self.running.resources.address

    @property
    def endpoint(self) -> Endpoint:
        """How others reach it."""
        resources = self.running.resources
        return Endpoint(self.peer_id, self.address, b"" if resources.certificate is None else resources.certificate.der)

    def join_line(self) -> str:
        """The exact line with which the next machine joins: the layers after this span, or all of them."""
        end, last = self.running.announcer.span.end, self.identity.num_layers
        layers = f"{end}-{last}" if end < last else f"0-{last}"
        peers = self.registry.join_addresses() or list(self._config.join)  # nobody can join through a client
        return serve_line(self._config.model or self.identity.name, layers, peers)

    async def wait_failed(self) -> None:
        """Return when the node cannot go on, because its part of the DHT died."""
        await self.registry.wait_closed()

    def serving(self) -> NodeRecord:
        """The record of a node that serves."""
        return self.running.announcer.record(NodeState.SERVING)

    async def fetch(self, span: Span) -> None:
        """Download what another span needs."""
        await self.running.host.fetch(span)

    async def stay(self) -> None:
        """Take back a reservation: this node serves the layers that it has."""
        running = self.running
        running.announcer.choose(running.host.model.span)
        await running.announcer.announce(NodeState.SERVING)

    async def move(self, span: Span) -> None:
        """Serve the reserved span instead; what both spans have stays in memory.

        Raises:
            SwarmError: it cannot be loaded.
        """
        host, announcer, count = self.running.host, self.running.announcer, self.identity.num_layers
        own = host.model.span.describe(count)
        self._say(f"moves from {own} to {span.describe(count)}, where it is needed more")
        await host.drain("the node moves to other layers")
        await host.end_service()
        announcer.choose(span)
        await host.reload(span)
        await announcer.announce(NodeState.SERVING)
        self.running.resources.outbox.add_event(EventKind.MOVED, f"moved to {span.describe(count)}")
