"""From a configuration to a running node, step by step.

    bind ports → join the directory → be reached → find the model → plan, and say so → load → serve → list

How a node comes to be reached is proven before anything large is loaded (`node.life.arrival`).

Whatever is opened is entered on the node's exit stack, so that the node closes it, also when a later step fails.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from socket import socket

import grpc.aio

from node.life.announcer import Announcer
from node.life.arrival import REMEMBER_S, Arrival, Arrived, BoundServer
from node.life.connection_guard import keep_connections_bounded
from node.life.contributors import ContributorReader
from node.life.joining import Rebalance, SpanReservation, joiners_choice
from node.life.machine import SharedMachine
from node.life.metrics import NodeFigures, listening, serving_metrics
from node.life.model_finder import ModelFinder
from node.life.planning import NodeResources, ServingPlan, make_plan
from node.life.publisher import Address, Outbox, TelemetryPublisher
from node.life.reach.hello import HelloOnly
from node.life.reach.lend import MapPort, RelayLender, node_ways
from node.life.reach.watch import Watch
from node.life.receipt_file import ReceiptFile
from node.life.report import NodeDescription, NodeReport
from node.life.span_host import STOP_GRACE_S, SpanHost, bind
from node.life.summary import ServingSummary
from node.model.config import ServeConfig
from node.model.device import Device
from node.model.loading import Say, check_compute, check_kv, pick_device
from node.session.admission import Admission
from node.session.counters import NodeCounters
from node.session.receipts import ReceiptBook
from swarm.base.errors import ConfigError
from swarm.base.layers import Span
from swarm.base.tasks import TaskScope, unending
from swarm.compute.compute_thread import ComputeThread
from swarm.directory.dht.registry import DhtRegistry
from swarm.directory.identity import kept_successions
from swarm.directory.joining.lan import announced, keep_announced
from swarm.directory.node_record import NodeState
from swarm.directory.registry import Registry
from swarm.link.certificate import ServerCertificate
from swarm.link.dial import Dialer
from swarm.link.link import Uplink
from swarm.status.messages import EventKind


@dataclass(frozen=True, slots=True)
class RunningNode:
    """Everything that exists while a node runs."""

    resources: NodeResources
    host: SpanHost
    announcer: Announcer
    announcing: asyncio.Task[None]
    """Renews the record."""
    reservation: SpanReservation | None
    """Where a node reserves layers that chooses them itself (`--layers auto`)."""


@dataclass(frozen=True, slots=True)
class Starting:
    """What the steps after the model was found work with."""

    resources: NodeResources
    host: SpanHost
    announcer: Announcer
    server: grpc.aio.Server
    """Has its port, and answers Hello alone until the service does."""
    arrival: Arrival | None
    """None for a further model of a machine, which has arrived."""
    hello: HelloOnly | None
    metrics_socket: socket | None
    """Listens for scrapes; None without `--metrics-port`."""


class StartUp:
    """The steps; `run` takes them in order."""

    def __init__(
        self,
        config: ServeConfig,
        say: Say,
        registry: Registry | None,
        stack: AsyncExitStack,
        beside: NodeResources | None = None,
    ) -> None:
        """Prepare a start.

        Args:
            registry: replaces joining the DHT.
            beside: of the machine's first node; this one serves another model on the same port.
        """
        self._config = config
        self._say = say
        self._registry = registry
        self._stack = stack
        self._beside = beside
        self._compute = ComputeThread() if beside is None else beside.compute
        self._hashing = ComputeThread("hashing") if beside is None else beside.hashing

    async def run(self) -> RunningNode:
        """Serve; returns once the node is listed.

        Raises:
            SwarmError: what stood in the way. What was announced is withdrawn; what was opened is the stack's.
        """
        config = self._config
        config.check()
        check_compute(config)
        if self._beside is not None:
            return await self._run_beside(self._beside)
        self._stack.callback(self._compute.close)  # ends last, after all that computes
        self._stack.callback(self._hashing.close)
        self._hashing.submit(int)  # its thread lives as long as the node
        self._compute.own_the_pool(config.threads)
        registry = self._registry or DhtRegistry.open(config.dht())
        certificate = None if config.insecure else ServerCertificate.fresh(registry.peer_id)
        server, port = bind(config.host, config.port, certificate, config.membership.network)
        metrics_socket = self._stack.enter_context(listening(config.metrics_host, config.metrics_port))
        bound = BoundServer(server, port, certificate)
        arrival = Arrival(config, self._say, self._stack, bound)
        arrived = await arrival.run(registry)
        resources = await self._gather(arrived, bound, arrival.map_other_port)
        if resources.machine.is_shared:
            self._stack.push_async_callback(server.stop, STOP_GRACE_S)
        return await self._begin(resources, server, arrival, arrived.hello, metrics_socket)

    async def _run_beside(self, first: NodeResources) -> RunningNode:
        """Serve another model on the port of a node that runs."""
        config, machine = self._config, first.machine
        assert machine.server is not None, "the first model is served"
        found = await ModelFinder(config, self._say, first.registry).find()
        if found.identity.fingerprint in machine.kv_bytes:
            raise ConfigError(f"{found.identity.name} is named twice: this machine serves it already")
        resources = replace(
            first,
            config=config,
            identity=found.identity,
            manifest=found.manifest,
            checkpoint=found.checkpoint,
            rebalance=Rebalance(random.Random()),
            counters=NodeCounters(),
            outbox=Outbox(),
            receipts=self._receipts(first.registry, found.identity.fingerprint, first.scope),
            loaded=self._stack.enter_context(ExitStack()),
        )
        return await self._begin(resources, machine.server, None, None, None)

    def _receipts(self, registry: Registry, fingerprint: str, scope: TaskScope) -> ReceiptBook:
        """What clients sign for of a model; what waits to be published is kept where the identity is."""
        book = ReceiptBook(registry.peer_id)
        if registry.identity.path is not None:
            file = ReceiptFile.of(registry.peer_id, fingerprint)
            file.load(book)
            scope.spawn(file.keep(book))
        return book

    async def _begin(
        self,
        resources: NodeResources,
        server: grpc.aio.Server,
        arrival: Arrival | None,
        hello: HelloOnly | None,
        metrics_socket: socket | None,
    ) -> RunningNode:
        host = SpanHost(resources)
        announcer = Announcer(resources, host)
        resources.machine.announce_again.append(announcer.say_again)
        self._stack.push_async_callback(host.stop_server)
        try:
            return await self._serve(Starting(resources, host, announcer, server, arrival, hello, metrics_socket))
        except BaseException:
            await announcer.withdraw()
            raise

    async def _gather(self, arrived: Arrived, bound: BoundServer, map_port: MapPort) -> NodeResources:
        """Find the model, and open what all spans need."""
        config, stack, registry = self._config, self._stack, arrived.registry
        network = config.membership.network
        found = await ModelFinder(config, self._say, registry).find()
        counters = NodeCounters()
        ways = None
        if bound.certificate is not None:
            opened = node_ways(config.host, arrived.whereabouts, map_port, registry.egress)
            ways = await stack.enter_async_context(opened)
        return NodeResources(
            config=config,
            say=self._say,
            registry=registry,
            whereabouts=arrived.whereabouts,
            port=bound.port,
            certificate=bound.certificate,
            identity=found.identity,
            manifest=found.manifest,
            left_behind=arrived.left_behind,
            checkpoint=found.checkpoint,
            rebalance=Rebalance(random.Random()),
            counters=counters,
            uplink=Uplink(counters.sent, config.max_mbit),
            outbox=Outbox(),
            receipts=self._receipts(registry, found.identity.fingerprint, arrived.scope),
            loaded=stack.enter_context(ExitStack()),
            dialer=await stack.enter_async_context(Dialer(insecure=config.insecure, ways=ways, network=network)),
            ways=ways,
            scope=arrived.scope,
            compute=self._compute,
            hashing=self._hashing,
            machine=SharedMachine(1 + len(config.more), admission=Admission(preferred=config.preferred)),
        )

    async def _serve(self, starting: Starting) -> RunningNode:
        """Choose layers, load and serve them, and list the node."""
        config, resources = self._config, starting.resources
        host, announcer, scope = starting.host, starting.announcer, starting.resources.scope
        reservation = announcing = None
        plan = await make_plan(resources)
        host.order, host.numeric_class = plan.order, plan.kind.numeric_class
        if config.is_auto:
            reservation = await self._reserve_span(starting, plan)
            announcing = scope.spawn(announcer.keep_announcing())  # keeps the reservation alive
        else:
            announcer.choose(plan.layout.borders.check(Span.parse(config.layers)))
        self._explain(starting, plan)
        await self._start_telemetry(starting)
        await host.load(announcer.span)
        check_kv(host.model, config.kv_tokens)
        await host.open(starting.server)
        if starting.hello is not None:
            starting.hello.close()
        if starting.arrival is not None:
            scope.spawn(keep_connections_bounded(resources.port, shut_out=resources.machine.admission.shut_out))
        resources.rebalance.arrived()
        await announcer.announce(NodeState.SERVING)
        resources.outbox.add_event(EventKind.JOINED, f"serves {announcer.span.describe(resources.identity.num_layers)}")
        announcing = announcing or scope.spawn(announcer.keep_announcing())
        if isinstance(resources.registry, DhtRegistry):
            await resources.registry.prove_addresses()  # before a line is printed with which others join
        if starting.arrival is not None:
            self._read_contributors(resources)
            self._keep_reached(starting, starting.arrival)
            self._tell_neighbours(resources)
        return RunningNode(resources, host, announcer, announcing, reservation)

    def _keep_reached(self, starting: Starting, arrival: Arrival) -> None:
        """Look from now on whether others still reach the node, and say so when they reach it otherwise."""
        if starting.hello is None:
            return  # a swarm on this machine alone
        senses = replace(arrival.senses(), announce=starting.resources.machine.say_again)
        watch = Watch(starting.resources.whereabouts, senses, time.monotonic)
        scope = starting.resources.scope
        scope.spawn(unending(arrival.remember_relays, "asking for relays", pause_s=REMEMBER_S))
        scope.spawn(unending(watch.run, "watching how this machine is reached"))
        if self._config.relay_mbit != 0 and isinstance(starting.resources.registry, DhtRegistry):
            scope.spawn(unending(partial(self._lend, starting, arrival), "lending a relay"))

    async def _lend(self, starting: Starting, arrival: Arrival) -> None:
        """Lend a relay while this machine needs none itself."""
        resources, announcer = starting.resources, starting.announcer

        def uplink_mbit_per_s() -> float | None:
            return None if announcer.announced is None else announcer.announced.uplink_mbit_per_s

        lender = RelayLender(resources.registry, self._config, resources.whereabouts, arrival.map_other_port)
        await lender.run(uplink_mbit_per_s)

    def _tell_neighbours(self, resources: NodeResources) -> None:
        """Announce the swarm in the local network from now on, so that machines there find it without an address.

        A private one is not announced: strangers would learn its model, and could not join.
        """
        config, model = self._config, resources.identity
        if config.membership.network is not None:
            return
        registry, named = resources.registry, (model.name, model.fingerprint)
        swarm = registry.swarm_id if isinstance(registry, DhtRegistry) else None
        said = announced(registry.join_addresses(), config.join, named, swarm=swarm)
        if said is not None and config.lan != "no" and not config.insecure:
            resources.scope.spawn(keep_announced(said))

    def _read_contributors(self, resources: NodeResources) -> None:
        """Learn from now on who contributed, where the operator trusts a list of that."""
        url = self._config.contributors_url
        if url is None:
            return
        reader = ContributorReader(url, partial(setattr, resources.machine.admission, "contributors"))
        resources.scope.spawn(unending(reader.run, "reading who contributed"))

    def _explain(self, starting: Starting, plan: ServingPlan) -> None:
        """Say what this node does and why."""
        resources, config = starting.resources, self._config
        asked, join = config.model, config.join
        reached = resources.whereabouts.now.why.removeprefix("reached ") or f"at {resources.address}"
        span, why = starting.announcer.span, config.model_why
        for line in ServingSummary(resources.identity, asked, join, plan, span, reached, why).lines():
            self._say(line)

    async def _reserve_span(self, starting: Starting, plan: ServingPlan) -> SpanReservation:
        """Reserve the span that the swarm needs most."""
        resources, announcer = starting.resources, starting.announcer
        registry, identity = resources.registry, resources.identity
        reservation = SpanReservation(registry, identity, announcer.reserve, plan.layout.borders)
        choose = joiners_choice(registry.peer_id, plan.count.count, identity, plan.joiner)
        await reservation.reserve(reservation.moved_to_borders(choose))
        return reservation

    async def _start_telemetry(self, starting: Starting) -> None:
        """Answer scrapes and publish to MQTT from now on, where the user asks for it; neither delays the start."""
        config, resources = self._config, starting.resources
        registry, outbox = resources.registry, resources.outbox
        device = Device(pick_device(starting.host.order.device))
        description = NodeDescription(
            *(resources.identity, config.name, device, resources.counters, starting.announcer.snapshot),
            *(resources.receipts, kept_successions(registry.identity.path)),
        )
        resources.machine.descriptions.append(description)
        figures = NodeFigures(registry.peer_id, resources.machine.descriptions)
        await self._stack.enter_async_context(serving_metrics(starting.metrics_socket, figures, self._say))
        broker = config.broker()
        if broker is not None:
            address = Address(broker, config.mqtt_prefix, resources.identity.fingerprint, registry.identity)
            publisher = TelemetryPublisher(address, NodeReport(description, outbox), outbox, self._say)
            await self._stack.enter_async_context(publisher)
