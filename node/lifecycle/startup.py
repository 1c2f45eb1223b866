"""From a configuration to a running node, step by step.

    bind ports → join the directory → find the model → choose layers → load → open the service → be dialled back → list

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
from node.lifecycle.resources import NodeResources
from node.lifecycle.span_host import SpanHost, bind
from node.membership.duplicate_identity import check_alone
from node.membership.joining import SpanReservation, joiners_choice
from node.membership.model_mismatch import check_invited_model, check_same_model, swarms_model
from node.membership.rebalance import Rebalance
from node.model.checkpoint import Checkpoint, open_named
from node.model.device import Device
from node.model.loading import Say, check_compute, check_kv, compute_of, fitting_layers, free_bytes, pick_device
from node.model.span import dissect
from node.telemetry.counters import NodeCounters
from node.telemetry.metrics import NodeFigures, listening, serving_metrics
from node.telemetry.outbox import Outbox
from node.telemetry.publisher import Address, TelemetryPublisher
from node.telemetry.report import NodeDescription, NodeReport
from swarm.discovery.address_proof import NONCE_BYTES
from swarm.discovery.dht.registry import DhtRegistry
from swarm.discovery.node_record import NodeState, bracketed
from swarm.discovery.registry import Registry
from swarm.errors import LayersError, Unreachable
from swarm.ids import ModelIdentity
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
        server, port = bind(config.host, config.port, certificate, config.membership.network)
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
        network = config.membership.network
        left_behind = await check_alone(registry, address, insecure=config.insecure, network=network)
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
            dialer=await stack.enter_async_context(Dialer(insecure=config.insecure, network=network)),
            scope=await stack.enter_async_context(TaskScope()),
        )

    async def _find_model(self, registry: Registry) -> tuple[Checkpoint, ModelIdentity]:
        """The model asked for, or the joined swarm's only one."""
        config = self._config
        known = await registry.models() if config.join else []
        network = config.membership.network
        served = ServedModels(registry, partial(measure_delays, insecure=config.insecure, network=network))
        name = config.model or await swarms_model(served, known)
        self._say(f"model: {name}")
        checkpoint = await asyncio.to_thread(open_named, name, config)
        commit = checkpoint.hub.commit if checkpoint.hub else None
        identity = await asyncio.to_thread(model_identity, checkpoint.folder, checkpoint.name, commit)
        note = check_same_model(identity, known, must_match=config.model is None)
        if note is not None:
            self._say(note)
        check_invited_model(identity, config.fingerprint)
        if config.membership.note_model is not None:
            config.membership.note_model(identity.fingerprint)
        return checkpoint, identity

    async def _serve(self, starting: Starting) -> RunningNode:
        """Choose layers, load and serve them, and list the node."""
        config, resources = self._config, starting.resources
        host, announcer, scope = starting.host, starting.announcer, starting.resources.scope
        reservation = announcing = None
        if config.is_auto:
            reservation = await self._reserve_span(starting)
            announcing = scope.spawn(announcer.keep_announcing())  # keeps the reservation alive
        else:
            announcer.choose(Span.parse(config.layers))
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
        return RunningNode(resources, host, announcer, announcing, reservation)

    async def _reserve_span(self, starting: Starting) -> SpanReservation:
        """Reserve the span that the swarm needs most."""
        config, resources = self._config, starting.resources
        device, dtype = await asyncio.to_thread(compute_of, resources.checkpoint, config)
        layout = await asyncio.to_thread(dissect, resources.checkpoint.config)
        count = config.num_layers
        if count is None:
            count = fitting_layers(layout, dtype, free_bytes(device), config.kv_tokens)
        if count > layout.num_layers:
            raise LayersError(f"--num-layers {count}: the model has {layout.num_layers} layers")
        starting.host.numeric_class = f"{device.type}-{str(dtype).removeprefix('torch.')}"
        announcer, registry = starting.announcer, resources.registry
        reservation = SpanReservation(registry, resources.identity, announcer.reserve)
        await reservation.reserve(joiners_choice(registry.peer_id, count, resources.identity))
        self._say(f"the swarm needs {announcer.span.describe(layout.num_layers)} most")
        return reservation

    async def _start_telemetry(self, starting: Starting) -> None:
        """Answer scrapes and publish to MQTT from now on, where the user asks for it; neither delays the start."""
        config, resources = self._config, starting.resources
        registry, outbox = resources.registry, resources.outbox
        device = Device(pick_device(config.device))
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
