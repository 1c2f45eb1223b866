"""The layers that a node has loaded, and the gRPC service on them: opened, ended, and replaced when the node moves.

Owns the model, the engine, the sessions and the server. Says nothing to the directory.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Final

import grpc.aio
from torch import nn

from node.life.peer_latency import PeerDelays, Probes
from node.life.planning import NodeResources
from node.life.successors import Successors
from node.model.loading import count_tokens, default_kv_tokens, fetch, load
from node.model.malloc_trim import trim_heap
from node.model.span import SpanModel, dissect, shared_parts
from node.session.admission import standing_of
from node.session.context import NodeContext
from node.session.measure import REPEATS, make_ready, measure_sweeps, medians, sizes_of, step_cost, uncounted_ms
from node.session.scheduler import Engine
from node.session.service import NodeService
from node.session.step_cost import StaircaseCost
from node.session.table import SessionTable
from swarm.base.errors import ConfigError
from swarm.base.layers import Span
from swarm.base.process_limits import file_limit
from swarm.compute.devices import empty_cache
from swarm.compute.grammars import GrammarCompiler
from swarm.compute.gumbel import gumbel_row
from swarm.compute.picks.device_picks import picks_on
from swarm.compute.ragged_batch import PLAIN_PATH
from swarm.directory.address_proof import hello_response
from swarm.directory.dht.addresses import check_own_address
from swarm.directory.dialable import DialPolicy
from swarm.directory.node_record import NodeRecord
from swarm.directory.signed_faults import is_signed
from swarm.link.certificate import ServerCertificate
from swarm.link.dial import SERVER_OPTIONS, bind_port
from swarm.link.egress.streams import bracketed
from swarm.link.network_key import NetworkKey
from swarm.routing.latency import measure_delays, measure_rate

# Whether a node still runs its layers as fast as it says: measured again while nobody uses them.
#
# A node that starts on a busy machine measures the other programs too, and would claim that speed for as long as it
# runs. One forward of each size now and then is compared with what is announced, more and more rarely while they agree;
# where they differ it is measured as at the start. This owns when; `node.session.measure` owns how.

SWEEPS_MS = tuple[tuple[int, float], ...]
MAX_WAIT: Final = 15
"""Looks that are left out between two measurements at most: five minutes of renewals."""
AGREES: Final = 1.25
"""One forward within this factor of the announced median says nothing new."""


class SpeedCheck:
    """Looks at one loaded span, at each renewal of the node's record."""

    def __init__(
        self, sizes: tuple[int, ...], forward_ms: Callable[[int], Awaitable[float]], worked_ms: Callable[[], float]
    ) -> None:
        """Make a check that has not looked yet.

        Args:
            forward_ms: runs one forward of so many on the thread that computes; between two of them others' work runs.
        """
        self._sizes = sizes
        self._forward_ms = forward_ms
        self._worked_ms = worked_ms
        self._worked_before_ms = worked_ms()
        self._wait = self._left = 1

    async def look(self, announced: SWEEPS_MS) -> SWEEPS_MS:
        """What is to be announced now: the same, unless it was measured again and differs."""
        worked_ms, before_ms = self._worked_ms(), self._worked_before_ms
        self._worked_before_ms = worked_ms
        self._left -= 1
        if worked_ms != before_ms or self._left > 0:
            return announced
        self._wait = self._left = min(2 * self._wait, MAX_WAIT)
        now = await self._round()
        if all(ms / AGREES <= own <= ms * AGREES for own, (_, ms) in zip(now, announced, strict=True)):
            return announced
        self._wait = self._left = 1
        rounds = [now]
        while len(rounds) < REPEATS:
            if self._worked_ms() != worked_ms:
                return announced  # somebody came: what was measured beside his work is no speed of its own
            rounds.append(await self._round())
        return medians(self._sizes, rounds)

    async def _round(self) -> list[float]:
        return [await self._forward_ms(nodes) for nodes in self._sizes]


STOP_GRACE_S = 2.0
MAX_STREAMS = 4_096
MAX_CONNECTIONS = 4_096
FILES_KEPT = 512
"""Files that connections from others leave to the node itself."""
NOISE_ROWS = 64
"""Positions whose noise is kept: neighbouring sweeps pick at the same ones."""


@dataclass(frozen=True, slots=True)
class SpanService:
    """What serves one loaded span; a move replaces all of it."""

    engine: Engine
    computing: asyncio.Task[None]
    """The engine's loop."""
    sessions: SessionTable
    server: grpc.aio.Server
    peer_delays: PeerDelays
    successors: Successors
    policy: DialPolicy
    grammars: GrammarCompiler
    speed_check: SpeedCheck | None
    """None where weights are streamed: a forward reads them all."""


class SpanHost:
    """The loaded layers of a node and their service.

    Attributes:
        order: how to compute: the user's options, with device and type as chosen.
        service: None while no layers are served.
        numeric_class: of the loaded layers, or of those that are about to be loaded.
        sweep_ms: (tree nodes, milliseconds of a sweep) as measured; empty until layers are loaded.
        path: how the loaded layers run (`RaggedModel.path`); empty on a CPU, where they run one way.
        path_reason: why they run no faster way; empty where there is none.
        bucketed: whether rows are padded to these sizes, so that rows in between are free.
    """

    def __init__(self, resources: NodeResources) -> None:
        self.service: SpanService | None = None
        self.numeric_class = ""
        self.rounding = ""
        self.sweep_ms: tuple[tuple[int, float], ...] = ()
        self.path = self.path_reason = ""
        self.bucketed = False
        self.order = resources.config
        self._resources = resources
        self._model: SpanModel | None = None

    @property
    def model(self) -> SpanModel:
        """The loaded layers."""
        assert self._model is not None, "no layers are loaded yet"
        return self._model

    @property
    def sessions(self) -> SessionTable:
        """The sessions of the loaded layers."""
        assert self.service is not None, "no layers are served now"
        return self.service.sessions

    @property
    def path_words(self) -> str:
        """How the layers run, and why no faster way; empty on a CPU."""
        return f"{self.path} ({self.path_reason})" if self.path_reason else self.path

    async def fetch(self, span: Span) -> None:
        """Download what a span needs."""
        checkpoint = self._resources.checkpoint
        layout = await self._resources.compute.run(dissect, checkpoint.config)
        await asyncio.to_thread(fetch, checkpoint, layout, span, self._resources.say)

    async def load(self, span: Span, held: Mapping[str, nn.Module] | None = None) -> None:
        """Load a span and measure how fast it is.

        Args:
            held: parts of the last span that this one needs too; they are not read again.

        Raises:
            SwarmError: it cannot be loaded.
        """
        resources = self._resources
        order = replace(self.order, layers=str(span))
        self._model = model = await resources.compute.run(load, resources.checkpoint, order, resources.say, held)
        resources.loaded.close()
        resources.loaded.callback(model.close)
        await resources.compute.run(make_ready, model, graphs=not order.no_graphs, streamed=order.offload)
        self.sweep_ms = await resources.compute.run(measure_sweeps, model)
        self.bucketed = model.static is not None
        model.forwards = model.rows_in = 0
        self._note_path(model)
        resources.say("speed: " + ", ".join(f"{ms:.1f} ms per sweep of {nodes}" for nodes, ms in self.sweep_ms))

    def _note_path(self, model: SpanModel) -> None:
        """Keep and say how the layers run, which is known once they ran."""
        say, expected = self._resources.say, self.numeric_class
        self.numeric_class, self.rounding = model.numeric_class, model.rounding
        has_one_way = model.device.type == "cpu" and model.path == PLAIN_PATH
        self.path, self.path_reason = ("", "") if has_one_way else (model.path, model.path_reason)
        if self.path:
            say(f"path: {self.path_words}")
        if expected not in ("", self.numeric_class):
            say(f"note: this node computes in {self.numeric_class}, and was planned to in {expected}")

    async def open(self, server: grpc.aio.Server) -> None:
        """Serve the loaded layers on a server whose port is bound."""
        resources, config, model = self._resources, self._resources.config, self.model
        registry = resources.registry
        # Where one thread computes, what it did not get of a CPU is known: it waited then, as others' work went on.
        alone = model.device.type == "cpu" and not config.offload and resources.compute.threads == 1
        measured = self.sweep_ms
        cost = StaircaseCost(dict(measured)) if self.bucketed else step_cost(measured, offloaded=config.offload)
        engine = Engine(cost, resources.compute, counts_cpu=alone, standing=standing_of)
        machine, fingerprint = resources.machine, resources.identity.fingerprint
        admission = machine.admission
        policy = await DialPolicy.of(resources.address, allow_private=config.allow_private)
        valid_tokens = await asyncio.to_thread(count_tokens, resources.checkpoint.folder, model.vocab_size)
        successors = Successors(registry, resources.dialer, policy, resources.identity, admission.quota)
        context = NodeContext(
            peer=registry.peer_id,
            signer=registry.identity,
            model=model,
            engine=engine,
            dials=successors.of_session,
            is_signed=is_signed,
            admission=admission,
            counters=resources.counters,
            uplink=resources.uplink,
            certificate=resources.certificate,
            valid_tokens=valid_tokens,
            noise=None if picks_on(model.device) else lru_cache(NOISE_ROWS)(gumbel_row),
            hashing=resources.hashing,
            refuted=partial(machine.refuted.note, outbox=resources.outbox),
            receipts=resources.receipts,
            grammars=(grammars := GrammarCompiler.of_folder(resources.checkpoint.folder, admission)),
        )
        kv_tokens = config.kv_tokens or default_kv_tokens(model, partial(machine.share_bytes, fingerprint))
        machine.kv_bytes[fingerprint] = kv_tokens * model.layout.bytes_per_token
        sessions = SessionTable(context, resources.identity, kv_tokens, resources.scope)
        computing = resources.scope.spawn(engine.run())
        hello = partial(hello_response, registry.identity, digest=context.digest)
        machine.spans.put(fingerprint, sessions, resources.manifest)
        if machine.server is not server:
            machine.server = server
            server.add_generic_rpc_handlers((NodeService(context, machine.spans, hello).handlers(),))
            await server.start()
        network = config.membership.network
        measure = partial(measure_delays, insecure=config.insecure, ways=resources.ways, network=network)
        probes = Probes(measure, partial(_own_rate, resources))
        peer_delays = PeerDelays(registry.peer_id, model, lambda: engine.worked_ms, probes)
        check = None if config.offload else _speed_check(model, engine)
        self.service = SpanService(
            engine, computing, sessions, server, peer_delays, successors, policy, grammars, check
        )

    async def check_speed(self) -> None:
        """Measure again how fast the layers are, where nobody uses them."""
        service = self.service
        if service is not None and service.speed_check is not None:
            self.sweep_ms = await service.speed_check.look(self.sweep_ms)

    def shut_out(self) -> frozenset[str]:
        """Addresses that are refused now for what they did."""
        return frozenset() if self.service is None else self.service.sessions.admission.shut_out()

    async def drain(self, reason: str) -> None:
        """Take no new session, serve on until those that run have moved, and end what is left."""
        if self.service is None:
            return  # it moves now: the old sessions were drained
        sessions, resources = self.service.sessions, self._resources
        if len(sessions):
            resources.say(
                f"waiting up to {resources.config.drain:.0f} s for {len(sessions)} sessions to move elsewhere"
            )
        if not await sessions.drain(resources.config.drain):
            resources.say(f"{len(sessions)} sessions had nowhere to go")
        sessions.close_all(reason)

    async def stop_server(self) -> None:
        """Take no more calls, unless those for other models come through the same port."""
        if self.service is not None:
            if not self._resources.machine.is_shared:
                await self.service.server.stop(STOP_GRACE_S)
            self.service.grammars.close()

    async def end_service(self) -> None:
        """Stop the server and the engine of sessions that were drained."""
        await self.stop_server()
        if self.service is not None:
            self.service.sessions.end()
            self.service.computing.cancel()
            await asyncio.wait([self.service.computing])
        self.service = None

    async def unload(self) -> None:
        """Close the service and forget the weights."""
        await self.end_service()
        self._model = None
        self._resources.loaded.close()

    async def load_again(self, span: Span) -> None:
        """Load and serve a span after `unload`, on the same port.

        Raises:
            SwarmError: it cannot be loaded.
        """
        await self.load(span)
        await self._open_again()

    async def reload(self, span: Span) -> None:
        """Load and serve another span on the same port; what both spans have stays in memory.

        Raises:
            SwarmError: it cannot be loaded.
        """
        resources = self._resources
        layout = await self._resources.compute.run(dissect, resources.checkpoint.config)
        await self.load(span, shared_parts(self.model, layout, span))
        await self._open_again()

    async def _open_again(self) -> None:
        config, resources = self._resources.config, self._resources
        if resources.machine.is_shared and resources.machine.server is not None:
            return await self.open(resources.machine.server)
        server, _ = bind(config.host, resources.port, resources.certificate, config.membership.network)
        await self.open(server)


def _speed_check(model: SpanModel, engine: Engine) -> SpeedCheck:
    return SpeedCheck(
        sizes_of(model),
        lambda nodes: engine.on_thread(partial(uncounted_ms, model, nodes)),
        lambda: engine.worked_ms,
    )


async def _own_rate(resources: NodeResources, record: NodeRecord) -> float | None:
    """What this node can send, in Mbit/s: its line, or what its owner allows of it; None when that is not known."""
    config = resources.config
    network = config.membership.network
    rate = await measure_rate(record, insecure=config.insecure, ways=resources.ways, network=network)
    limit = resources.uplink.mbit_per_s
    return rate if rate is None or limit is None else min(rate, limit)


def give_memory_back() -> None:
    """Give what is free here back to the system: sessions and perhaps the weights have gone."""
    gc.collect()
    empty_cache()
    trim_heap()


def max_connections(files: int) -> int:
    """How many connections a node takes that may have so many files open: the rest is for what it dials and reads."""
    return min(MAX_CONNECTIONS, max(files - FILES_KEPT, files // 2))


def bind(
    host: str, port: int, certificate: ServerCertificate | None, network: NetworkKey | None = None
) -> tuple[grpc.aio.Server, int]:
    """A server that has a port, and the port: taken before anything slow, so that a taken one is reported at once.

    Args:
        port: 0 takes a free one.
        certificate: with which it answers; None: it speaks plain text.

    Raises:
        ConfigError: the port or the address cannot be had.
    """
    options = [*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", max_connections(file_limit()))]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_STREAMS)
    try:
        return server, bind_port(server, f"{bracketed(host)}:{port}", certificate, network)
    except RuntimeError:
        check_own_address(host)
        raise ConfigError(f"port {port} of {host} cannot be opened; is another node using it?") from None
