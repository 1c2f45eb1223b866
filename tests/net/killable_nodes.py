"""Nodes of this process that a test kills and revives: over gRPC on loopback or in memory, the registry in memory.

A kill looks from outside like kill -9: all connections break at once, without a message, and the record stays listed. A
revived node has the same identity and port, and holds no session. Tests place kills by sweep number, not by time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Unpack

import pytest

import client.chain.answers
import swarm.link.link
from benchmarks.simulation.virtual_loop import VirtualLoop
from client import AsyncSwarm
from client.base.options import GenerateOptions
from client.chain.chain import Chain
from client.chain.opening import PeerLatency
from node.life.serve import Node
from node.life.span_host import bind
from node.session.hop_session import HopSession
from node.session.service import NodeService
from node.session.sweep_run import SweepRun
from swarm.base.ids import PeerId
from swarm.demo import DRAFT, TARGET
from swarm.directory.address_proof import hello_response
from swarm.directory.node_record import NodeRecord, NodeState
from swarm.link.certificate import ServerCertificate
from swarm.protocol.session import SessionState
from tests.in_process_swarm import in_process_swarm
from tests.net.three_nodes import engine_of, server_of, service_of, until, until_freed

POOL = {
    "a0": "0-4", "a1": "4-8", "a2": "8-12",
    "b0": "0-4", "b1": "4-8", "b2": "8-12",
    "c1": "4-8", "wide": "0-8", "overlapping": "2-10", "rest": "4-12",
}  # fmt: skip
"""Every node with its layers."""
CHAIN = ("a0", "a1", "a2")


@dataclass(frozen=True, slots=True)
class _Stall:
    """A node that executes nothing from some point on.

    Attributes:
        at: sequence number of the first sweep that is not executed; None: no replay is executed.
        arrived: set once such a sweep or replay has come.
    """

    at: int | None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def holds(self, hop: HopSession) -> bool:
        """Whether the session's next work has to wait."""
        if hop._running is not None or hop.log.is_replaying:
            return self.at is None
        queue = hop.log._queue
        return self.at is not None and bool(queue) and queue[0].sweep.sequence >= self.at


@dataclass(slots=True)
class KillableNodes:
    """All nodes and a client. The client finds only the nodes that a test announces.

    Attributes:
        nodes: every node by its name in `POOL`.
        client: a client of the swarm.
        chains: chains of the sessions that the client opened since the test began.
    """

    nodes: dict[str, Node]
    client: AsyncSwarm
    chains: list[Chain] = field(default_factory=list)
    _undisturbed: dict[tuple[object, ...], tuple[int, ...]] = field(default_factory=dict)
    _dead: set[str] = field(default_factory=set)
    _stalled: dict[PeerId, _Stall] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    async def announce(self, *names: str) -> None:
        """List these nodes."""
        for name in names:
            await self.nodes[name].running.announcer.announce(NodeState.SERVING)

    async def unlist(self, *names: str) -> None:
        """Withdraw the records of these nodes."""
        for name in names:
            node = self.nodes[name]
            await node.registry.withdraw(node.running.announcer.record(NodeState.DRAINING))

    async def kill(self, *names: str) -> None:
        """End these nodes as kill -9 does, all at once."""
        self._dead |= set(names)
        async with asyncio.TaskGroup() as group:
            for node in (self.nodes[name] for name in names):
                group.create_task(server_of(node).stop(None))
                group.create_task(node.running.resources.dialer.__aexit__())

    async def revive(self, name: str, certificate: ServerCertificate | None = None) -> None:
        """Start a killed node again: it keeps its identity, port and layers, and loses its sessions.

        Args:
            name: of the node.
            certificate: a new one, as a new process would have; the old one is kept without.
        """
        node = self.nodes[name]
        node.sessions.close_all("died")
        while len(node.sessions):
            await node.sessions._ended.wait()
        node.sessions.pool.clear()
        node.sessions.draining = False
        resources = node.running.resources
        certificate = certificate or resources.certificate
        assert certificate is not None
        object.__setattr__(resources, "certificate", certificate)
        server, _ = bind("127.0.0.1", resources.port, certificate)
        hello = partial(hello_response, node.registry.identity, digest=certificate.digest)
        context = replace(node.sessions._context, certificate=certificate)
        service = NodeService(context, resources.machine.spans, hello)
        server.add_generic_rpc_handlers((service.handlers(),))
        await server.start()
        resources.machine.server = server
        node.running.host.service = replace(service_of(node), server=server)
        self._dead.remove(name)

    def stall(self, name: str, at: int) -> asyncio.Event:
        """Let a node execute no sweep from number `at` on; the event is set once one waits."""
        return self._stall(name, _Stall(at))

    def stall_replay(self, name: str) -> asyncio.Event:
        """Let a node execute no replay; the event is set once one waits."""
        return self._stall(name, _Stall(None))

    def _stall(self, name: str, stall: _Stall) -> asyncio.Event:
        self._stalled[self.nodes[name].peer_id] = stall
        return stall.arrived

    def go_on(self, name: str) -> None:
        """Undo `stall` and `stall_replay`."""
        node = self.nodes[name]
        self._stalled.pop(node.peer_id)
        for session in node.sessions._open.values():
            session._context.engine.submit(session)

    async def undisturbed(self, prompt: Sequence[int], **options: Unpack[GenerateOptions]) -> tuple[int, ...]:
        """The tokens of an undisturbed run, generated once: its sweeps and hops do not change them."""
        key = (*prompt, *sorted(options.items()))
        if key not in self._undisturbed:
            self._undisturbed[key] = (await self.client.generate(prompt, **options)).tokens
        return self._undisturbed[key]

    def route(self) -> list[str]:
        """The names of the newest session's hops."""
        names = {node.peer_id: name for name, node in self.nodes.items()}
        return [names[PeerId(hop.peer)] for hop in self.chains[-1].route.hops]

    async def until_routed(self, *names: str) -> None:
        """Wait until the newest session goes over these nodes, whether or not they are attached."""

        async def routed() -> bool:
            await asyncio.sleep(0)
            return self.route() == list(names)

        await until(routed)

    async def until_missed(self) -> None:
        """Wait until the client knows that a machine of its newest session is lost."""

        async def missed() -> bool:
            await asyncio.sleep(0)
            return bool(self.chains[-1]._plan.lost)

        await until(missed)

    @contextmanager
    def counted(self) -> Iterator[dict[str, dict[str, int]]]:
        """What each node's recovery counters grew by meanwhile, if they did."""
        before = {name: node.sessions.info().counters for name, node in self.nodes.items()}
        found: dict[str, dict[str, int]] = {}
        yield found
        for name, node in self.nodes.items():
            for one in ("restores", "replays", "catch_ups"):
                growth = getattr(node.sessions.info().counters, one) - getattr(before[name], one)
                if growth:
                    found.setdefault(name, {})[one] = growth

    async def clear(self) -> None:
        """After a test: revive all nodes, wait until they are free, withdraw their records, close their channels."""
        self._stalled.clear()
        for name in list(self._dead):
            await self.revive(name)
        await until_freed(self.nodes.values(), timeout_s=8)
        for node in self.nodes.values():
            node.sessions.pool.check_integrity()
            node.sessions.pool.clear()
        node = self.nodes["a0"]
        listed = await node.registry.records(node.identity.fingerprint, node.identity.num_layers)
        await self.unlist(*(name for name, node in self.nodes.items() if node.peer_id in {one.peer for one in listed}))
        for node in self.nodes.values():
            await node.running.resources.dialer.__aexit__()  # a channel to a killed node waits before it dials again
        await self.client._opener.dialer.__aexit__()
        self.chains.clear()

    @contextmanager
    def patched(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Record the client's chains, and make stalls work."""
        begin, next_run = Chain.begin, HopSession.next_run

        def noted(chain: Chain, state: SessionState) -> None:
            self.chains.append(chain)
            begin(chain, state)

        def stalling(hop: HopSession) -> SweepRun | None:
            stall = self._stalled.get(hop._context.peer)
            if stall is not None and stall.holds(hop):
                stall.arrived.set()
                return None
            return next_run(hop)

        with monkeypatch.context() as patch:
            patch.setattr(Chain, "begin", noted)
            patch.setattr(HopSession, "next_run", stalling)
            yield


@asynccontextmanager
async def killable_nodes() -> AsyncIterator[KillableNodes]:
    """Start the nodes and a client."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # more threads would outlive their test
    # Tests count the sweeps of texts that other tests generated: a draft that adapts needs fewer each time.
    starting = in_process_swarm(TARGET, list(POOL.values()), kv_tokens=8_192)
    async with starting as swarm, swarm.client(draft=DRAFT, adapt=False) as client:
        nodes = dict(zip(POOL, swarm.nodes, strict=True))
        for node in nodes.values():
            node.running.announcing.cancel()  # or it would list itself again
            await engine_of(node).on_thread(int)  # its thread lives as long as the node
        await client.generate("It", max_new_tokens=3, nodes=1)
        pool = KillableNodes(nodes, client)
        await pool.clear()
        yield pool


@asynccontextmanager
async def equally_fast_nodes() -> AsyncIterator[KillableNodes]:
    """Nodes of equal speed, so that tests choose the routes; over gRPC, kills never show as silence."""
    with pytest.MonkeyPatch.context() as patch:
        if not isinstance(asyncio.get_running_loop(), VirtualLoop):  # on which nobody is late
            for module in (swarm.link.link, client.chain.answers):
                patch.setattr(module, "SILENCE_S", 10.0)  # however busy the machine is
        async with killable_nodes() as pool:
            yield pool


def reset_client(swarm: AsyncSwarm, wait_s: float) -> None:
    """Let a client forget the latencies of its nodes, and wait at most `wait_s` for a replacement."""
    swarm._opener = replace(swarm._opener, wait_s=wait_s, nearby=PeerLatency(random.Random(1), _near))


async def _near(records: Sequence[NodeRecord]) -> dict[PeerId, float]:
    return {record.peer: 1.0 for record in records}
