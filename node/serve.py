"""A running node: loads its span, opens its ports, is dialled back, announces itself, leaves politely.

`async with Node(config, say) as node:` enters when the node is listed and exits when nothing of it is left.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import lru_cache
from importlib.metadata import version
from types import TracebackType
from typing import Self

import grpc.aio

from node.checkpoint import Checkpoint, open_checkpoint
from node.config import ServeConfig
from node.engine import Engine
from node.hop import Workshop
from node.loading import check_compute, count_tokens, default_kv_tokens, load
from node.measure import measure_sweeps, step_cost
from node.namesake import check_alone, check_still_alone
from node.neighbours import Neighbours
from node.service import NodeService
from node.sessions import Sessions
from node.tally import Tally
from swarm.coverage import serve_line
from swarm.dial import SERVER_OPTIONS, Dialer
from swarm.errors import ConfigError, ModelMismatch, RegistryError, UnknownModel, Unreachable
from swarm.hello import NONCE_BYTES
from swarm.ids import PeerId
from swarm.model_identity import model_identity
from swarm.noise import gumbel_row
from swarm.record import NodeRecord, NodeState
from swarm.registry import RECORD_TTL_S, ModelIdentity, Registry
from swarm.registry_dht import DhtRegistry
from swarm.tasks import TaskScope

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

    async def __aenter__(self) -> Self:
        """Start serving; returns once the node is listed.

        Raises:
            SwarmError: what stood in the way.
        """
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave: announce it, end sessions, close everything."""
        self.sessions.draining = True
        is_listed = self._announcing.cancel()  # or it would list this node again; False: it gave way to a namesake
        try:
            if is_listed:
                await self._announce(NodeState.DRAINING)
            self.sessions.close_all("the node leaves the swarm")
            if is_listed:
                await self.registry.withdraw(self._record(NodeState.DRAINING))
        except RegistryError as trouble:
            logger.warning("left without saying so: %s", trouble)  # the record runs out by itself
        finally:
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
        end = self._model.span.end
        layers = f"{end}-{self._model.num_layers}" if end < self._model.num_layers else f"0-{self._model.num_layers}"
        return serve_line(self._config.model or self.identity.name, layers, self.registry.join_addresses())

    async def wait_failed(self) -> None:
        """Return when the node cannot go on, because its part of the DHT died."""
        await self.registry.wait_closed()

    async def _start(self) -> None:
        config = self._config
        config.check()
        check_compute(config)
        server, port = self._bind()
        joining = self._given_registry or DhtRegistry.open(config.dht())
        self.registry: Registry = await self._stack.enter_async_context(joining)
        await check_alone(self.registry)
        self._checkpoint = await self._find_model()
        self._model = await asyncio.to_thread(load, self._checkpoint, config, self._say)
        self._sweep_ms = await asyncio.to_thread(measure_sweeps, self._model)
        self._model.forwards = self._model.rows_in = 0
        self._say("speed: " + ", ".join(f"{ms:.1f} ms per sweep of {nodes}" for nodes, ms in self._sweep_ms))
        self._address = config.announce_address or f"{self._reachable_host()}:{port}"
        await self._open_service(server)
        await self._be_dialled_back()
        self._neighbours = Neighbours(self.registry.peer_id, self._model, self._sweep_ms)
        await self._announce(NodeState.SERVING)
        self._announcing = self._scope.spawn(self._keep_announcing())

    async def _find_model(self) -> Checkpoint:
        """The model asked for, or the joined swarm's only one."""
        config = self._config
        known = await self.registry.models() if config.join else []
        if config.model is None and len(known) != 1:
            names = ", ".join(sorted(f"{model.name} ({model.fingerprint[:8]})" for model in known)) or "none"
            raise UnknownModel(f"say which MODEL to serve; models in this swarm: {names}")
        name = config.model or known[0].name
        self._say(f"model: {name}")
        checkpoint = await asyncio.to_thread(open_checkpoint, name, config.revision)
        self.identity: ModelIdentity = await asyncio.to_thread(
            model_identity, checkpoint.folder, checkpoint.name, checkpoint.hub.commit if checkpoint.hub else None
        )
        self._check_twins(known, must_match=config.model is None)
        return checkpoint

    def _check_twins(self, known: list[ModelIdentity], *, must_match: bool) -> None:
        twins = [model for model in known if model.name == self.identity.name]
        if twins and all(twin.fingerprint != self.identity.fingerprint for twin in twins):
            line = (
                f"{self.identity.name} here is {self.identity.fingerprint[:12]}, in the swarm it is "
                f"{', '.join(sorted(twin.fingerprint[:12] for twin in twins))}: other weights, config or tokenizer"
            )
            if must_match:
                raise ModelMismatch(line)
            self._say(f"note: {line}; a chain never mixes them")

    def _bind(self) -> tuple[grpc.aio.Server, int]:
        """Take the port before anything slow, so that a taken one is told at once."""
        server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_STREAMS)
        host, port = self._config.host, self._config.port
        try:
            return server, server.add_insecure_port(f"{_bracketed(host)}:{port}")
        except RuntimeError:
            raise ConfigError(f"port {port} of {host} cannot be opened; is another node using it?") from None

    async def _open_service(self, server: grpc.aio.Server) -> None:
        config, model = self._config, self._model
        dialer = await self._stack.enter_async_context(Dialer())
        self._scope = await self._stack.enter_async_context(TaskScope())
        engine = Engine(step_cost(self._sweep_ms))
        valid = await asyncio.to_thread(count_tokens, self._checkpoint.folder, model.vocab_size)
        noise = lru_cache(NOISE_ROWS)(gumbel_row)
        shop = Workshop(self.registry.peer_id, model, engine, self.registry, dialer, Tally(), valid, noise)
        kv_tokens = config.kv_tokens or default_kv_tokens(model)
        self.sessions = Sessions(shop, self.identity, kv_tokens, self._scope)
        self._scope.spawn(engine.run())
        service = NodeService(self.registry.identity, self.sessions)
        server.add_generic_rpc_handlers((service.handlers(),))
        await server.start()
        self._stack.push_async_callback(server.stop, STOP_GRACE_S)

    def _reachable_host(self) -> str:
        """The host of the first address under which the DHT peer is reachable, or the listening one."""
        host = self._config.host
        if host in ("0.0.0.0", "::"):
            host = (self.registry.join_addresses() or ["/ip4/127.0.0.1"])[0].split("/")[2]
        return _bracketed(host)

    async def _be_dialled_back(self) -> None:
        reachable = await self.registry.dial_back(self._address, secrets.token_bytes(NONCE_BYTES))
        if reachable is None:
            self._say("no peer yet that could dial back: this is the first machine of the swarm")
        elif not reachable:
            reason = f"peers cannot reach {self._address}: open or forward the port, or give --announce-address"
            raise Unreachable(self.registry.peer_id, str(self._model.span), reason)

    async def _keep_announcing(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_S)
            try:
                await check_still_alone(self.registry, self._announced)
                await self._neighbours.measure(
                    await self.registry.records(self.identity.fingerprint, self.identity.num_layers)
                )
                await self._announce(NodeState.SERVING)
            except RegistryError as trouble:
                logger.warning("not announced this time: %s", trouble)

    async def _announce(self, state: NodeState) -> None:
        record = self._record(state)
        self._announced = record  # also if this fails: it may have reached some peers all the same
        await self.registry.announce(record)

    def _record(self, state: NodeState) -> NodeRecord:
        self._sequence += 1
        record = NodeRecord(
            peer=self.registry.peer_id,
            model=self.identity,
            span=self._model.span,
            address=self._address,
            state=state,
            numeric_class=self._model.numeric_class,
            version=version("canopy-swarm"),
            name=self._config.name,
            sweep_ms=self._sweep_ms,
            kv_tokens_free=self.sessions.kv_tokens_free,
            kv_tokens_total=self.sessions.kv_tokens,
            sequence=self._sequence,
            expires_at=time.time() + RECORD_TTL_S,
        )
        return self._neighbours.describe(record)


def _bracketed(host: str) -> str:
    """An IPv6 address as it stands before a port."""
    return f"[{host}]" if ":" in host else host
