"""A running node: loads its span, opens its ports, is dialled back, announces itself, leaves politely.

`async with Node(config, say) as node:` enters when the node is listed and exits when nothing of it is left.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from socket import socket
from types import TracebackType
from typing import Self

import grpc.aio
import torch
from torch import nn

from node.config import ServeConfig
from node.engine.measure import measure_sweeps, step_cost
from node.engine.scheduler import Engine
from node.membership.duplicate_identity import check_alone, check_still_alone
from node.membership.joining import SpanReservation, joiners_choice
from node.membership.model_mismatch import check_same_model
from node.membership.peer_latency import PeerDelays
from node.membership.rebalance import Rebalance
from node.model.checkpoint import Checkpoint, open_called
from node.model.device import Device
from node.model.loading import (
    check_compute,
    check_kv,
    compute_of,
    count_tokens,
    default_kv_tokens,
    fetch,
    fitting_layers,
    free_bytes,
    load,
    pick_device,
)
from node.model.malloc_trim import give_back
from node.model.span import dissect, shared_parts
from node.session.context import NodeContext
from node.session.service import NodeService
from node.session.table import SessionTable
from node.telemetry.counters import NodeCounters
from node.telemetry.metrics import NodeFigures, listening, serving_metrics
from node.telemetry.outbox import Outbox
from node.telemetry.publisher import Address, TelemetryPublisher
from node.telemetry.report import NodeDescription, NodeReport, NodeSnapshot
from swarm.discovery.address_proof import NONCE_BYTES
from swarm.discovery.coverage import serve_line
from swarm.discovery.dht.addresses import check_own_address
from swarm.discovery.dht.registry import DhtRegistry
from swarm.discovery.node_record import NodeRecord, NodeState, bracketed
from swarm.discovery.registry import RECORD_TTL_S, Registry
from swarm.errors import ConfigError, LayersError, RegistryError, UnknownModel, Unreachable
from swarm.ids import ModelIdentity, PeerId
from swarm.inference.gumbel import gumbel_row
from swarm.layers import Span
from swarm.models.fingerprint import model_identity
from swarm.runtime.tasks import TaskScope
from swarm.telemetry.messages import EventKind, MessageKind
from swarm.transport.dial import SERVER_OPTIONS, Dialer

STOP_GRACE_S = 2.0
MAX_STREAMS = 4_096
ANNOUNCE_S = RECORD_TTL_S / 3
NOISE_ROWS = 64
"""Positions whose noise is kept: neighbouring sweeps pick at the same ones."""

logger = logging.getLogger(__name__)

Say = Callable[[str], None]


class Node:
    """One machine's service."""

    def __init__(self, config: ServeConfig, say: Say, registry: Registry | None = None) -> None:
        """A node that will serve as `config` says; `registry` replaces joining the DHT."""
        self._config = config
        self._given_registry = registry
        self._say = say
        self._stack = AsyncExitStack()
        self._sequence = 0
        self._state = NodeState.JOINING
        self._announced: NodeRecord | None = None
        self._one_by_one = asyncio.Lock()  # a record must expire later than the one before
        self._sweep_ms: tuple[tuple[int, float], ...] = ()
        self._neighbours: PeerDelays | None = None
        self._rebalance = Rebalance(random.Random())
        self._looking: asyncio.Task[None] | None = None
        self._server: grpc.aio.Server | None = None
        self._numeric_class = ""
        self._tally = NodeCounters()
        self._news = Outbox()

    async def __aenter__(self) -> Self:
        """Start serving; returns once the node is listed.

        Raises:
            SwarmError: what stood in the way.
        """
        try:
            await self._start()
        except BaseException:
            if self._announced is not None:
                with suppress(RegistryError):
                    await self.registry.withdraw(self._announced)
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave: announce it, end sessions, close everything."""
        self.sessions.draining = True
        if self._looking is not None:
            self._looking.cancel()
        is_listed = self._announcing.cancel()  # or it would list this node again; False: it gave way to a namesake
        try:
            if is_listed:
                await self._announce(NodeState.DRAINING)
            self._news.tell(EventKind.DRAINING, "takes no new sessions: it leaves")
            await self._drain("the node leaves the swarm")
            if is_listed:
                await self.registry.withdraw(self._record(NodeState.DRAINING))
        except RegistryError as trouble:
            logger.warning("left without saying so: %s", trouble)  # the record runs out by itself
        finally:
            self._news.tell(EventKind.LEFT, "left the swarm")
            await self._stack.aclose()

    @property
    def peer_id(self) -> PeerId:
        """This node's name in the swarm."""
        return self.registry.peer_id

    @property
    def address(self) -> str:
        """`host:port` under which others reach the gRPC service."""
        return self._address

    def join_line(self) -> str:
        """The exact line with which the next machine joins: the layers after this span, or all of them."""
        end, last = self._span.end, self.identity.num_layers
        layers = f"{end}-{last}" if end < last else f"0-{last}"
        return serve_line(self._config.model or self.identity.name, layers, self.registry.join_addresses())

    async def wait_failed(self) -> None:
        """Return when the node cannot go on, because its part of the DHT died."""
        await self.registry.wait_closed()

    async def _start(self) -> None:
        config = self._config
        config.check()
        check_compute(config)
        server, self._port = self._bind(config.port)
        scraped = self._stack.enter_context(listening(config.metrics_host, config.metrics_port))
        joining = self._given_registry or DhtRegistry.open(config.dht())
        self.registry: Registry = await self._stack.enter_async_context(joining)
        self._address = config.announce_address or f"{self._reachable_host()}:{self._port}"
        await check_alone(self.registry, self._address)
        self._checkpoint = await self._find_model()
        self._loaded = self._stack.enter_context(ExitStack())  # ends after whatever computes
        self._dialer = await self._stack.enter_async_context(Dialer())
        self._scope = await self._stack.enter_async_context(TaskScope())
        self._stack.push_async_callback(self._stop_server)
        if config.is_auto:
            await self._take_span()
        else:
            self._span = Span.parse(config.layers)
        await self._tell_the_world(scraped)
        await self._load()
        check_kv(self._model, config.kv_tokens)
        await self._open_service(server)
        await self._be_dialled_back()
        self._rebalance.arrived()
        await self._announce(NodeState.SERVING)
        self._news.tell(EventKind.JOINED, f"serves {self._span.describe(self.identity.num_layers)}")
        if config.is_auto:
            self._looking = self._scope.spawn(self._rebalance.keep_looking(self._seats, self))
        else:
            self._announcing = self._scope.spawn(self._keep_announcing())

    async def _tell_the_world(self, scraped: socket | None) -> None:
        """Answer scrapes and publish to MQTT from now on, where that is wanted; nobody waits for either."""
        device = Device(pick_device(self._config.device))
        subject = NodeDescription(self.identity, self._config.name, device, self._tally, self._scene)
        figures = NodeFigures(self.registry.peer_id, subject)
        await self._stack.enter_async_context(serving_metrics(scraped, figures, self._say))
        broker = self._config.broker()
        if broker is not None:
            address = Address(broker, self._config.mqtt_prefix, self.identity.fingerprint, self.registry.identity)
            publisher = TelemetryPublisher(address, NodeReport(subject, self._news), self._news, self._say)
            await self._stack.enter_async_context(publisher)

    def _scene(self) -> NodeSnapshot:
        """How this node is now, as telemetry tells it."""
        scene = NodeSnapshot(self._span, self._state, self._numeric_class, self._sweep_ms)
        if self._neighbours is None:
            return scene  # nothing is loaded
        some = self.sessions
        return replace(
            scene,
            sessions=len(some),
            kv_tokens_free=some.kv_tokens_free,
            kv_tokens_total=some.kv_tokens,
            worked_ms=some.worked_ms,
        )

    async def _take_span(self) -> None:
        """Reserve the span that the swarm needs most, and keep the reservation alive while it is loaded."""
        config, checkpoint = self._config, self._checkpoint
        device, dtype = await asyncio.to_thread(compute_of, checkpoint, config)
        anatomy = await asyncio.to_thread(dissect, checkpoint.config)
        count = config.num_layers
        if count is None:
            count = fitting_layers(anatomy, dtype, free_bytes(device), config.kv_tokens)
        if count > anatomy.num_layers:
            raise LayersError(f"--num-layers {count}: the model has {anatomy.num_layers} layers")
        self._numeric_class = f"{device.type}-{str(dtype).removeprefix('torch.')}"
        self._seats = SpanReservation(self.registry, self.identity, self._reserve)
        await self._seats.reserve(joiners_choice(self.peer_id, count, self.identity))
        self._say(f"the swarm needs {self._span.describe(anatomy.num_layers)} most")
        self._announcing = self._scope.spawn(self._keep_announcing())

    async def _load(self, held: Mapping[str, nn.Module] | None = None) -> None:
        """Load the span and measure how fast it is."""
        order = replace(self._config, layers=str(self._span))
        self._model = await asyncio.to_thread(load, self._checkpoint, order, self._say, held)
        self._loaded.close()
        self._loaded.callback(self._model.close)
        self._numeric_class = self._model.numeric_class
        self._sweep_ms = await asyncio.to_thread(measure_sweeps, self._model)
        self._model.forwards = self._model.rows_in = 0
        self._say("speed: " + ", ".join(f"{ms:.1f} ms per sweep of {nodes}" for nodes, ms in self._sweep_ms))

    async def _reserve(self, span: Span) -> None:
        self._span = span
        await self._announce(NodeState.JOINING)

    def serving(self) -> NodeRecord:
        """The record of a node that serves."""
        return self._record(NodeState.SERVING)

    async def fetch(self, span: Span) -> None:
        """Download what another span needs."""
        anatomy = await asyncio.to_thread(dissect, self._checkpoint.config)
        await asyncio.to_thread(fetch, self._checkpoint, anatomy, span, self._say)

    async def stay(self) -> None:
        """Take back a reservation: this node serves the layers that it has."""
        self._span = self._model.span
        await self._announce(NodeState.SERVING)

    async def move(self, span: Span) -> None:
        """Serve the reserved span instead; what both spans have stays in memory.

        Raises:
            SwarmError: it cannot be loaded.
        """
        count = self.identity.num_layers
        self._say(f"moves from {self._model.span.describe(count)} to {span.describe(count)}, where it is needed more")
        await self._drain("the node moves to other layers")
        await self._stop_server()
        self._working.cancel()
        await asyncio.wait([self._working])
        self._neighbours, self._span = None, span
        anatomy = await asyncio.to_thread(dissect, self._checkpoint.config)
        await self._load(shared_parts(self._model, anatomy, span))
        await self._open_service(self._bind(self._port)[0])
        await self._announce(NodeState.SERVING)
        self._news.tell(EventKind.MOVED, f"moved to {span.describe(count)}")

    async def _drain(self, reason: str) -> None:
        """Take no new session, serve on until those that run have moved, and end what is left."""
        if len(self.sessions):
            self._say(f"waiting up to {self._config.drain:.0f} s for {len(self.sessions)} sessions to move elsewhere")
        if not await self.sessions.drain(self._config.drain):
            self._say(f"{len(self.sessions)} sessions had nowhere to go")
        self.sessions.close_all(reason)

    async def _stop_server(self) -> None:
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)

    async def _find_model(self) -> Checkpoint:
        """The model asked for, or the joined swarm's only one."""
        config = self._config
        known = await self.registry.models() if config.join else []
        if config.model is None and len(known) != 1:
            names = ", ".join(sorted(f"{model.name} ({model.fingerprint[:8]})" for model in known)) or "none"
            raise UnknownModel(f"say which MODEL to serve; models in this swarm: {names}")
        name = config.model or known[0].name
        self._say(f"model: {name}")
        checkpoint = await asyncio.to_thread(open_called, name, config)
        self.identity: ModelIdentity = await asyncio.to_thread(
            model_identity, checkpoint.folder, checkpoint.name, checkpoint.hub.commit if checkpoint.hub else None
        )
        note = check_same_model(self.identity, known, must_match=config.model is None)
        if note is not None:
            self._say(note)
        return checkpoint

    def _bind(self, port: int) -> tuple[grpc.aio.Server, int]:
        """Take the port before anything slow, so that a taken one is told at once."""
        server, host = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_STREAMS), self._config.host
        try:
            return server, server.add_insecure_port(f"{bracketed(host)}:{port}")
        except RuntimeError:
            check_own_address(host)
            raise ConfigError(f"port {port} of {host} cannot be opened; is another node using it?") from None

    async def _open_service(self, server: grpc.aio.Server) -> None:
        config, model = self._config, self._model
        # Where one thread computes, what it did not get of a CPU is known: it waited then, as others' work went on.
        alone = model.device.type == "cpu" and not config.offload and torch.get_num_threads() == 1
        engine = Engine(step_cost(self._sweep_ms, offloaded=config.offload), counts_cpu=alone)
        valid = await asyncio.to_thread(count_tokens, self._checkpoint.folder, model.vocab_size)
        noise = lru_cache(NOISE_ROWS)(gumbel_row)
        shop = NodeContext(self.registry.peer_id, model, engine, self.registry, self._dialer, self._tally, valid, noise)
        kv_tokens = config.kv_tokens or default_kv_tokens(model)
        self.sessions = SessionTable(shop, self.identity, kv_tokens, self._scope)
        self._working = self._scope.spawn(engine.run())
        service = NodeService(self.registry.identity, self.sessions)
        server.add_generic_rpc_handlers((service.handlers(),))
        await server.start()
        self._server = server
        self._neighbours = PeerDelays(self.registry.peer_id, model, lambda: engine.worked_ms)

    def _reachable_host(self) -> str:
        """The host of the first address under which the DHT peer is reachable, or the listening one."""
        host = self._config.host
        if host in ("0.0.0.0", "::"):
            host = (self.registry.join_addresses() or ["/ip4/127.0.0.1"])[0].split("/")[2]
        return bracketed(host)

    async def _be_dialled_back(self) -> None:
        reachable = await self.registry.dial_back(self._address, secrets.token_bytes(NONCE_BYTES))
        if reachable is None:
            self._say("no peer yet that could dial back: this is the first machine of the swarm")
        elif not reachable:
            reason = f"peers cannot reach {self._address}: open or forward the port, or give --announce-address"
            raise Unreachable(self.registry.peer_id, str(self._span), reason)

    async def _keep_announcing(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_S)
            await self._dialer.tidy()
            await asyncio.to_thread(give_back)
            try:
                assert self._announced is not None
                await check_still_alone(self.registry, self._announced)
                if self._neighbours is not None:
                    await self._neighbours.measure(
                        await self.registry.records(self.identity.fingerprint, self.identity.num_layers)
                    )
                await self._announce(self._state)
            except RegistryError as trouble:
                logger.warning("not announced this time: %s", trouble)

    async def _announce(self, state: NodeState) -> None:
        self._state = state
        self._news.want(MessageKind.STATUS)
        async with self._one_by_one:
            record = self._record(self._state)
            self._announced = record  # also if this fails: it may have reached some peers all the same
            await self.registry.announce(record)

    def _record(self, state: NodeState) -> NodeRecord:
        self._sequence += 1
        record = NodeRecord(
            peer=self.registry.peer_id,
            model=self.identity,
            span=self._span,
            address=self._address,
            state=state,
            numeric_class=self._numeric_class,
            version=version("canopy-swarm"),
            name=self._config.name,
            sweep_ms=self._sweep_ms,
            kv_tokens_free=0,
            kv_tokens_total=0,
            sequence=self._sequence,
            expires_at=time.time() + RECORD_TTL_S,
            movable=self._config.is_auto and state is NodeState.SERVING and self._rebalance.may_move,
        )
        if self._neighbours is None:
            return record  # nothing is loaded
        kv_free, kv_total = self.sessions.kv_tokens_free, self.sessions.kv_tokens
        return self._neighbours.describe(replace(record, kv_tokens_free=kv_free, kv_tokens_total=kv_total))
