"""From a configuration to a running node, step by step.

    bind ports → join the directory → find the model → plan, and say so → load → serve → be dialled back → list

Whatever is opened is entered on the node's exit stack, so that the node closes it, also when a later step fails.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from socket import socket

import grpc.aio

from node.config import ServeConfig
from node.lifecycle.announcer import Announcer
from node.lifecycle.connection_guard import keep_connections_bounded
from node.lifecycle.planning import ServingPlan, make_plan
from node.lifecycle.resources import NodeResources
from node.lifecycle.span_host import SpanHost, bind
from node.lifecycle.summary import ServingSummary
from node.membership.duplicate_identity import check_alone
from node.membership.joining import SpanReservation, joiners_choice
from node.membership.model_mismatch import check_same_model, swarms_model
from node.membership.rebalance import Rebalance
from node.model.checkpoint import Checkpoint, open_named
from node.model.device import Device
from node.model.loading import Say, check_compute, check_kv, pick_device
from node.telemetry.counters import NodeCounters
from node.telemetry.metrics import NodeFigures, listening, serving_metrics
from node.telemetry.outbox import Outbox
from node.telemetry.publisher import Address, TelemetryPublisher
from node.telemetry.report import NodeDescription, NodeReport
from swarm.discovery.address_proof import NONCE_BYTES
from swarm.discovery.dht.registry import DhtRegistry
from swarm.discovery.node_record import NodeState, bracketed
from swarm.discovery.registry import Registry
from swarm.errors import UnknownModel, Unreachable
from swarm.ids import ModelIdentity
from swarm.joining.lan import announced, keep_announced
from swarm.layers import Span
from swarm.models.fingerprint import model_identity
from swarm.routing.latency import measure_delays
from swarm.routing.served import ServedModels
from swarm.runtime.tasks import TaskScope
from swarm.telemetry.messages import EventKind
from swarm.transport.certificate import ServerCertificate
from swarm.transport.dial import Dialer
from swarm.transport.endpoint import Endpoint


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
    """Has its port, and answers no call yet."""
    metrics_socket: socket | None
    """Listens for scrapes; None without `--metrics-port`."""


class StartUp:
    """The steps; `run` takes them in order."""

    def __init__(self, config: ServeConfig, say: Say, registry: Registry | None, stack: AsyncExitStack) -> None:
        """Prepare a start.

        Args:
            config: what to serve, and how.
            say: takes lines for the user.
            registry: replaces joining the DHT.
            stack: closes what the steps open.
        """
        self._config = config
        self._say = say
        self._registry = registry
        self._stack = stack

    async def run(self) -> RunningNode:
        """Serve; returns once the node is listed.

        Raises:
            SwarmError: what stood in the way. What was announced is withdrawn; what was opened is the stack's.
        """
        config = self._config
        config.check()
        check_compute(config)
        registry = self._registry or DhtRegistry.open(config.dht())
        certificate = None if config.insecure else ServerCertificate.fresh(registry.peer_id)
        server, port = bind(config.host, config.port, certificate)
        metrics_socket = self._stack.enter_context(listening(config.metrics_host, config.metrics_port))
        resources = await self._gather(registry, port, certificate)
        host = SpanHost(resources)
        announcer = Announcer(resources, host)
        self._stack.push_async_callback(host.stop_server)
        try:
            return await self._serve(Starting(resources, host, announcer, server, metrics_socket))
        except BaseException:
            await announcer.withdraw()
            raise

    async def _gather(self, opened: Registry, port: int, certificate: ServerCertificate | None) -> NodeResources:
        """Join the directory, find the model, and open what all spans need."""
        config, stack = self._config, self._stack
        registry = await stack.enter_async_context(opened)
        address = config.announce_address or f"{_reachable_host(config, registry)}:{port}"
        left_behind = await check_alone(registry, address, insecure=config.insecure)
        checkpoint, identity = await self._find_model(registry)
        return NodeResources(
            config=config,
            say=self._say,
            registry=registry,
            address=address,
            port=port,
            certificate=certificate,
            identity=identity,
            left_behind=left_behind,
            checkpoint=checkpoint,
            rebalance=Rebalance(random.Random()),
            counters=NodeCounters(),
            outbox=Outbox(),
            loaded=stack.enter_context(ExitStack()),
            dialer=await stack.enter_async_context(Dialer(insecure=config.insecure)),
            scope=await stack.enter_async_context(TaskScope()),
        )

    async def _find_model(self, registry: Registry) -> tuple[Checkpoint, ModelIdentity]:
        """The model asked for, or the joined swarm's only one."""
        config = self._config
        if config.model is None and not config.join:
            raise UnknownModel(
                "no swarm was named or found: say which MODEL one is to begin with here, or join one with --join (an "
                "address that its machines print)"
            )
        known = await registry.models() if config.join else []
        served = ServedModels(registry, partial(measure_delays, insecure=config.insecure))
        name = config.model or await swarms_model(served, known)
        checkpoint = await asyncio.to_thread(open_named, name, config)
        commit = checkpoint.hub.commit if checkpoint.hub else None
        identity = await asyncio.to_thread(model_identity, checkpoint.folder, checkpoint.name, commit)
        note = check_same_model(identity, known, must_match=config.model is None)
        if note is not None:
            self._say(note)
        return checkpoint, identity

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
            announcer.choose(Span.parse(config.layers).within(resources.identity.num_layers))
        self._explain(starting, plan)
        await self._start_telemetry(starting)
        await host.load(announcer.span)
        check_kv(host.model, config.kv_tokens)
        await host.open(starting.server)
        scope.spawn(keep_connections_bounded(resources.port))
        await self._be_dialled_back(starting)
        resources.rebalance.arrived()
        await announcer.announce(NodeState.SERVING)
        resources.outbox.add_event(EventKind.JOINED, f"serves {announcer.span.describe(resources.identity.num_layers)}")
        announcing = announcing or scope.spawn(announcer.keep_announcing())
        self._tell_neighbours(resources)
        return RunningNode(resources, host, announcer, announcing, reservation)

    def _tell_neighbours(self, resources: NodeResources) -> None:
        """Announce the swarm in the local network from now on, so that machines there find it without an address."""
        config, model = self._config, resources.identity
        said = announced(resources.registry.join_addresses(), config.join, (model.name, model.fingerprint))
        if said is not None and config.lan != "no" and not config.insecure:
            resources.scope.spawn(keep_announced(said))

    def _explain(self, starting: Starting, plan: ServingPlan) -> None:
        """Say what this node does and why."""
        resources, asked, join = starting.resources, self._config.model, self._config.join
        reached = f"at {resources.address}, which a peer is to call before the node is listed"
        for line in ServingSummary(resources.identity, asked, join, plan, starting.announcer.span, reached).lines():
            self._say(line)

    async def _reserve_span(self, starting: Starting, plan: ServingPlan) -> SpanReservation:
        """Reserve the span that the swarm needs most."""
        resources, announcer = starting.resources, starting.announcer
        registry, identity = resources.registry, resources.identity
        reservation = SpanReservation(registry, identity, announcer.reserve)
        await reservation.reserve(joiners_choice(registry.peer_id, plan.count.count, identity, plan.joiner))
        return reservation

    async def _start_telemetry(self, starting: Starting) -> None:
        """Answer scrapes and publish to MQTT from now on, where the user asks for it; neither delays the start."""
        config, resources = self._config, starting.resources
        registry, outbox = resources.registry, resources.outbox
        device = Device(pick_device(starting.host.order.device))
        description = NodeDescription(
            resources.identity, config.name, device, resources.counters, starting.announcer.snapshot
        )
        figures = NodeFigures(registry.peer_id, description)
        await self._stack.enter_async_context(serving_metrics(starting.metrics_socket, figures, self._say))
        broker = config.broker()
        if broker is not None:
            address = Address(broker, config.mqtt_prefix, resources.identity.fingerprint, registry.identity)
            publisher = TelemetryPublisher(address, NodeReport(description, outbox), outbox, self._say)
            await self._stack.enter_async_context(publisher)

    async def _be_dialled_back(self, starting: Starting) -> None:
        """Let a peer call the announced address.

        Raises:
            Unreachable: peers cannot reach it.
        """
        resources = starting.resources
        registry, address = resources.registry, resources.address
        if resources.certificate is None:
            self._say("insecure: links are plain text, and nobody but this machine is to use them")
            return
        endpoint = Endpoint(registry.peer_id, address, resources.certificate.der)
        reachable = await registry.dial_back(endpoint, secrets.token_bytes(NONCE_BYTES))
        if reachable is None:
            self._say("no peer yet that could dial back: this is the first machine of the swarm")
        elif not reachable:
            reason = f"peers cannot reach {address}: open or forward the port, or give --announce-address"
            raise Unreachable(registry.peer_id, str(starting.announcer.span), reason)


def _reachable_host(config: ServeConfig, registry: Registry) -> str:
    """The host of the first address under which the DHT peer is reachable, or the listening one."""
    host = config.host
    if host in ("0.0.0.0", "::"):
        host = (registry.join_addresses() or ["/ip4/127.0.0.1"])[0].split("/")[2]
    return bracketed(host)
