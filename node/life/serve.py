"""A running node: starts, moves where it is needed, and leaves in order.

`async with Node(config, say) as node:` enters when the node is listed and exits when nothing of it is left.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import reduce
from types import TracebackType
from typing import Self

from node.life.autostart.recorder import NodeFacts
from node.life.autostart.state_file import Given, Stage
from node.life.pauses import Pauser, judge_of
from node.life.span_host import give_memory_back
from node.life.startup import RunningNode, StartUp
from node.model.config import ServeConfig
from node.model.loading import Say
from node.session.table import LEAVING, MOVING, PAUSED, SessionTable
from swarm.base.errors import RegistryError
from swarm.base.ids import ModelIdentity, PeerId
from swarm.base.layers import Span
from swarm.directory.coverage import serve_line
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.directory.registry import Registry
from swarm.link.endpoint import Endpoint
from swarm.status.messages import EventKind

logger = logging.getLogger(__name__)


class Node:
    """One machine's service.

    Attributes:
        others: nodes of this machine that serve further models.
    """

    def __init__(
        self,
        config: ServeConfig,
        say: Say,
        registry: Registry | None = None,
        pauser: Pauser | None = None,
        beside: Node | None = None,
    ) -> None:
        """Prepare a node.

        Args:
            registry: replaces joining the DHT.
            pauser: replaces what the options say of pausing.
            beside: the first node of this machine, which runs; this one serves another model on its port, with turns
                on its compute thread.
        """
        config, *self._further = config.of_models()
        self._config = config
        self._say = say
        self._stack = AsyncExitStack()
        self._start_up = StartUp(
            config, say, registry, self._stack, None if beside is None else beside.running.resources
        )
        self._is_first = beside is None
        self.others: tuple[Node, ...] = ()
        self._running: RunningNode | None = None
        self._looking: asyncio.Task[None] | None = None
        self._pauser = pauser
        self._pausing: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()  # it moves, pauses or goes on: one at a time
        self._is_leaving = False

    async def __aenter__(self) -> Self:
        """Start serving; returns once the node is listed.

        Raises:
            SwarmError: what stood in the way.
        """
        try:
            self._config.check()
            if self._is_first:
                self._pauser = self._pauser or Pauser(judge_of(self._config, self._worked_ms), self._say)
                await self._pauser.wait_until_free()
            self._running = running = await self._start_up.run()
        except BaseException:
            await self._stack.aclose()
            raise
        self._look_for_layers()
        try:
            for config in self._further:
                self.others += (await Node(config, self._say, beside=self).__aenter__(),)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        if self._pauser is not None and self._is_first:
            self._pausing = running.resources.scope.spawn(self._pauser.keep_looking(self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave: announce it, end sessions, close everything."""
        await self._end(self._pausing)
        self._refuse()
        for other in self.others:
            other._refuse()
        for other in reversed(self.others):
            await other.__aexit__(kind, error, trace)
        running, outbox, announcer = self.running, self.running.resources.outbox, self.running.announcer
        await self._end(self._looking)
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

    def _refuse(self) -> None:
        """Take no session any more: it leaves."""
        self._is_leaving = True
        host = self.running.host
        if host.service is not None:
            host.sessions.because, host.sessions.draining = LEAVING, True

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

    async def pause(self, reason: str) -> None:
        """Take no sessions until `resume`, and let those that run move away as when the node leaves."""
        for other in self.others:
            await other.pause(reason)
        host, announcer, outbox = self.running.host, self.running.announcer, self.running.resources.outbox
        async with self._changing:
            await self._end(self._looking)
            announcer.choose(host.model.span)  # a reservation of other layers is given up
            host.sessions.because, host.sessions.draining = PAUSED, True
            await self._announce(NodeState.DRAINING)
            outbox.add_event(EventKind.DRAINING, f"paused: {reason}")
            await host.drain(f"the node pauses: {reason}")
            if self._config.pause_frees_memory:
                await host.unload()
            await asyncio.to_thread(give_memory_back)

    async def resume(self) -> None:
        """Take sessions again.

        Raises:
            SwarmError: the layers, which were given up, cannot be loaded now.
        """
        for other in self.others:
            await other.resume()
        running = self.running
        span = running.announcer.span
        async with self._changing:
            if running.host.service is None:
                await running.host.load_again(span)
            running.host.sessions.draining = False
            await self._announce(NodeState.SERVING)
            again = f"serves {span.describe(self.identity.num_layers)} again"
            running.resources.outbox.add_event(EventKind.JOINED, again)
            self._look_for_layers()

    async def move(self, span: Span) -> None:
        """Serve the reserved span instead; what both spans have stays in memory.

        Raises:
            SwarmError: it cannot be loaded.
        """
        async with self._changing:
            await self._move(span)

    async def _move(self, span: Span) -> None:
        host, announcer, count = self.running.host, self.running.announcer, self.identity.num_layers
        own = host.model.span.describe(count)
        self._say(f"moves from {own} to {span.describe(count)}, where it is needed more")
        if host.service is not None:
            host.sessions.because = MOVING
        await host.drain("the node moves to other layers")
        await host.end_service()
        announcer.choose(span)
        await host.reload(span)
        await announcer.announce(NodeState.SERVING)
        self.running.resources.outbox.add_event(EventKind.MOVED, f"moved to {span.describe(count)}")

    def facts(self) -> NodeFacts:
        """What it does now and has given, for `node status`; at any time."""
        paused_for = None if self._pauser is None else self._pauser.paused_for
        if self._running is None:
            return NodeFacts(Stage.PAUSED if paused_for else Stage.STARTING, paused_for=paused_for or "")
        host, announcer, resources = self._running.host, self._running.announcer, self._running.resources
        is_between = host.service is None
        stage = Stage.STARTING if is_between else Stage.SERVING
        stage = Stage.LEAVING if self._is_leaving else Stage.PAUSED if paused_for else stage
        others = [other.facts() for other in self.others]
        counters = resources.counters
        own = Given(
            tokens=counters.tokens,
            layer_tokens=counters.layer_tokens,
            sweeps=counters.sweeps,
            received_bytes=counters.bytes_in,
            sent_bytes=counters.bytes_out,
            signed=resources.receipts.layer_tokens,
        )
        return NodeFacts(
            stage,
            peer=self.peer_id,
            model=self.identity.name,
            others="".join(f" and {other.layers} of {other.model}{other.others}" for other in others),
            layers=str(announcer.span),
            num_layers=self.identity.num_layers,
            address=resources.address,
            reach="" if announcer.announced is None else announcer.announced.reach.value,
            path="" if is_between else host.path_words,
            sessions=(0 if is_between else len(host.sessions)) + sum(other.sessions for other in others),
            paused_for=paused_for or "",
            given=reduce(Given.plus, (other.given for other in others), own),
        )

    def _look_for_layers(self) -> None:
        """Look from now on whether the swarm needs this node elsewhere, where it may move."""
        resources, reservation = self.running.resources, self.running.reservation
        if reservation is not None:
            self._looking = resources.scope.spawn(resources.rebalance.keep_looking(reservation, self))

    async def _announce(self, state: NodeState) -> None:
        """Announce a state; where that fails, the next renewal brings it."""
        try:
            await self.running.announcer.announce(state)
        except RegistryError as trouble:
            logger.warning("%s, and could not say so at once: %s", state.value, trouble)

    @staticmethod
    async def _end(task: asyncio.Task[None] | None) -> None:
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def _worked_ms(self) -> float:
        service = None if self._running is None else self._running.host.service
        own_ms = 0.0 if service is None else service.engine.worked_ms
        return own_ms + sum(other._worked_ms() for other in self.others)
